"""``hpcddp doctor loss``: examine a loss by its name and return a diagnosis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from hpcddp.batch.split import divide
from hpcddp.doctor.errors import DoctorError, percent
from hpcddp.doctor.loss.batches import Batch, make_batch
from hpcddp.doctor.loss.call import Loss, blame, found_first, load_loss, load_object, parameters_needed
from hpcddp.doctor.loss.repairs import Repair, repair_for
from hpcddp.doctor.loss.trial import Finding, examine_random, judge_all
from hpcddp.doctor.loss.verdict import Verdict, tolerance_of

_LEAST_RANKS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result of ``hpcddp doctor loss``.

    Args:
        loss: the name that the user wrote.
        finding: the finding that decides.
        world_size: W.
        repair: what makes the loss exact; None if it is exact.
        notes: further observations, one sentence each.
    """

    loss: str
    finding: Finding
    world_size: int
    repair: Repair | None
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the loss."""
        return self.finding.judgement.verdict

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank of the batch that decides."""
        return divide(self.finding.batches[self.finding.worst].samples, self.world_size)


def examine(name: str, *, world_size: int, samples: int | None, data: str | None, directory: Path) -> Diagnosis:
    """Run a loss on batches and on their parts, and return the diagnosis.

    Args:
        name: ``module:function``.
        world_size: W, number of ranks that share a batch.
        samples: samples of a random batch; None = 32, or the size of the user's batches.
        data: ``module:function`` or a file with the user's own batches; None = random batches.
        directory: where modules and files are searched first.

    Raises:
        DoctorError: the loss or the data cannot be loaded, or the loss cannot be run on them.
    """
    if world_size < _LEAST_RANKS:
        raise DoctorError(f"--world-size is {world_size}, and one rank has the whole batch; write 2 or more")
    with _one_thread(), found_first(directory):
        return _examine(name, world_size, samples, data, directory)


def _examine(name: str, world_size: int, samples: int | None, data: str | None, directory: Path) -> Diagnosis:
    loss = Loss(name=name, function=load_loss(name))
    if data is not None:
        if samples is not None:
            raise DoctorError(f"--batch is {samples}, but the batches of --data {data} have a size; leave it out")
        own = load_batches(data, directory=directory)
        finding, notes = _examine_own(loss, own, data, world_size), list[str]()
    else:
        size = 32 if samples is None else samples
        _refuse_small(size, world_size, "--batch")
        finding, notes = examine_random(loss, size, world_size)
    judgement = finding.judgement
    batch = finding.batches[finding.worst]
    return Diagnosis(
        loss=name,
        finding=finding,
        world_size=world_size,
        repair=repair_for(loss, batch, judgement.verdict),
        notes=(*notes, *_notes(finding, batch, world_size)),
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread within the block, which is faster for hundreds of small calls."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_batches(data: str, *, directory: Path) -> list[Batch]:
    """Return the user's own batches, from a function or from a file written by ``torch.save``.

    Raises:
        DoctorError: they cannot be loaded, or are not pairs (outputs, targets).
    """
    path = directory / data
    if path.is_file():
        with blame(f"reading {data} failed"):
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
    elif ":" not in data:
        raise DoctorError(f"--data is {data}, and there is no such file; write the name of a file, or module:function")
    else:
        function = load_object(data, what="a function that returns batches")
        if not callable(function):
            raise DoctorError(f"{data} is a {type(function).__name__}, which cannot be called; name a function")
        with blame(f"{data}() failed"):
            found = function()
    pairs = found if isinstance(found, list) else [found]
    if not pairs:
        raise DoctorError(f"{data} gives no batches; return (outputs, targets) or a list of such pairs")
    return [make_batch(pair, name=data) for pair in pairs]


def _examine_own(loss: Loss, batches: Sequence[Batch], data: str, world_size: int) -> Finding:
    needed = parameters_needed(loss.function)
    fitted = []
    for number, batch in enumerate(batches):
        _refuse_small(batch.samples, world_size, f"batch {number} of {data}")
        fitted.append(replace(batch, arguments=batch.arguments[:1]) if needed == 1 else batch)
    return judge_all(loss, fitted, f"your own, {data}", world_size)


def _refuse_small(samples: int, world_size: int, where: str) -> None:
    if samples < world_size:
        raise DoctorError(
            f"{where} is {samples} samples, fewer than the {world_size} ranks, so that some would have none; "
            f"write {2 * world_size} or more, or a smaller --world-size"
        )


def _notes(finding: Finding, batch: Batch, world_size: int) -> Iterator[str]:
    judgement = finding.judgement
    bad = next((found.bad_share for found in finding.judgements if found.bad_share is not None), None)
    if bad is not None:
        yield (
            f"On a share of {bad} samples it is not finite, though it is on the whole batch: a rank with such a share "
            "makes every parameter NaN."
        )
    if judgement.verdict is Verdict.MEAN and batch.samples % world_size:
        yield (
            f"{world_size} ranks do not divide {batch.samples} samples: plain DDP would be off by "
            f"{percent(judgement.ddp.deviation.gradient)} in the gradient; hpcddp weights the shares and is exact."
        )
    if judgement.changes_arguments:
        yield "It changes its arguments in place, so that outputs and targets are others after the call."
    if judgement.dtype is not torch.float64:
        name = str(judgement.dtype).removeprefix("torch.")
        yield f"It computes in {name}, so that deviations below {tolerance_of(judgement.dtype):g} are not seen."
