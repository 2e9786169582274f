"""``hpcddp doctor loss``: examine a loss on the user's batches or on random ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from hpcddp.doctor.errors import DoctorError, UnusableError, percent
from hpcddp.doctor.loss.batches import even_split, make_batch
from hpcddp.doctor.loss.call import (
    Loss,
    as_doctor_error,
    collective_of,
    first_on_path,
    float64_by_default,
    load_loss,
    load_object,
    parameters_needed,
)
from hpcddp.doctor.loss.finding import Finding, judge_all
from hpcddp.doctor.loss.random_examination import examine_random
from hpcddp.doctor.loss.repairs import Repair, repair_for
from hpcddp.doctor.loss.verdict import Verdict, judged_splits, tolerance_of

_LEAST_RANKS: Final = 2
_RANDOM_SAMPLES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result of ``hpcddp doctor loss``.

    Args:
        finding: the finding that decides.
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
        return self.finding.verdict

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank of the batch that decides."""
        return even_split(self.finding.batch.samples, self.world_size).sizes


def examine(
    name: str, *, world_size: int, samples: int | None, data: str | None, directory: Path, batch_dim: int = 0
) -> Diagnosis:
    """Run a loss on batches and on their parts, and return the diagnosis.

    Args:
        name: ``module:function``.
        world_size: W, number of ranks that share a batch.
        samples: samples of a random batch; None = 32, or the size of the user's batches.
        data: ``module:function`` or a file with the user's own batches; None = random batches.
        directory: where modules and files are searched first.
        batch_dim: the dimension of the outputs of the user's batches that counts samples.

    Raises:
        DoctorError: the loss or the data cannot be loaded, or the loss cannot be run on them.
    """
    if world_size < _LEAST_RANKS:
        raise DoctorError(f"--world-size is {world_size}, and one rank has the whole batch; write 2 or more")
    with _one_thread(), first_on_path(directory), float64_by_default():
        loss = Loss(name=name, function=load_loss(name))
        _refuse_collective(name)
        if data is None and batch_dim:
            raise DoctorError(
                f"--batch-dim is {batch_dim}, and says how batches of --data lie; give some, or leave it out"
            )
        if data is not None and samples is not None:
            raise DoctorError(f"--batch is {samples}, but the batches of --data {data} have a size; leave it out")
        if data is not None:
            finding = _examine_user_batches(loss, data, directory, batch_dim, world_size)
        else:
            size = _RANDOM_SAMPLES if samples is None else samples
            _refuse_small(size, world_size, "--batch")
            finding = examine_random(loss, size, world_size)
        splits = judged_splits(finding.batch.samples, world_size, finding.worst)
        repair = repair_for(loss, finding.batch, finding.verdict, splits=splits)
    return Diagnosis(
        loss=name,
        finding=finding,
        world_size=world_size,
        repair=repair,
        notes=(*finding.notes, *_notes(finding, world_size)),
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread within the block, which is faster for hundreds of small calls."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _refuse_collective(name: str) -> None:
    collective = collective_of(name)
    if collective is not None:
        raise UnusableError(
            f"{name} calls {collective}, in which all ranks take part, so one process cannot judge it; write "
            "train.loss_reduction: global, and check it with hpcddp doctor ddp JOB"
        )


def _examine_user_batches(loss: Loss, data: str, directory: Path, dimension: int, world_size: int) -> Finding:
    """Judge a loss on the user's own batches.

    Args:
        dimension: the dimension of the outputs that counts samples.

    Raises:
        DoctorError: they cannot be loaded, are not pairs (outputs, targets), or are too small.
    """
    needed = parameters_needed(loss.function)
    given = _load_data(data, directory)
    pairs = given if isinstance(given, list) else [given]
    if not pairs:
        raise DoctorError(f"{data} gives no batches; return (outputs, targets) or a list of such pairs")
    batches = [make_batch(pair, name=data, arguments=needed, dimension=dimension) for pair in pairs]
    for number, batch in enumerate(batches):
        _refuse_small(batch.samples, world_size, f"batch {number} of {data}")
    if needed == 1:
        # The loss takes the outputs alone.
        batches = [replace(batch, arguments=batch.arguments[:1]) for batch in batches]
    return judge_all(loss, batches, f"your own, {data}", world_size)


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


def _notes(finding: Finding, world_size: int) -> Iterator[str]:
    judgement = finding.judgement
    bad_shares = [other.bad_share for other in finding.judgements if other.bad_share is not None]
    if bad_shares:
        yield (
            f"On a share of {bad_shares[0]} samples it is not finite, though it is on the whole batch: a rank with "
            "such a share makes every parameter NaN."
        )
    if judgement.verdict is Verdict.MEAN and finding.batch.samples % world_size:
        yield (
            f"{world_size} ranks do not divide {finding.batch.samples} samples: plain DDP would be off by "
            f"{percent(judgement.ddp.deviation.gradient)} in the gradient; hpcddp weights the shares and is exact."
        )
    if judgement.changes_arguments:
        yield "It changes its arguments in place, so that outputs and targets are others after the call."
    if judgement.dtype is not torch.float64:
        name = str(judgement.dtype).removeprefix("torch.")
        yield f"It computes in {name}, so that deviations below {tolerance_of(judgement.dtype):g} are not seen."
