"""``hpcddp doctor loss``: examine a loss on the user's batches or on random ones, and format the diagnosis."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from hpcddp.doctor.errors import DoctorError, NoisyLossError, NoLossError, UnusableError, percent
from hpcddp.doctor.loss.batches import Batch, Kind, even_split, kinds, kinds_with_other_classes, make_batch
from hpcddp.doctor.loss.call import (
    Loss,
    as_doctor_error,
    collective_of,
    found_first,
    ignored_labels,
    load_loss,
    load_object,
    parameters_needed,
)
from hpcddp.doctor.loss.repairs import Repair, repair_for
from hpcddp.doctor.loss.verdict import (
    Deviation,
    Judgement,
    Verdict,
    is_constant,
    judge,
    judged_splits,
    tolerance_of,
)

_LEAST_RANKS: Final = 2


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
        return self.finding.judgement.verdict

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per rank of the batch that decides."""
        return even_split(self.finding.batches[self.finding.worst].samples, self.world_size).sizes


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
    with _one_thread(), found_first(directory):
        return _examine(name, world_size, samples, data, directory, batch_dim)


def _examine(
    name: str, world_size: int, samples: int | None, data: str | None, directory: Path, batch_dim: int
) -> Diagnosis:
    loss = Loss(name=name, function=load_loss(name))
    if (called := collective_of(name)) is not None:
        raise UnusableError(
            f"{name} calls {called}, in which all ranks take part, so one process cannot judge it; write "
            "train.loss_reduction: global, and check it with hpcddp doctor ddp JOB"
        )
    if data is None and batch_dim:
        raise DoctorError(f"--batch-dim is {batch_dim}, and says how batches of --data lie; give some, or leave it out")
    if data is not None:
        if samples is not None:
            raise DoctorError(f"--batch is {samples}, but the batches of --data {data} have a size; leave it out")
        batches = load_batches(
            data, directory=directory, arguments=parameters_needed(loss.function), dimension=batch_dim
        )
        finding = _examine_own(loss, batches, data, world_size)
        notes = list[str]()
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
        repair=repair_for(
            loss, batch, judgement.verdict, splits=judged_splits(batch.samples, world_size, finding.worst)
        ),
        notes=(*notes, *_notes(finding, batch, world_size)),
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


def load_batches(data: str, *, directory: Path, arguments: int | None = None, dimension: int = 0) -> list[Batch]:
    """Return the user's own batches, from a function or from a file written by ``torch.save``.

    Raises:
        DoctorError: they cannot be loaded, or are not pairs (outputs, targets).
    """
    path = directory / data
    if path.is_file():
        with as_doctor_error(f"reading {data} failed"):
            given: Any = torch.load(path, map_location="cpu", weights_only=True)
    elif ":" not in data:
        raise DoctorError(f"--data is {data}, and there is no such file; write the name of a file, or module:function")
    else:
        function = load_object(data, what="a function that returns batches")
        if not callable(function):
            raise DoctorError(f"{data} is a {type(function).__name__}, which cannot be called; name a function")
        with as_doctor_error(f"{data}() failed"):
            given = function()
    pairs = given if isinstance(given, list) else [given]
    if not pairs:
        raise DoctorError(f"{data} gives no batches; return (outputs, targets) or a list of such pairs")
    return [make_batch(pair, name=data, arguments=arguments, dimension=dimension) for pair in pairs]


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
    bad = next((other.bad_share for other in finding.judgements if other.bad_share is not None), None)
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
    if judgement.kept:
        yield (
            f"It keeps {', '.join(judgement.kept)} from call to call. That changed no value here; each rank keeps its "
            "own, and no checkpoint holds it."
        )
    if judgement.dtype is not torch.float64:
        name = str(judgement.dtype).removeprefix("torch.")
        yield f"It computes in {name}, so that deviations below {tolerance_of(judgement.dtype):g} are not seen."


# Words of torch's errors about tensors of different dtypes.
_FORMAT_WORDS: Final = ("dtype", "scalar type", "Double")
_SEEDS: Final = (0, 1, 2)
# Powers of ten, of the smallest and the largest factor.
_SCALES: Final = (-2.0, 1.0)
# Common labels of samples to ignore, besides the number of classes. torch's default is tried last, since every cross
# entropy accepts it.
_IGNORED: Final = (255, 254, 250, -1)
_TORCH_IGNORED: Final = -100
_MOST_REASONS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The judgements of a loss on batches of one kind."""

    data: str
    batches: tuple[Batch, ...]
    judgements: tuple[Judgement, ...]

    @property
    def worst(self) -> int:
        """The index of the judgement that decides: the worst verdict, then the largest deviation."""
        return max(range(len(self.judgements)), key=lambda i: _severity_key(self.judgements[i]))

    @property
    def judgement(self) -> Judgement:
        """The judgement that decides."""
        return self.judgements[self.worst]


def examine_random(loss: Loss, samples: int, world_size: int) -> tuple[Finding, list[str]]:
    """Return the worst finding on the kinds of random batches that the loss accepts, and notes on other kinds.

    Raises:
        UnusableError: the loss accepts no kind, or gives different values for the same batch.
    """
    trial = _Trial(loss, samples, world_size)
    usual = [*kinds(parameters_needed(loss.function), samples)]
    for kind in usual:
        if not kind.one_number:
            trial.take(kind)
    for kind in kinds_with_other_classes(samples):
        if trial.settled:
            break
        trial.take(kind)
    # Many losses read one number per sample as the classes of one sample, so these kinds are tried last.
    if not trial.settled:
        for kind in usual:
            if kind.one_number:
                trial.take(kind)
    return trial.outcome()


class _Trial:
    """Tries a loss on kinds of random batches, one after the other."""

    def __init__(self, loss: Loss, samples: int, world_size: int) -> None:
        self._loss = loss
        self._samples = samples
        self._world_size = world_size
        self.accepted: list[tuple[Kind, Finding]] = []
        self.refused: list[tuple[Kind, UnusableError]] = []

    @property
    def settled(self) -> bool:
        """Whether the loss ran on some kind, even if its result there is no loss."""
        return bool(self.accepted) or any(isinstance(error, NoLossError) for _, error in self.refused)

    def take(self, kind: Kind) -> None:
        """Try a kind.

        Raises:
            NoisyLossError: the loss gives different values for the same batch.
        """
        seeds = _SEEDS[:1] if self.accepted else _SEEDS
        try:
            batches = [kind.batch(self._samples, seed) for seed in seeds]
            self.accepted.append((kind, judge_all(self._loss, batches, kind.name, self._world_size)))
        except NoisyLossError:
            raise
        except UnusableError as error:
            self.refused.append((kind, error))

    def outcome(self) -> tuple[Finding, list[str]]:
        """Return the finding that decides, and a note on a kind with another verdict.

        Raises:
            UnusableError: no kind was accepted.
        """
        if not self.accepted:
            raise self._refusal()
        # Of equal verdicts, one without a nonfinite share decides; of several kinds the first, which is the simplest.
        _, finding = max(
            self.accepted, key=lambda pair: (pair[1].judgement.verdict.severity, pair[1].judgement.bad_share is None)
        )
        verdict = finding.judgement.verdict
        if verdict is Verdict.MEAN:
            if (scaled := self._with_other_scales(self.accepted[0][0])) is not None:
                return scaled, []
            labelled = next((kind for kind, _ in self.accepted if kind.labels is not None), None)
            return (finding, []) if labelled is None else self._with_other_labels(labelled, finding)
        differing = [(kind.name, f.judgement.verdict) for kind, f in self.accepted if f.judgement.verdict != verdict]
        notes = [
            f"On {name} it is {other}: give batches like your own with --data to be sure." for name, other in differing
        ]
        return finding, notes[:1]

    def _with_other_scales(self, kind: Kind) -> Finding | None:
        """Return the finding on samples of very different sizes, if it is another one: a loss may have a threshold.

        The samples are ordered by size, so that the shares differ.
        """
        factors = torch.logspace(*_SCALES, self._samples, dtype=torch.float64)
        drawn = [kind.batch(self._samples, _SEEDS[0])]
        near = [batch for one in drawn if (batch := one.near_targets(factors)) is not None]
        for how, batches in (("of very different sizes", [one.scaled(factors) for one in drawn]), ("near them", near)):
            finding = self._judge(batches, f"{kind.name}, {how}") if batches else None
            if finding is None or finding.judgement.bad_share is not None:
                continue
            if finding.judgement.verdict is not Verdict.MEAN:
                return finding
        return None

    def _with_other_labels(self, kind: Kind, finding: Finding) -> tuple[Finding, list[str]]:
        """Return the finding that decides if some classes have weights, or some labels are ignored."""
        every = self._judge(kind.with_every_class(self._samples), f"{kind.name}, every one of them")
        if every is not None and every.judgement.verdict is not Verdict.MEAN:
            return every, []
        marks = {*ignored_labels(self._loss.function), *_IGNORED, kind.classes} - {_TORCH_IGNORED}
        for label in (*sorted(marks), _TORCH_IGNORED):
            batches = [kind.with_ignored(self._samples, seed, label) for seed in _SEEDS]
            ignoring = self._judge(batches, f"{kind.name}, some of them {label}")
            if ignoring is None or ignoring.judgement.verdict is Verdict.MEAN:
                continue
            if label != _TORCH_IGNORED:
                return ignoring, []
            return finding, [self._note_on_ignored(label, ignoring)]
        return finding, []

    def _note_on_ignored(self, label: int, ignoring: Finding) -> str:
        """Return what a loss that is a mean becomes if some labels are ignored, and the helper for that."""
        judgement = ignoring.judgement
        batch = ignoring.batches[ignoring.worst]
        splits = judged_splits(batch.samples, self._world_size, ignoring.worst)
        repair = repair_for(self._loss, batch, judgement.verdict, splits=splits)
        helper = "" if repair is None else str(repair.helper)
        use = "weighted_mean(sum, number of the others)" if helper == "weighted_mean" else helper
        return (
            f"If labels can be {label}, which torch ignores, it is {judgement.verdict} (with 3 labels in 10 so the "
            f"gradient is off by {percent(judgement.ddp.deviation.gradient)}): use {use}."
        )

    def _judge(self, batches: Sequence[Batch], data: str) -> Finding | None:
        """Return the finding on batches; None if the loss does not accept them."""
        try:
            return judge_all(self._loss, batches, data, self._world_size)
        except UnusableError:
            return None

    def _refusal(self) -> UnusableError:
        """Return the error for a loss that accepts no kind."""
        without_loss = [error for _, error in self.refused if isinstance(error, NoLossError)]
        if without_loss:
            return without_loss[0]
        prefix = f"{self._loss.name} failed: "
        # In the order of the kinds, of which the first are the commonest.
        reasons: dict[str, str] = {}
        for kind, error in self.refused:
            reasons.setdefault(error.message.removeprefix(prefix), kind.name)
        if len(reasons) == 1:
            return self.refused[0][1]
        first = list(reasons.items())[:_MOST_REASONS]
        examples = "; ".join(f"on {name}: {reason}" for reason, name in first)
        return UnusableError(
            f"{self._loss.name} takes none of {len(self.refused)} kinds of random batches ({examples}); give it "
            "batches like your own with --data module:function, which returns (outputs, targets)"
        )


def judge_all(loss: Loss, batches: Sequence[Batch], data: str, world_size: int) -> Finding:
    """Judge a loss on batches in float64, or in float32 if it requires that dtype.

    Raises:
        UnusableError: the loss accepts neither, or its results cannot be compared.
    """
    try:
        return _judge_as(loss, [batch.to(torch.float64) for batch in batches], data, world_size)
    except NoLossError:
        raise
    except UnusableError as error:
        if not any(word in error.message for word in _FORMAT_WORDS):
            raise
    return _judge_as(loss, [batch.to(torch.float32) for batch in batches], data, world_size)


def _judge_as(loss: Loss, batches: Sequence[Batch], data: str, world_size: int) -> Finding:
    for batch in batches:
        _refuse_useless(loss, batch, data)
    judgements = tuple(judge(loss, batch, world_size=world_size, seed=seed) for seed, batch in enumerate(batches))
    return Finding(data=data, batches=tuple(batches), judgements=judgements)


def _refuse_useless(loss: Loss, batch: Batch, data: str) -> None:
    whole = loss.evaluate(batch)
    if not whole.finite:
        what = "its gradient is not finite" if math.isfinite(whole.value) else f"is {whole.value}"
        raise NoLossError(
            f"{loss.name} {what} on a batch of {data} ({batch.describe()}), and nothing can be compared with that; "
            "give it batches like your own with --data module:function"
        )
    if is_constant(whole, batch):
        raise NoLossError(
            f"{loss.name} is {whole.value:.6g} for all outputs (on {data}): its gradient is 0 everywhere, so "
            "that nothing can be learned from it; use the outputs themselves, not their comparison or rounding"
        )


def _severity_key(judgement: Judgement) -> tuple[int, bool, float]:
    # Of equal verdicts, one without a nonfinite share decides; the nonfinite share is reported in a note.
    return judgement.verdict.severity, judgement.bad_share is None, judgement.ddp.deviation.worst


_MEANINGS: Final = {
    Verdict.MEAN: "It is the weighted mean of the losses of the shares: {ranks} ranks train what one process trains.",
    Verdict.SUM: "It is the sum of the losses of the shares: DDP averages them, a gradient {ranks} times too small.",
    Verdict.NOT_DECOMPOSABLE: "It is no mean of the losses of the shares: {ranks} ranks train another loss than one.",
    Verdict.ORDER_DEPENDENT: "It changes when the samples are permuted: it depends on their order.",
}
_ROWS: Final = {
    "order": "whole batch, permuted",
    "even": "even shares",
    "uneven": "uneven shares",
    "permuted": "uneven shares, permuted",
}
_SHOWN_SHARES: Final = 8
_SAME_BELOW: Final = 1e-12


def explain(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text, ending with a newline."""
    judgement = diagnosis.finding.judgement
    lines = [
        f"{diagnosis.loss}: {diagnosis.verdict}",
        _MEANINGS[diagnosis.verdict].format(ranks=diagnosis.world_size),
        "",
        *_table(diagnosis, judgement),
    ]
    if diagnosis.verdict is not Verdict.MEAN:
        lines += ["", *_harm(diagnosis, judgement)]
    if diagnosis.repair is not None:
        helper = diagnosis.repair.helper
        lines += [
            "",
            f"repair: hpcddp.{helper}, because {diagnosis.repair.why}",
            *(f"    {line}" for line in diagnosis.repair.code),
            f"in a job file: that function as train.loss, with train.loss_reduction: {diagnosis.repair.loss_reduction}",
        ]
    if diagnosis.notes:
        lines += ["", *(f"note: {note}" for note in diagnosis.notes)]
    return "\n".join(lines) + "\n"


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as a JSON document."""
    finding = diagnosis.finding
    judgement = diagnosis.finding.judgement
    repair = diagnosis.repair
    batch = finding.batches[finding.worst]
    return {
        "loss": diagnosis.loss,
        "verdict": diagnosis.verdict.value,
        "defect": diagnosis.verdict is not Verdict.MEAN,
        "tried_on": {
            "data": finding.data,
            "shapes": batch.describe(),
            "dtype": str(judgement.dtype).removeprefix("torch."),
            "batches": len(finding.batches),
        },
        "deviations": {name: _deviation(deviation) for name, deviation in judgement.deviations.items()},
        "plain_ddp": {
            "world_size": diagnosis.world_size,
            "global_batch_size": batch.samples,
            "shares": list(diagnosis.shares),
            **{f"{name}_error": value for name, value in _deviation(judgement.ddp.deviation).items()},
            "gradient_ratio": _number(judgement.ddp.ratio),
            "gradient_cosine": _number(judgement.ddp.cosine),
        },
        "repair": None if repair is None else asdict(repair),
        "notes": list(diagnosis.notes),
    }


def _table(diagnosis: Diagnosis, judgement: Judgement) -> list[str]:
    finding = diagnosis.finding
    batch = finding.batches[finding.worst]
    count = f"{len(finding.batches)} batches of " if len(finding.batches) > 1 else ""
    rows = [("against the mean over shares", "value", "gradient")] + [
        (f"  {label}", _off(judgement.deviations[name].value), _off(judgement.deviations[name].gradient))
        for name, label in _ROWS.items()
        if name in judgement.deviations
    ]
    return [
        f"tried on {count}{finding.data}: {batch.describe()}",
        *(f"{first:<30}{second:>12}{third:>12}" for first, second, third in rows),
    ]


def _harm(diagnosis: Diagnosis, judgement: Judgement) -> list[str]:
    ddp = judgement.ddp
    shares = diagnosis.shares
    parts = " + ".join(map(str, shares)) if len(shares) <= _SHOWN_SHARES else f"{max(shares)} each at most"
    lines = [f"plain DDP, {diagnosis.world_size} ranks, a global batch of {sum(shares)} ({parts}):"]
    if math.isnan(ddp.deviation.worst) or math.isnan(ddp.deviation.value):
        return [*lines, "  a share's loss is not finite, and so is every gradient"]
    angle = math.degrees(math.acos(max(-1.0, min(1.0, ddp.cosine))))
    gradient = (
        f"  gradient off by {percent(ddp.deviation.gradient)}: its length is {ddp.ratio:.3f} of the right one, "
        f"its direction {angle:.1f} degrees away"
    )
    return [*lines, gradient, f"  logged loss off by {percent(ddp.deviation.value)}"]


def _off(fraction: float) -> str:
    return "same" if fraction < _SAME_BELOW else percent(fraction)


def _deviation(deviation: Deviation) -> dict[str, float | None]:
    return {"value": _number(deviation.value), "gradient": _number(deviation.gradient)}


def _number(value: float) -> float | None:
    """Return the number, or None if JSON cannot represent it."""
    return value if math.isfinite(value) else None
