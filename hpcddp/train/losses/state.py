"""Whether the value of a loss depends on the calls before it, found by calling it again."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hpcddp.train.errors import UserCodeError
from hpcddp.train.losses.declared import first_rows
from hpcddp.train.user_code import describe

_TOLERANCE: Final = 1e-6
# The text that torch's warnings of an operation without a deterministic algorithm have in common.
_NOT_DETERMINISTIC: Final = "use_deterministic_algorithms"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedCall:
    """The values of a loss on the same samples, before and after a call on some of them.

    Args:
        is_deterministic: whether every operation has used a deterministic algorithm.
    """

    first: float
    again: float
    is_deterministic: bool

    @property
    def is_equal(self) -> bool:
        """Whether the values are equal, with NaN equal to NaN."""
        are_nan = math.isnan(self.first) and math.isnan(self.again)
        return are_nan or math.isclose(self.first, self.again, rel_tol=_TOLERANCE)


def repeat_call(on_batch: Callable[[], Tensor | float], on_part: Callable[[], Tensor | float]) -> RepeatedCall:
    """Call a loss on a batch, on a part of it, and on the batch again, each time with the same random numbers.

    The random number generators stay as they were. Operations use deterministic algorithms where there are some.

    Args:
        on_batch: calls the loss on a copy of the batch, and returns its value, or the values of the samples.
        on_part: calls it on a part of the batch.
    """
    debug_mode = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings(record=True) as caught, _random_numbers_restored():
        warnings.simplefilter("always")
        torch.set_deterministic_debug_mode("warn")
        try:
            first = _evaluate(on_batch)
            # A loss that begins with what it sees first would have the same value on the same samples.
            _evaluate(on_part)
            again = _evaluate(on_batch)
        finally:
            torch.set_deterministic_debug_mode(debug_mode)
    is_deterministic = not any(_NOT_DETERMINISTIC in str(warning.message) for warning in caught)
    return RepeatedCall(first=first, again=again, is_deterministic=is_deterministic)


def refuse_state(name: str, loss: Callable[[Any, Any], Tensor], outputs: object, labels: Tensor) -> str | None:
    """Refuse a loss whose value depends on the calls before it.

    Every rank would keep a state of its own, and no checkpoint holds it.

    Args:
        name: what the job file calls it.
        outputs: of the model, one row for each label.
        labels: at least one.

    Returns:
        A note if the loss could not be judged.

    Raises:
        UserCodeError: it depends on what it keeps.
    """
    samples = len(labels)

    def call(count: int) -> Tensor:
        return loss(first_rows(outputs, count), first_rows(labels, count))

    unknown = f"note: train.loss is {name}; whether its value depends on the calls before is not known"
    try:
        repeated = repeat_call(lambda: call(samples), lambda: call(max(1, samples // 2)))
    except Exception as error:  # noqa: BLE001  the first real call shows what is wrong with the loss itself
        return f"{unknown}, because a call to try it failed: {describe(error)}"
    if repeated.is_equal:
        return None
    values = f"gives {repeated.first:.6g} and, when it is called again, {repeated.again:.6g} for the same samples"
    if not repeated.is_deterministic:
        return (
            f"{unknown}: it {values}, and uses an operation without a deterministic algorithm; `hpcddp doctor loss` "
            "tries it on a CPU"
        )
    raise UserCodeError(
        f"train.loss is {name}, which {values}: its value depends on what it keeps from call to call. Each rank would "
        "keep its own, and no checkpoint holds it; write a loss that keeps nothing, or a training of your own "
        "(entrypoint) that saves it and makes it equal on all ranks"
    )


def _evaluate(call: Callable[[], Tensor | float]) -> float:
    """Return the loss, or the sum of the losses of the samples, with the same random numbers in every call."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  a loss may draw from the global generator
    torch.default_generator.manual_seed(0)
    if _cuda_device():
        torch.cuda.manual_seed(0)
    return float(torch.as_tensor(call(), dtype=torch.float64).detach().sum())


def _cuda_device() -> list[int]:
    """Return the number of the CUDA device in use; nothing if there is none."""
    # torch leaves the function without types.
    is_in_use: Callable[[], bool] = torch.cuda.is_initialized
    return [torch.cuda.current_device()] if is_in_use() else []


@contextmanager
def _random_numbers_restored() -> Iterator[None]:
    """Restore the generators of Python, numpy and torch after the block."""
    python = random.getstate()
    arrays = np.random.get_state()  # noqa: NPY002  as above
    try:
        with torch.random.fork_rng(devices=_cuda_device()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002  as above
