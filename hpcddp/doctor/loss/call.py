"""Evaluate the user's loss and its gradients on a batch; import a loss and inspect its signature."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not marked so
from torch.utils._python_dispatch import TorchDispatchMode

from hpcddp.doctor.errors import CannotJudgeError, DoctorError, NoLossError, UnusableError
from hpcddp.doctor.loss.batches import Batch, map_tree
from hpcddp.train.buffers import as_real
from hpcddp.train.user_code import describe

_SEED: Final = 20_140_612
# torch's warning when shapes differ and are broadcast, which is an error in a loss.
_MISMATCH: Final = "Using a target size"
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Value and gradients of a loss on a batch.

    Args:
        gradients: with respect to every output, float64, one row per sample; complex numbers as pairs.
        parameter_gradients: with respect to the loss's own parameters.
        dtype: of the value as the loss returns it.
    """

    value: float
    gradients: tuple[Tensor, ...]
    parameter_gradients: tuple[Tensor, ...]
    dtype: torch.dtype

    @property
    def finite(self) -> bool:
        """Whether value and gradients are finite."""
        gradients = (*self.gradients, *self.parameter_gradients)
        return math.isfinite(self.value) and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The user's loss, ready to be called."""

    name: str
    function: Callable[..., Any]

    def evaluate(self, batch: Batch, *, seed: int = _SEED) -> Evaluation:
        """Call the loss on a copy of a batch and differentiate it.

        Args:
            seed: seeds torch's generator.

        Raises:
            UnusableError: the loss raises, or does not return a scalar with a gradient.
        """
        leaves: list[Tensor] = []

        def copy_output(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                return leaf
            leaves.append(leaf.detach().clone().requires_grad_())
            # Like a model's output it is no leaf, so that a loss may change it in place.
            return leaves[-1].clone()

        outputs, *targets = batch.arguments
        arguments = [map_tree(outputs, copy_output), *(map_tree(target, _copy_tensor) for target in targets)]
        parameters = []
        if isinstance(self.function, nn.Module):
            parameters = [parameter for parameter in self.function.parameters() if parameter.requires_grad]
        with (
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            as_doctor_error(f"{self.name} failed", UnusableError),
        ):
            torch.manual_seed(seed)
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=_MISMATCH)
            loss = _require_scalar(self.name, self.function(*arguments))
            found = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True, materialize_grads=True)
        gradients = [as_real(gradient).double() for gradient in found]
        return Evaluation(
            value=float(loss.detach().double()),
            gradients=tuple(map(batch.rows_first, gradients[: len(leaves)])),
            parameter_gradients=tuple(gradients[len(leaves) :]),
            dtype=loss.dtype,
        )

    def refuse_collectives(self, batch: Batch) -> None:
        """Refuse a loss that calls a collective, in which all ranks take part.

        Raises:
            CannotJudgeError: it does.
        """
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            with _CollectivesRefused():  # type: ignore[no-untyped-call]  # torch leaves its base class without types
                self.evaluate(batch)
        except UnusableError as error:
            if isinstance(error.__cause__, _CollectiveError):
                raise CannotJudgeError(
                    f"{self.name} calls a collective, in which all ranks take part, so one process cannot judge it; "
                    "write train.loss_reduction: global, and check it with hpcddp doctor ddp JOB"
                ) from None
        finally:
            dist.destroy_process_group()


class _CollectiveError(Exception):
    """A collective was called."""


class _CollectivesRefused(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as above
    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  of any operation
        if function.namespace == "c10d":
            raise _CollectiveError
        return function(*args, **(kwargs or {}))


def _copy_tensor(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _require_scalar(name: str, loss: object) -> Tensor:
    """Return the loss if it is a scalar with a gradient.

    Raises:
        NoLossError: it is something else.
    """
    if not isinstance(loss, Tensor):
        raise NoLossError(f"{name} returns a {type(loss).__name__}, no tensor; return the loss alone, as torch made it")
    if loss.dim() != 0:
        in_job_file = " (in a job file: train.loss_reduction: per_sample)" if loss.dim() == 1 else ""
        raise NoLossError(
            f"{name} returns a tensor of shape {tuple(loss.shape)}, and a loss is a scalar; return its mean, or name "
            f"a function that does{in_job_file}"
        )
    if not loss.requires_grad:
        raise NoLossError(
            f"{name} returns a number without a gradient: it does not depend on the outputs, or loses them on the way "
            "(detach, item, argmax, counts, no_grad), so that nothing can be learned from it; return a function of the "
            "outputs"
        )
    return loss


def load_object(name: str, *, what: str) -> object:
    """Import ``module:name``.

    Raises:
        DoctorError: the name is malformed, or cannot be imported.
    """
    module_name, _, path = name.partition(":")
    if not (module_name and path):
        raise DoctorError(f"{name!r} does not name {what}; write module:function, for example losses:dice_loss")
    way_out = f"run this in the folder that holds the module, and write the name of {what} in it"
    with as_doctor_error(f"importing {name} failed ({way_out})"):
        value: object = importlib.import_module(module_name)
        for part in path.split("."):
            value = getattr(value, part)
    return value


def load_loss(name: str) -> Callable[..., Any]:
    """Import a loss: a function, a class without constructor arguments, or a function that returns the loss.

    Raises:
        DoctorError: the loss cannot be imported, created or called.
    """
    loss: Any = load_object(name, what="a loss")
    if isinstance(loss, type) or (inspect.isfunction(loss) and arguments_needed(loss) == 0):
        with as_doctor_error(f"{name}() failed, which should return the loss"):
            loss = loss()
    if not callable(loss):
        raise DoctorError(f"{name} is a {type(loss).__name__}, which cannot be called; write the name of a loss")
    return loss.double() if isinstance(loss, nn.Module) else loss


def arguments_needed(function: Callable[..., Any]) -> int | None:
    """Return the number of required positional arguments; None if it is not known."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in _POSITIONAL and p.default is p.empty for p in parameters)


@contextlib.contextmanager
def as_doctor_error(sentence: str, kind: type[DoctorError] = DoctorError) -> Iterator[None]:
    """Turn any failure of the block into an error of ``kind`` that begins with ``sentence``."""
    try:
        yield
    except DoctorError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{sentence}: {describe(error)}") from error
