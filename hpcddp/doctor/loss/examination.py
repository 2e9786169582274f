"""``hpcddp doctor loss``: examine a loss on plain batches or on the user's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from hpcddp.doctor.errors import CannotJudgeError, DoctorError, NoLossError, UnusableError
from hpcddp.doctor.loss.batches import Batch, make_batch, plain_batches
from hpcddp.doctor.loss.call import Loss, arguments_needed, as_doctor_error, first_on_path, load_loss, load_object
from hpcddp.doctor.loss.verdict import Judgement, Verdict, judge

_LEAST_RANKS: Final = 2
_PLAIN_SAMPLES: Final = 32
# Words of torch's errors about tensors of different dtypes.
_DTYPE_WORDS: Final = ("dtype", "scalar type", "Double")
_PLAIN_NOTE: Final = (
    "If some labels are ignored or padded, give batches like your own with --data: the verdict may be another one."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result of ``hpcddp doctor loss``.

    Args:
        judgement: the one that decides: the worst of all batches.
        notes: further observations, one sentence each.
    """

    loss: str
    judgement: Judgement
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the loss."""
        return self.judgement.verdict


def examine(
    name: str, *, world_size: int, samples: int | None, data: str | None, directory: Path, batch_dim: int = 0
) -> Diagnosis:
    """Run a loss on batches and on their parts, and return the diagnosis.

    Args:
        name: ``module:function``.
        world_size: W, number of ranks that share a batch.
        samples: samples of a plain batch; None = 32, or the size of the user's batches.
        data: ``module:function`` or a file with the user's own batches; None = plain batches.
        directory: where modules and files are searched first.
        batch_dim: the dimension of the outputs of the user's batches that counts samples.

    Raises:
        DoctorError: the loss or the data cannot be loaded, or the loss cannot be judged on them.
    """
    if world_size < _LEAST_RANKS:
        raise DoctorError(f"--world-size is {world_size}, and one rank has the whole batch; write 2 or more")
    if data is None and batch_dim:
        raise DoctorError(f"--batch-dim is {batch_dim}, and says how batches of --data lie; give some, or leave it out")
    if data is not None and samples is not None:
        raise DoctorError(f"--batch is {samples}, but the batches of --data {data} have a size; leave it out")
    with _torch_settings(), first_on_path(directory):
        loss = Loss(name=name, function=load_loss(name))
        if data is None:
            size = _PLAIN_SAMPLES if samples is None else samples
            _refuse_small(size, world_size, "--batch")
            judgements = _judge_plain(loss, size, world_size)
        else:
            batches = _own_batches(loss, data, directory, batch_dim, world_size)
            judgements = [_judge_in_some_dtype(loss, batch, world_size) for batch in batches]
    # Of equal verdicts the first one decides.
    worst = max(judgements, key=lambda judgement: judgement.verdict.severity)
    return Diagnosis(loss=name, judgement=worst, notes=tuple(_notes(worst, judgements, is_plain=data is None)))


@contextlib.contextmanager
def _torch_settings() -> Iterator[None]:
    """Compute in float64, and on one thread, which is faster for many small calls."""
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    # The process group of one process, with which collectives are noticed, needs no network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def _judge_plain(loss: Loss, samples: int, world_size: int) -> list[Judgement]:
    """Judge a loss on the plain kinds of batch that it accepts.

    Raises:
        UnusableError: it accepts none, or nothing can be compared on any.
    """
    judgements: list[Judgement] = []
    refused: dict[str, UnusableError] = {}
    for batch in plain_batches(samples):
        try:
            judgements.append(_judge_in_some_dtype(loss, batch, world_size))
        except CannotJudgeError:
            raise
        except UnusableError as error:
            refused[batch.data] = error
    if judgements:
        return judgements
    kinds: dict[str, str] = {}
    for kind, refusal in refused.items():
        if isinstance(refusal, NoLossError):
            # It runs, and what it returns is wrong.
            raise refusal
        kinds.setdefault(refusal.message.removeprefix(f"{loss.name} failed: "), kind)
    reasons = "; ".join(f"on {kind}: {reason}" for reason, kind in kinds.items())
    raise UnusableError(
        f"{loss.name} takes none of the plain kinds of batch ({reasons}); give it batches like your own with --data "
        "module:function, which returns (outputs, targets)"
    )


def _judge_in_some_dtype(loss: Loss, batch: Batch, world_size: int) -> Judgement:
    """Judge a loss on a batch in float64, or in float32 if it requires that dtype.

    Raises:
        UnusableError: the loss accepts neither, or its results cannot be compared.
    """
    try:
        return judge(loss, batch.to(torch.float64), world_size=world_size)
    except NoLossError:
        raise
    except UnusableError as error:
        if not any(word in error.message for word in _DTYPE_WORDS):
            raise
    return judge(loss, batch.to(torch.float32), world_size=world_size)


def _own_batches(loss: Loss, data: str, directory: Path, dimension: int, world_size: int) -> list[Batch]:
    """Return the user's own batches.

    Args:
        dimension: the dimension of the outputs that counts samples.

    Raises:
        DoctorError: they cannot be loaded, are not pairs (outputs, targets), or are too small.
    """
    given = _load_data(data, directory)
    pairs = given if isinstance(given, list) else [given]
    if not pairs:
        raise DoctorError(f"{data} gives no batches; return (outputs, targets) or a list of such pairs")
    needed = arguments_needed(loss.function)
    batches = [make_batch(pair, name=data, arguments=needed, dimension=dimension) for pair in pairs]
    for number, batch in enumerate(batches):
        _refuse_small(batch.samples, world_size, f"batch {number} of {data}")
    return batches


def _load_data(data: str, directory: Path) -> object:
    """Return what a function gives, or what is in a file written by ``torch.save``.

    Raises:
        DoctorError: it cannot be loaded.
    """
    path = directory / data
    if path.is_file():
        with as_doctor_error(f"reading {data} failed"):
            return torch.load(path, map_location="cpu", weights_only=True)
    if ":" not in data:
        raise DoctorError(f"--data is {data}, and there is no such file; write the name of a file, or module:function")
    function = load_object(data, what="a function that returns batches")
    if not callable(function):
        raise DoctorError(f"{data} is a {type(function).__name__}, which cannot be called; name a function")
    with as_doctor_error(f"{data}() failed"):
        return function()


def _refuse_small(samples: int, world_size: int, where: str) -> None:
    if samples < world_size:
        raise DoctorError(
            f"{where} is {samples} samples, fewer than the {world_size} ranks, so that some would have none; "
            f"write {2 * world_size} or more, or a smaller --world-size"
        )


def _notes(worst: Judgement, judgements: Sequence[Judgement], *, is_plain: bool) -> Iterator[str]:
    for judgement in judgements:
        if judgement.verdict is not worst.verdict:
            data = judgement.batch.data
            yield f"On {data} it is {judgement.verdict}: give batches like your own with --data to be sure."
            return
    if is_plain and worst.verdict is Verdict.MEAN:
        yield _PLAIN_NOTE
