"""Compare a run that met a fault with the undisturbed one: what they have reported, and what they have saved."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcddp.doctor.tensors import TensorDifference, differences
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import open_regular
from hpcddp.run.metrics import MetricsLine

if TYPE_CHECKING:
    import torch

    from hpcddp.doctor.tensors import Values

_SAFETENSORS: Final = ".safetensors"
_FIRST_BYTES: Final = (b"PK\x03\x04", b"\x80")
"""How the files of torch.save begin: an archive, or a pickle of older versions."""
GENERATORS: Final = re.compile(r"rng|random|generator|seed", re.IGNORECASE)
"""Names of the states of random generators: they may differ although nothing is drawn from them."""
MEASURED: Final = re.compile(
    r"(^|[_/.-])(time|times|duration|elapsed|eta|speed|throughput|memory|mem|fps|seconds|hours|utili[sz]ation)"
    r"($|[_/.-])|_m?s$|per_s(ec|econd)?\b",
    re.IGNORECASE,
)
"""Names of what is measured of the machine, which differs from run to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file with tensors, as far as its first bytes show.

    Args:
        name: its path below the run directory or the project's copy, which two runs have in common.
        time: when it was written, in nanoseconds since the epoch.
    """

    path: Path
    name: str
    time: int


def saved_files(run: RunDirectory, copy: Path, *, since: int) -> list[SavedFile]:
    """Return the files with tensors that a run has written, the oldest first.

    Args:
        copy: the copy of the project in which its program runs.
        since: nanoseconds since the epoch; older files are those of the project.
    """
    # These directories of a run hold no file of the user's program.
    records = {run.submitit, run.attempts, run.tensorboard, run.wandb, run.trackers, run.path / "reserve"}
    files = [*_files_below(run.path, skipped=records), *_files_below(copy, skipped=set())]
    return sorted((file for file in files if file.time >= since), key=lambda file: (file.time, file.name))


def _files_below(folder: Path, *, skipped: set[Path]) -> Iterator[SavedFile]:
    for parent, folders, names in os.walk(folder):
        # A name that begins with a dot is that of a file or directory that is being written.
        folders[:] = [name for name in folders if Path(parent, name) not in skipped and not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            with suppress(OSError):
                if not name.startswith(".") and _may_hold_tensors(path):
                    yield SavedFile(path=path, name=str(path.relative_to(folder)), time=path.stat().st_mtime_ns)


def _may_hold_tensors(path: Path) -> bool:
    """Return whether a file may hold tensors.

    Raises:
        OSError: it is no regular file, or cannot be read.
    """
    with open_regular(path) as (stream, _):
        return path.suffix == _SAFETENSORS or stream.read(4).startswith(_FIRST_BYTES)


def newest_to_damage(files: list[SavedFile]) -> SavedFile | None:
    """Return the newest saved file, but not one with states of generators alone; None without any."""
    candidates = [file for file in files if not GENERATORS.search(Path(file.name).name)]
    return candidates[-1] if candidates else None


def read_values(file: SavedFile) -> Values:
    """Return the tensors and numbers of a file by their path in it (``optimizer.state.0.exp_avg``), on the CPU.

    Raises:
        ValueError: the file is damaged, or cannot be loaded without running code of its own.
    """
    try:
        # torch warns of pickles that it does not read.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = _content_of(file.path)
    except Exception as error:  # a damaged file, or one of another library, raises anything
        raise ValueError(f"{file.name} cannot be loaded ({type(error).__name__})") from error
    return dict(_flat(content, ""))


def _content_of(path: Path) -> object:
    import torch

    if path.suffix == _SAFETENSORS:
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _flat(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor | float]]:  # noqa: ANN401  what a file holds
    import torch

    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _flat(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _flat(entry, f"{name}.{number}" if name else str(number))
    elif isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, int | float):
        yield name, float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDifference:
    """A saved value that two runs do not share.

    Args:
        file: the name of the file.
    """

    file: str
    value: TensorDifference

    def __str__(self) -> str:
        """Return it in words."""
        largest = self.value.largest
        by = f"by at most {largest:.3g}" if math.isfinite(largest) else "in its shape, or is not finite"
        return f"{self.value.name} in {self.file} differs {by}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedComparison:
    """The files that two runs share.

    Args:
        files: how many files were compared.
        differences: the values that differ, those of the oldest file first.
        unreadable: the names of the files that cannot be loaded.
    """

    files: int
    differences: tuple[SavedDifference, ...]
    unreadable: tuple[str, ...]


def compare_saved(reference: list[SavedFile], disturbed: list[SavedFile]) -> SavedComparison:
    """Compare the files of the same names, value by value. States of generators and measured times are left out."""
    by_name = {file.name: file for file in disturbed}
    compared = 0
    found: list[SavedDifference] = []
    unreadable: list[str] = []
    for file in reference:
        if file.name not in by_name:
            continue
        try:
            values = {name: value for name, value in read_values(file).items() if _is_compared(file.name, name)}
            pairs = differences(values, read_values(by_name[file.name]))
            found += [SavedDifference(file=file.name, value=value) for value in pairs]
            compared += 1
        except ValueError:
            unreadable.append(file.name)
    return SavedComparison(files=compared, differences=tuple(found), unreadable=tuple(unreadable))


def _is_compared(file: str, name: str) -> bool:
    return not GENERATORS.search(f"{file}.{name}") and not MEASURED.search(name)


Metrics = Mapping[tuple[int, str], float]
"""What was measured, by step and name."""

_LARGEST_ROUNDING: Final = 1e-5
"""The largest relative difference that is taken for rounding: of float32, over the few steps of a rehearsal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """A metric that differs.

    Args:
        expected: its value in the undisturbed run.
        found: its value in the disturbed one.
    """

    step: int
    name: str
    expected: float
    found: float

    @property
    def relative(self) -> float:
        """The difference over the value in the undisturbed run."""
        return abs(self.found - self.expected) / (abs(self.expected) or 1.0)

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.name} of step {self.step} is {self.found:.9g}, and {self.expected:.9g} without the fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a run has reported.

    Args:
        before: the lines of its metrics before the fault; of an undisturbed run all of them.
        after: the lines after the resumption.
        losses_before: the first losses that rank 0 has printed in its first attempt, as printed.
        losses_after: the same of its second attempt.
        parameters_sha256: the digest of the trained parameters that a built-in training reports; None without one.
    """

    before: Sequence[MetricsLine]
    after: Sequence[MetricsLine] = ()
    losses_before: Sequence[str] = ()
    losses_after: Sequence[str] = ()
    parameters_sha256: str | None = None

    @property
    def first_step_after(self) -> int | None:
        """The first step of the training after the resumption; None if none was reported."""
        return next(iter(training_steps(self.after)), None)

    def steps_repeated(self) -> int | None:
        """Return how many reported steps were computed again; None if steps are not reported."""
        first = self.first_step_after
        if first is None:
            return None
        return sum(step >= first for step in training_steps(self.before))


def training_steps(lines: Iterable[MetricsLine]) -> list[int]:
    """Return the steps of the training that lines report, each once, in their order."""
    return list(dict.fromkeys(line.step for line in lines if not line.evaluations()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a disturbed run differs from the undisturbed one.

    Args:
        metrics: the metrics that differ, in the order in which they were reported.
        saved: the comparison of what they have saved.
        same_parameters: whether the digests of the parameters agree; None where there is none.
        starts_over: whether the second attempt began at the beginning.
    """

    metrics: Sequence[MetricDifference]
    saved: SavedComparison
    same_parameters: bool | None
    starts_over: bool

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.metrics and not self.saved.differences and self.same_parameters is not False

    @property
    def is_rounding(self) -> bool:
        """Whether all that differs is as small as the rounding of sums in another order."""
        if self.same_parameters is False and not self.saved.differences:
            # A digest does not say by how much.
            return False
        relative = [difference.relative for difference in self.metrics]
        relative += [difference.value.relative for difference in self.saved.differences]
        return all(number <= _LARGEST_ROUNDING for number in relative)

    def sentences(self) -> Iterator[str]:
        """Yield the differences in words."""
        if self.metrics:
            yield str(self.metrics[0])
        if self.saved.differences:
            others = len(self.saved.differences) - 1
            sentence = str(self.saved.differences[0])
            if others:
                sentence += f", and {others} others differ"
            yield sentence
        elif self.same_parameters is False:
            yield "the parameters differ"


def compare(reference: Course, disturbed: Course, saved: SavedComparison) -> Comparison:
    """Compare two runs.

    Args:
        reference: the undisturbed run.
        disturbed: the run that met a fault.
        saved: the comparison of what they have saved.
    """
    same_parameters: bool | None = None
    if reference.parameters_sha256 is not None:
        same_parameters = reference.parameters_sha256 == disturbed.parameters_sha256
    return Comparison(
        metrics=list(_metric_differences(_metrics_of(reference.before), disturbed)),
        saved=saved,
        same_parameters=same_parameters,
        starts_over=_starts_over(reference, disturbed),
    )


def _metric_differences(expected: Metrics, disturbed: Course) -> Iterator[MetricDifference]:
    for lines in (disturbed.before, disturbed.after):
        for (step, name), found in _metrics_of(lines).items():
            value = expected.get((step, name))
            if value is not None and value != found:
                yield MetricDifference(step=step, name=name, expected=value, found=found)


def _metrics_of(lines: Iterable[MetricsLine]) -> Metrics:
    """Return what lines report that depends on the training alone; the last line of a step counts."""
    return {
        (line.step, name): value
        for line in lines
        for name, value in line.numbers().items()
        if not MEASURED.search(name)
    }


def _starts_over(reference: Course, disturbed: Course) -> bool:
    first = disturbed.first_step_after
    steps = training_steps(reference.before)
    if first is not None and steps:
        done = training_steps(disturbed.before)
        return first <= steps[0] and len(done) > 1
    # Three losses with all their digits are not equal by chance.
    return len(set(disturbed.losses_after)) > 1 and disturbed.losses_after == reference.losses_before
