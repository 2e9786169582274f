"""``hpcddp doctor loss``: examine a loss on plain batches or on the user's own, and report."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from hpcddp.doctor.errors import CannotJudgeError, DoctorError, NoLossError, UnusableError, percent
from hpcddp.doctor.loss.batches import Batch, make_batch, plain_batches
from hpcddp.doctor.loss.call import Loss, arguments_needed, as_doctor_error, load_loss, load_object
from hpcddp.doctor.loss.verdict import Ddp, Deviation, Judgement, Verdict, judge
from hpcddp.run.metrics import finite_number

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
    with _settings(directory):
        loss = Loss(name=name, function=load_loss(name))
        if data is None:
            size = _PLAIN_SAMPLES if samples is None else samples
            _refuse_small(size, world_size, "--batch")
            judgements = _judge_plain(loss, size, world_size)
        else:
            batches = _own_batches(loss, data, directory, batch_dim, world_size)
            judgements = [_judge_in_some_dtype(loss, batch, world_size) for batch in batches]
    # Of equal verdicts the first one decides.
    worst = max(judgements, key=lambda judgement: list(Verdict).index(judgement.verdict))
    return Diagnosis(loss=name, judgement=worst, notes=tuple(_notes(worst, judgements, is_plain=data is None)))


@contextlib.contextmanager
def _settings(directory: Path) -> Iterator[None]:
    """Import from ``directory`` first; compute in float64, and on one thread, which is faster for many small calls."""
    path = [*sys.path]
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    # The process group of one process, with which collectives are noticed, needs no network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.path.insert(0, str(directory))
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        sys.path[:] = path
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advice:
    """What a verdict means, and what makes such a loss exact.

    Args:
        helpers: the helpers of hpcddp, each with its use.
        loss_reduction: ``train.loss_reduction`` of a job with the exact loss.
    """

    meaning: str
    helpers: dict[str, str]
    loss_reduction: str = "global"


_ADVICE: Final = {
    Verdict.MEAN: _Advice(
        meaning="It is the mean over the samples: {ranks} ranks train what one process trains.",
        helpers={},
        loss_reduction="mean",
    ),
    Verdict.SUM: _Advice(
        meaning="It is the sum over the samples: DDP averages over ranks, a gradient {ranks} times too small.",
        helpers={"DeclaredLoss": "with reduction=Reduction.SUM, in a loop of your own"},
        loss_reduction="sum",
    ),
    Verdict.WEIGHTED_MEAN: _Advice(
        meaning="It is divided by weights or a count that differ between ranks: {ranks} ranks train another loss "
        "than one.",
        helpers={"weighted_mean": "of the sum over this rank's samples and of what divides it"},
    ),
    Verdict.NOT_DECOMPOSABLE: _Advice(
        meaning="It is no mean of the losses of the shares: {ranks} ranks train another loss than one.",
        helpers={
            "additive_loss": "if it is a function of few sums over samples, such as a ratio or a root",
            "gather_with_grad": "if it compares, sorts or selects samples, or depends on their order",
        },
    ),
}
_SPLIT_LABELS: Final = {
    "order": "whole batch, permuted",
    "even": "even shares",
    "uneven": "uneven shares",
    "permuted": "uneven shares, permuted",
}
_SAME_BELOW: Final = 1e-12


def explain(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text, ending with a newline."""
    judgement = diagnosis.judgement
    advice = _ADVICE[diagnosis.verdict]
    lines = [
        f"{diagnosis.loss}: {diagnosis.verdict}",
        advice.meaning.format(ranks=len(judgement.ddp.shares)),
        "",
        f"tried in {_dtype_name(diagnosis)} on {judgement.batch.data}: {judgement.batch.describe()}",
        _table_row("against the mean over shares", "value", "gradient"),
    ]
    for name, label in _SPLIT_LABELS.items():
        deviation = judgement.deviations[name]
        lines.append(_table_row(f"  {label}", _describe_error(deviation.value), _describe_error(deviation.gradient)))
    if diagnosis.verdict is not Verdict.MEAN:
        lines += ["", *_ddp_lines(judgement.ddp), ""]
        lines += [f"use hpcddp.{helper} {use}" for helper, use in advice.helpers.items()]
        lines.append(f"in a job file: train.loss_reduction: {advice.loss_reduction}")
    lines += [f"\nnote: {note}" for note in diagnosis.notes]
    return "\n".join(lines) + "\n"


def _dtype_name(diagnosis: Diagnosis) -> str:
    return str(diagnosis.judgement.dtype).removeprefix("torch.")


def _table_row(label: str, value: str, gradient: str) -> str:
    return f"{label:<30}{value:>12}{gradient:>12}"


def _describe_error(fraction: float) -> str:
    return "same" if fraction < _SAME_BELOW else percent(fraction)


def _ddp_lines(ddp: Ddp) -> list[str]:
    title = f"plain DDP, {len(ddp.shares)} ranks, a global batch of {sum(ddp.shares)}:"
    if math.isinf(ddp.deviation.worst):
        return [title, "  a share's loss is not finite, and so is every gradient"]
    angle = math.degrees(math.acos(max(-1.0, min(1.0, ddp.cosine))))
    gradient = (
        f"  gradient off by {percent(ddp.deviation.gradient)}: its length is {ddp.ratio:.3f} of the right one, "
        f"its direction {angle:.1f} degrees away"
    )
    return [title, gradient, f"  logged loss off by {percent(ddp.deviation.value)}"]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as a JSON document."""
    judgement = diagnosis.judgement
    ddp = judgement.ddp
    advice = _ADVICE[diagnosis.verdict]
    return {
        "loss": diagnosis.loss,
        "verdict": diagnosis.verdict.value,
        "defect": diagnosis.verdict is not Verdict.MEAN,
        "tried_on": {
            "data": judgement.batch.data,
            "shapes": judgement.batch.describe(),
            "dtype": _dtype_name(diagnosis),
        },
        "deviations": {name: _deviation_as_json(deviation) for name, deviation in judgement.deviations.items()},
        "plain_ddp": {
            "world_size": len(ddp.shares),
            "global_batch_size": sum(ddp.shares),
            "shares": list(ddp.shares),
            "value_error": finite_number(ddp.deviation.value),
            "gradient_error": finite_number(ddp.deviation.gradient),
            "gradient_ratio": finite_number(ddp.ratio),
            "gradient_cosine": finite_number(ddp.cosine),
        },
        "helpers": list(advice.helpers),
        "loss_reduction": advice.loss_reduction,
        "notes": list(diagnosis.notes),
    }


def _deviation_as_json(deviation: Deviation) -> dict[str, float | None]:
    return {"value": finite_number(deviation.value), "gradient": finite_number(deviation.gradient)}
