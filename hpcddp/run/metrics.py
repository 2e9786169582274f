"""Plan and metrics of a training (``plan.json``, ``metrics.jsonl``), and the position of each tracker in them.

A command and an ``entrypoint`` write lines of their own, by ``hpcddp.log`` or into the file that
``HPCDDP_METRICS_FILE`` names. Such a line may hold anything, and the step goes back where a later attempt has resumed.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from hpcddp.packages import is_installed
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import (
    LONGEST_LINE,
    NotRegularError,
    open_lines,
    open_regular,
    why_unreadable,
    write_bytes,
    write_lines,
)
from hpcddp.run.record import (
    FORMAT,
    LARGEST_RECORD,
    LATEST_TIME,
    Lines,
    Record,
    RecordError,
    parse_lines,
    read_last_lines,
    read_record,
    write_record,
)

if TYPE_CHECKING:
    from hpcddp.jobfile.fields import Best
    from hpcddp.jobfile.sections import Trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord(Record):
    """The plan of a job that states a batch.

    Args:
        facts: all else that ``hpcddp plan --json`` prints, by name.
        steps_per_epoch: optimizer steps; None if the task counts the training data.
        total_steps: of the whole training; None like ``steps_per_epoch``.
    """

    ADVICE: ClassVar[str] = "without it the number of all steps is not known; everything else works"

    facts: Mapping[str, Any] = field(default_factory=dict)
    steps_per_epoch: int | None = None
    total_steps: int | None


def read_plan(run: RunDirectory) -> PlanRecord | None:
    """Return the plan of a run; None before there is one, and for a job that states no batch.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(run.plan, PlanRecord)


def write_plan_record(run: RunDirectory, document: Mapping[str, Any]) -> None:
    """Write the plan of a run.

    Args:
        run: the run.
        document: what ``hpcddp plan --json`` prints.
    """
    write_record(run.plan, PlanRecord.from_document({"format": FORMAT, **document}))


_LARGEST: Final = 1 << 53
_LONGEST_NAME: Final = 100
EVALUATION_PREFIXES: Final = ("val", "valid", "validation", "eval", "evaluation", "dev", "test")
"""The first words of the names of metrics of an evaluation."""
_EVALUATION: Final = re.compile(rf"({'|'.join(EVALUATION_PREFIXES)})[_/.-](?!samples$|s$)")
# The beginnings of these names, as they stand in a file.
_NEEDLES: Final = (b'"val', b'"eval', b'"dev', b'"test')


def is_evaluation(name: str) -> bool:
    """Return whether a name is that of a metric of an evaluation: ``val_accuracy``, ``eval/f1``."""
    return _EVALUATION.match(name) is not None


def curve_name(name: str) -> str:
    """Return the name under which trackers show a metric of an evaluation: ``val/accuracy`` for ``val_accuracy``."""
    match = _EVALUATION.match(name)
    return name if match is None else f"{match[1]}/{name[match.end() :]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine(Record):
    """What was measured at a step. Code of the user's own may log what it likes.

    Args:
        step: optimizer steps done.
        time: when, in seconds since the epoch; an evaluation has no time of its own.
        facts: what was measured, by name.
    """

    ADVICE: ClassVar[str] = "its line is left out"
    IS_VERSIONED: ClassVar[bool] = False

    step: int
    time: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.step <= _LARGEST:
            raise ValueError(f"its step is not between 0 and {_LARGEST}")
        if self.time is not None and not 0 <= self.time < LATEST_TIME:
            raise ValueError("its time is no time")

    def number(self, name: str) -> float | None:
        """Return a measured number; None if it was not measured, or is not a finite number."""
        return finite_number(self.facts.get(name))

    def numbers(self) -> dict[str, float]:
        """Return all finite numbers whose names can be shown, by name."""
        known = ((name, finite_number(value)) for name, value in self.facts.items())
        return {
            name: value
            for name, value in known
            if value is not None and 0 < len(name) <= _LONGEST_NAME and name.isprintable()
        }

    def evaluations(self) -> dict[str, float]:
        """Return the metrics of an evaluation, by name; empty for a line of the training."""
        return {name: value for name, value in self.numbers().items() if is_evaluation(name)}

    def as_json(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {"step": self.step, **({} if self.time is None else {"time": self.time}), **self.facts}


def finite_number(value: object) -> float | None:
    """Return a value of a file if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        # An integer may have too many digits for a float.
        return None


def lines_until(content: bytes, *, step: int, evaluated_step: int) -> bytes:
    """Return the lines of a log of metrics up to a step; damaged lines and a torn last one are left out.

    A resumed run may have a million lines, so each is only parsed; ``MetricsLine`` checks the rest where it is read.

    Args:
        content: the whole log.
        step: the last step that is kept.
        evaluated_step: the step of the last evaluation that is kept.
    """
    kept = []
    for line in content.split(b"\n"):
        try:
            record = json.loads(line.decode())
            last = evaluated_step if "val_samples" in record else step
            is_kept = type(record) is dict and type(record["step"]) is int and record["step"] <= last
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if is_kept:
            kept.append(line + b"\n")
    return b"".join(kept)


def read_metrics(path: Path, size: int) -> Lines[MetricsLine]:
    """Return the last lines of a run's metrics.

    Args:
        path: its ``metrics.jsonl``; it need not exist.
        size: how many bytes are read at most.

    Raises:
        RecordError: it cannot be read.
    """
    return read_last_lines(path, MetricsLine, size)


METRICS_OPEN_S: Final = 2.0


class MetricsFile:
    """Appends each record to a file at once, so that a process that aborts or is killed loses none.

    The file stays open for 2 s at most: other hosts see what was written when it is closed (nfs(5), close-to-open).

    Args:
        path: the file.
        before_open: called before the file is opened; raises if this process may no longer write.
        warn: called once when records cannot be written; they are kept, and written when the file can be.
        monotonic: seconds on a clock that never goes back.
        open_s: how long the file stays open, in seconds; 0 closes it after each record.
    """

    def __init__(
        self,
        path: Path,
        *,
        before_open: Callable[[], None],
        warn: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
        open_s: float = METRICS_OPEN_S,
    ) -> None:
        self._path, self._monotonic, self._before_open, self._warn = path, monotonic, before_open, warn
        self._open_s = open_s
        self._descriptor: int | None = None
        # The lines since the file was opened; a disk over the network says only at its end that it did not take them.
        self._lines: list[str] = []
        self._written = 0
        self._warned = False
        self._flushed_at = monotonic()

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record; numbers that JSON does not have become null."""
        self._lines.append(json.dumps({name: _json_number(value) for name, value in record.items()}))
        # What a full disk did not take is written again after a while, not at each record.
        open_s = METRICS_OPEN_S if self._warned else self._open_s
        if self._monotonic() - self._flushed_at >= open_s:
            self.flush()
        elif not self._warned:
            self._write()

    def flush(self) -> None:
        """Write what could not be written before, and show it to other hosts.

        A disk that is full or missing does not delay the training.
        """
        self._write()
        self._close()
        self._flushed_at = self._monotonic()

    def _write(self) -> None:
        if self._written == len(self._lines):
            return
        try:
            if self._descriptor is None:
                self._before_open()
                self._descriptor = open_lines(self._path)
            write_lines(self._descriptor, self._lines[self._written :])
        except OSError as error:
            self._report(error)
            self._close()
        else:
            self._written = len(self._lines)
            self._warned = False

    def _close(self) -> None:
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            os.close(descriptor)
        except OSError as error:
            self._report(error)
        else:
            del self._lines[: self._written]
        self._written = 0

    def _report(self, error: OSError) -> None:
        if not self._warned:
            self._warn(
                f"warning: {self._path} cannot be written ({error}); the training goes on, records stay in memory"
            )
        self._warned = True


def _json_number(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_until(path: Path, step: int, evaluated_step: int | None) -> None:
    """Drop what a resumed run will write again, and a torn last line, so that no record is there twice.

    Args:
        path: the metrics file; need not exist.
        step: optimizer steps done at the checkpoint; 0 drops every step.
        evaluated_step: optimizer steps done at the last evaluation that the checkpoint knows; None drops them all.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        with open_regular(path) as (stream, _):
            content = stream.read()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(
            f"{path} cannot be read ({why_unreadable(error)}); move it away to go on without its lines", path=path
        ) from error
    last_evaluation = -1 if evaluated_step is None else evaluated_step
    write_bytes(path, lines_until(content, step=step, evaluated_step=last_evaluation))


METRICS_FILE: Final = "HPCDDP_METRICS_FILE"
"""The variable that names the metrics file to a program and to an ``entrypoint``."""
_CHECK_OWNER_EVERY_S: Final = 2.0


class _NotOwnerError(Exception):
    """A later attempt owns the run."""


class _OwnLog:
    """The lines that this process writes with ``log``.

    Args:
        path: the metrics file of the run.
        attempt: the attempt that this process belongs to; None if unknown.
    """

    def __init__(self, path: Path, attempt: int | None) -> None:
        self._run, self._attempt = RunDirectory(path.parent), attempt
        self._file: MetricsFile | None = MetricsFile(
            path, before_open=self._check_owner, warn=_write_warning, open_s=0.0
        )
        self._checked_at = -math.inf

    def add(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.add(record)
            except _NotOwnerError:
                self._file = None
                _write_warning(f"warning: another attempt owns the run {self._run.run_id}; metrics are not logged")

    def _check_owner(self) -> None:
        """Raise if a later attempt owns the run; the node of this one may be cut off from Slurm."""
        now = time.monotonic()
        if self._attempt is None or now - self._checked_at < _CHECK_OWNER_EVERY_S:
            return
        self._checked_at = now
        newest = self._run.newest_attempt()
        if newest is not None and newest > self._attempt:
            raise _NotOwnerError


_own_logs: Final[dict[str, _OwnLog]] = {}


def log(metrics: Mapping[str, Any], *, step: int) -> None:
    """Report metrics of a run: ``hpcddp.log({"loss": 0.3}, step=100)``.

    For a script that is the ``command`` of a job, and for an ``entrypoint``. ``hpcddp status``, ``submit --follow`` and
    the trackers of the job show what is reported. Rank 0 appends one line to the metrics file of the run; on other
    ranks, and outside of hpcddp, nothing happens. A file that cannot be written is a warning. Metrics of an evaluation
    begin with ``val_``, ``eval_``, ``dev_`` or ``test_``.

    Args:
        metrics: numbers by name: of Python or numpy, or tensors of one element. Reading a number from a GPU makes the
            loop wait for it. NaN and infinity are written as null.
        step: optimizer steps done, >= 0. In a later attempt it may go back; the later lines count.

    Raises:
        TypeError: a metric is not a number, or the step is not an integer.
        ValueError: the step is negative.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is {metrics!r:.80}; give numbers by name, as in {{'loss': 0.3}}")
    try:
        done = operator.index(step)
    except TypeError as error:
        raise TypeError(f"step is {step!r:.80}, which is no integer; give the optimizer steps done") from error
    if done < 0:
        raise ValueError(f"step is {done}, and it counts the optimizer steps done; give 0 or more")
    path = os.environ.get(METRICS_FILE)
    if not path or os.environ.get("RANK", "0") != "0":
        return
    if path not in _own_logs:
        attempt = os.environ.get("HPCDDP_ATTEMPT", "")
        _own_logs[path] = _OwnLog(Path(path), int(attempt) if attempt.isascii() and attempt.isdigit() else None)
    _own_logs[path].add({"step": done, "time": time.time(), **plain_numbers(metrics)})


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers that JSON can hold; a tensor of one element or a number of numpy becomes a float.

    Raises:
        TypeError: a metric is not a number, or its name is taken.
    """
    plain: dict[str, float] = {}
    for name, value in metrics.items():
        if name in {"step", "time"}:
            raise TypeError(f"a metric is called {name}, which every line has already; give it another name")
        plain[name] = _plain_number(name, value)
    return plain


def _plain_number(name: str, value: Any) -> float:  # noqa: ANN401  of any library
    number: float | None = None
    # RuntimeError: a tensor of several elements, of complex numbers, or without data.
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        # torch warns of a tensor that requires a gradient. A text is not converted, although float() would.
        number = (
            None if isinstance(value, str | bytes) else float(value.detach() if hasattr(value, "detach") else value)
        )
    if number is None:
        raise TypeError(f"the metric {name} is {value!r:.80}, which is not a number; give one number, or leave it out")
    return value if type(value) is int else number


def _write_warning(text: str) -> None:
    # The output of the program may be closed, and a metric must not end it.
    with suppress(OSError, ValueError):
        sys.stderr.write(f"hpcddp: {text}\n")
        sys.stderr.flush()


Mode = Literal["max", "min"]
_SMALLER_IS_BETTER: Final = re.compile(
    r"loss|error|perplexity|(^|[_/.-])(err|ppl|nll|mse|rmse|mae|wer|cer|fid)($|[_/.-])", re.IGNORECASE
)


def mode_of(name: str) -> Mode:
    """Return whether the largest or the smallest value of a metric is its best, by its name."""
    return "min" if _SMALLER_IS_BETTER.search(name) else "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The last and the best value of a metric over a run.

    Args:
        last: the last value.
        last_step: optimizer steps done there.
        best: the largest value, or the smallest one for a ``mode`` of ``min``; the first of several equal ones.
        best_step: optimizer steps done there.
        mode: which value is the best.
    """

    last: float
    last_step: int
    best: float
    best_step: int
    mode: Mode

    @property
    def sentence(self) -> str:
        """Both values in words."""
        best, last = f"{self.best:.4g} after step {self.best_step}", f"{self.last:.4g} after step {self.last_step}"
        return f"best {best}, which is the last" if self.best_step == self.last_step else f"best {best}, last {last}"

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints, and that ``result.json`` holds."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: object) -> Summary | None:
        """Return what ``as_json`` wrote; None for anything else."""
        if not isinstance(document, dict) or document.keys() != {"last", "last_step", "best", "best_step", "mode"}:
            return None
        last, best, steps = (
            finite_number(document["last"]),
            finite_number(document["best"]),
            (document["last_step"], document["best_step"]),
        )
        mode = document["mode"]
        if last is None or best is None or any(type(step) is not int for step in steps) or mode not in {"max", "min"}:
            return None
        return cls(last=last, last_step=steps[0], best=best, best_step=steps[1], mode=mode)


def best_of(values: Mapping[int, float], mode: Mode) -> int:
    """Return the step of the best value; the first of several equal ones. ``values`` is not empty."""
    sign = 1 if mode == "min" else -1
    return min(values, key=lambda step: (sign * values[step], step))


def summaries(path: Path, best: Best | None = None) -> dict[str, Summary]:
    """Return the last and the best value of each metric of the evaluations, by name.

    Args:
        path: the run's ``metrics.jsonl``; it need not exist.
        best: the job's ``checkpoint.best``: its metric may have any name, and a mode of its own.

    Raises:
        RecordError: it cannot be read.
    """
    found = {}
    for name, values in read_evaluations(path, best).items():
        mode = (best.mode if best is not None and name == best.metric else None) or mode_of(name)
        last_step, best_step = max(values), best_of(values, mode)
        found[name] = Summary(
            last=values[last_step], last_step=last_step, best=values[best_step], best_step=best_step, mode=mode
        )
    return found


def read_evaluations(path: Path, best: Best | None = None) -> dict[str, dict[int, float]]:
    """Return the values of each metric of the evaluations: by name, then by step in ascending order.

    Where the step of a metric goes back, a later attempt has resumed: its earlier values from that step on do not
    count, even if the new value is not finite. Damaged lines are left out.

    Args:
        path: as ``summaries`` has it. Of a file over 256 MiB the end is read.
        best: as ``summaries`` has it.

    Raises:
        RecordError: it cannot be read.
    """
    also = None if best is None else best.metric
    needles = _NEEDLES if also is None else (*_NEEDLES, json.dumps(also).encode())
    found: dict[str, dict[int, float]] = {}
    try:
        with open_regular(path) as (stream, size):
            stream.seek(max(0, size - LARGEST_RECORD))
            for block in _blocks_of_lines(stream):
                for line in parse_lines(b"\n".join(_lines_with(block, needles)), MetricsLine).records:
                    for name in line.facts:
                        if is_evaluation(name) or name == also:
                            _forget(found.get(name, {}), line.step)
                    for name, value in line.numbers().items():
                        if is_evaluation(name) or name == also:
                            found.setdefault(name, {})[line.step] = value
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({why_unreadable(error)}); make it readable", path=path) from error
    return found


def _forget(values: dict[int, float], step: int) -> None:
    """Remove the values from a step on, also where the new value is not a finite number."""
    while values and next(reversed(values)) >= step:
        values.popitem()


_BLOCK_BYTES: Final = 1 << 16


def _blocks_of_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the content in blocks of whole lines; of a line that is longer than a block, its end is a line."""
    rest = b""
    while part := stream.read(_BLOCK_BYTES):
        head, end, tail = part.rpartition(b"\n")
        if end:
            yield rest + head
        rest = tail if end or len(rest) > LONGEST_LINE else rest + tail
    yield rest


def _lines_with(block: bytes, needles: Sequence[bytes]) -> list[bytes]:
    """Return the lines that hold one of the needles, in their order: parsing all of a million lines takes seconds."""
    found: dict[int, bytes] = {}
    for needle in needles:
        at = block.find(needle)
        while at >= 0:
            begin = block.rfind(b"\n", 0, at) + 1
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            if end - begin <= LONGEST_LINE:
                found[begin] = block[begin:end]
            at = block.find(needle, end)
    return [found[begin] for begin in sorted(found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsBlock:
    """Some lines of a log of metrics that follow each other.

    Args:
        steps: optimizer steps done, for each line.
        numbers: all else, by name; NaN where a line has no such number, or one that is not finite.
    """

    steps: Sequence[int]
    numbers: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, documents: Sequence[Mapping[str, Any]], *, may_have_booleans: bool) -> Self:
        """Return the block of lines, of which each has a valid step."""
        columns = _columns(documents)
        steps = columns.pop("step")
        numbers = {name: _numbers(column, may_have_booleans) for name, column in columns.items()}
        return cls(steps=steps, numbers=numbers)


def _columns(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    first = documents[0]
    # Mostly all lines have the same names.
    with suppress(KeyError):
        if set(map(len, documents)) == {len(first)}:
            return {name: list(map(operator.itemgetter(name), documents)) for name in first}
    names = dict.fromkeys(chain.from_iterable(documents))
    return {name: [document.get(name, math.nan) for document in documents] for name in names}


def _numbers(column: list[Any], may_have_booleans: bool) -> list[float]:  # noqa: FBT001
    """Return a number for each value; NaN for one that is none, is not finite, or is an integer of 2^53 or more."""
    with suppress(TypeError, ValueError, OverflowError):
        # The sum tells of a value that is no number, is not finite or has hundreds of digits, in a tenth of the time.
        if not may_have_booleans and -_LARGEST < math.fsum(column) < _LARGEST:
            return column
        # A NaN hides no other value from min and max, unless it is the first one, which fails the comparison.
        if set(map(type, column)) <= {int, float} and min(column) > -_LARGEST and max(column) < _LARGEST:
            return column
    return [_number(value) for value in column]


class MetricsReader:
    """Reads a log of metrics in blocks, so that a log of any length takes little memory.

    Args:
        path: the run's ``metrics.jsonl``; it need not exist. Of a file over 256 MiB the end is read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.damaged = 0
        """How many lines so far are left out, because they are not lines of metrics."""

    def __iter__(self) -> Iterator[MetricsBlock]:
        """Yield the lines in their order.

        Raises:
            RecordError: the log cannot be read.
        """
        try:
            with open_regular(self._path) as (stream, size):
                if size > LARGEST_RECORD:
                    # The line that begins before is left out.
                    stream.seek(size - LARGEST_RECORD)
                    stream.readline(LONGEST_LINE)
                damaged_before_last = 0
                for content in _blocks_of_lines(stream):
                    lines = list(filter(None, content.split(b"\n")))
                    documents = _documents(lines)
                    damaged_before_last = self.damaged
                    if len(documents) < len(lines):
                        self.damaged += sum(1 for line in lines if line.strip()) - len(documents)
                    if documents:
                        may_have_booleans = b"true" in content or b"false" in content
                        yield MetricsBlock.of(documents, may_have_booleans=may_have_booleans)
                # The last line may still be being written.
                self.damaged = damaged_before_last
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularError):
            return
        except OSError as error:
            raise RecordError(
                f"{self._path} cannot be read ({why_unreadable(error)}); make it readable", path=self._path
            ) from error


def _documents(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the lines that are lines of metrics."""
    # Parsing a block of lines at once takes a third of the time, but one damaged line fails the block.
    from pydantic_core import from_json

    with suppress(ValueError, TypeError, KeyError):
        documents = from_json(b"[" + b",".join(lines) + b"]", allow_inf_nan=False)
        if len(documents) == len(lines) and max(map(len, lines)) <= LONGEST_LINE and _are_metrics(documents):
            return list(documents)
    found = []
    for line in lines:
        if len(line) <= LONGEST_LINE:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                document = json.loads(line.decode(), parse_constant=lambda _: None)
                if _are_metrics([document]):
                    found.append(document)
    return found


def _are_metrics(documents: Sequence[Any]) -> bool:
    """Return whether all of some JSON values are lines of metrics.

    Raises:
        TypeError: one is not an object.
        KeyError: one has no step.
    """
    steps = list(map(operator.itemgetter("step"), documents))
    return set(map(type, steps)) == {int} and min(steps) >= 0 and max(steps) <= _LARGEST


def _number(value: object) -> float:
    """Return a finite number of a line, NaN for everything else."""
    if type(value) is float:
        return value if math.isfinite(value) else math.nan
    return float(value) if type(value) is int and abs(value) < _LARGEST else math.nan


PACKAGES: Mapping[str, str] = MappingProxyType(
    {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
)
"""The smallest package that a tracker needs."""


def chosen(trackers: Trackers) -> tuple[str, ...]:
    """Return the trackers of a job: the named ones, or TensorBoard where this Python has it."""
    if trackers.use is not None:
        return trackers.use
    return ("tensorboard",) if is_installed("tensorboard") else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerPosition(Record):
    """What was sent to a tracker.

    Args:
        run_id: what the tracker calls the run; None before it has returned a name.
        step: the last step that was sent; -1 before the first.
        evaluated_step: the step of the last evaluation that was sent; -1 before the first.
    """

    ADVICE: ClassVar[str] = "all steps of the run are sent to the tracker again"

    run_id: str | None = None
    step: int = -1
    evaluated_step: int = -1


def read_position(path: Path) -> TrackerPosition:
    """Return what was sent to a tracker: nothing where there is no file.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(path, TrackerPosition) or TrackerPosition()


def write_position(path: Path, position: TrackerPosition) -> None:
    """Write what was sent to a tracker."""
    write_record(path, position)
