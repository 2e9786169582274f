"""Which run a person means: a path, an id or its end, a job's name, a Slurm job id, or ``last``.

A run is found from any directory by the index of this user's runs: one small file for each run that was submitted, in
``~/.local/state/hpcddp/runs/`` (XDG Base Directory Specification). The index says where runs were; the run directory
itself decides whether a run is still there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from hpcddp.errors import UserError, nearest
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import exists
from hpcddp.run.job_records import newest_start, read_submission
from hpcddp.run.record import Record, RecordError, read_record, write_record
from hpcddp.run.result import read_result
from hpcddp.run.sweep import ManifestError, is_element, read_sweep, sweep_of

LAST: Final = "last"
"""The RUN argument that means the run or the sweep that was submitted last; an element alone never is."""
_NAMED_AT_MOST: Final = 5
# Of an element of a job array too: 123_4.
_JOB_ID: Final = re.compile(r"[0-9]+(_[0-9]+)?", re.ASCII)
# As many as the random characters at the end of an id.
_SHORTEST_BEGINNING: Final = 4
_TOKEN: Final = re.compile(r"[0-9a-f]{4}", re.ASCII)


class NoRunError(UserError):
    """No run is called that, or several are."""

    kind = "no_run"


def find_run(text: str, run_root: Path) -> RunDirectory:
    """Return the run that ``text`` means. The runs under ``run_root`` come before all other runs of this user.

    Args:
        text: the path of a run directory; ``last``; the id of a run or a sweep, its random end, or a beginning of it
            that no other has; a job's name, which means its newest run; a Slurm job id; or, of a sweep, any of these
            but a job id, with ``_N`` behind it for an element. The directory of an element that has not begun does not
            exist yet.
        run_root: where runs live, ``<run_root>/<name>/<run_id>/``; need not exist.

    Raises:
        NoRunError: there is no such run, or there are several.
    """
    if not text.strip():
        raise NoRunError("RUN is empty; write a run's id, its job's name, its Slurm job id, or its path")
    run = RunDirectory(Path(text).absolute())
    if is_run(run.path) or sweep_of(run) is not None:
        return run
    here = sorted(_runs(run_root))
    run_here = _find_among(text, here, run_root)
    if run_here is not None:
        return run_here
    # The index is read only for what is not under the root.
    elsewhere = _indexed()
    run_elsewhere = _find_among(text, elsewhere, run_root)
    if run_elsewhere is not None:
        return run_elsewhere
    raise NoRunError(_why_no_run(text, [*here, *elsewhere], run_root))


def _why_no_run(text: str, runs: Sequence[Path], run_root: Path) -> str:
    """Return the sentence for a text that means no run: the likeliest mistake comes first."""
    for _, missing in _entries():
        if text in {str(missing), missing.name} and not exists(missing):
            run = RunDirectory(missing)
            squeue = shlex.join(["squeue", "--me", f"--name={run.name},{run.name_of_chain}"])
            return (
                f"the run {missing} does not exist any more; if its job still waits or runs, end it with scancel ID "
                f"({squeue} shows the id), or name another run (hpcddp status --all lists all)"
            )
    similar_name = nearest(text, sorted({run.parent.name for run in runs}))
    if similar_name is not None:
        return f"no run under {run_root} matches {text!r}; did you mean {similar_name}?"
    return (
        f"no run under {run_root} matches {text!r}, and it is not a run directory; write a run's path, its id or the "
        "last characters of it, its job's name, or its Slurm job id (hpcddp status --all lists all runs)"
    )


def _find_among(text: str, runs: Sequence[Path], run_root: Path) -> RunDirectory | None:
    """Return the run among these that ``text`` means, or None.

    Raises:
        NoRunError: several are meant, or the sweep has no such element.
        ManifestError: the manifest of the sweep cannot be read.
    """
    exact_matches = [run for run in runs if run.name == text]
    if exact_matches:
        return _only_run(text, exact_matches, run_root)
    job_name_matches = [run for run in _without_elements(runs) if text in {LAST, run.parent.name}]
    if job_name_matches:
        return _newest(job_name_matches)
    if _JOB_ID.fullmatch(text):
        element = _element_with_job_id(text, runs)
        if element is not None:
            return element
        job_id_matches = _with_job(text, runs)
        if job_id_matches:
            # A rebuilt cluster uses job ids again.
            return _newest(job_id_matches)
    partial_matches = _without_elements([run for run in runs if _is_part(text, run.name)])
    if partial_matches:
        return _only_run(text, partial_matches, run_root)
    return _element_of_named_sweep(text, runs, run_root)


def _is_part(text: str, run_id: str) -> bool:
    """Return whether a text is the end of a run id behind a dash, or a beginning of it.

    A beginning that is a number is none, since it may be the id of a job that has no run, nor is a short one, which
    many ids have.
    """
    is_beginning = len(text) >= _SHORTEST_BEGINNING and run_id.startswith(text)
    return run_id.endswith(f"-{text}") or (is_beginning and _JOB_ID.fullmatch(text) is None)


def _only_run(text: str, runs: Sequence[Path], run_root: Path) -> RunDirectory:
    """Return the run if there is one.

    Raises:
        NoRunError: there are several.
    """
    if len(runs) == 1:
        return RunDirectory(runs[0].absolute())
    named = ", ".join(_shown(run, run_root) for run in runs[:_NAMED_AT_MOST])
    if len(runs) > _NAMED_AT_MOST:
        named = f"{named} and {len(runs) - _NAMED_AT_MOST} more"
    raise NoRunError(f"{text!r} means {len(runs)} runs, {named}; write more of the id, or a path")


def _element_with_job_id(job_id: str, runs: Sequence[Path]) -> RunDirectory | None:
    """Return the element of a sweep that is this element of a job array, or None."""
    for path in runs:
        with suppress(ManifestError):
            sweep = read_sweep(path)
            if sweep is None:
                continue
            for index in range(len(sweep.elements)):
                if sweep.job_id(index) == job_id:
                    return sweep.run(index)
    return None


def _element_of_named_sweep(text: str, runs: Sequence[Path], run_root: Path) -> RunDirectory | None:
    """Return the element that ``SWEEP_N`` means, or None; the elements of a job array are counted in their own way.

    Raises:
        NoRunError: the sweep has no such element.
        ManifestError: the manifest of the sweep cannot be read.
    """
    name, _, number = text.rpartition("_")
    if not (name and number.isascii() and number.isdecimal()):
        return None
    sweeps = [path for path in runs if exists(RunDirectory(path).sweep_manifest)]
    directory = _find_among(name, sweeps, run_root)
    sweep = None if directory is None else read_sweep(directory.path)
    if sweep is None or any(chunk.job_id == name for chunk in sweep.chunks):
        return None
    last = len(sweep.elements) - 1
    if int(number) > last:
        raise NoRunError(
            f"{text!r} is no run: the sweep {sweep.sweep_id} has elements 0 to {last}; write {sweep.run_id(last)}"
        )
    return sweep.run(int(number))


def run_of_job(job_id: str, run_root: Path) -> RunDirectory | None:
    """Return the run or the sweep whose newest job this is, or None.

    Args:
        job_id: the job; an element of a job array may be one of a sweep, and then the sweep is returned.
        run_root: where runs live; those elsewhere are found by the index.
    """
    for runs in (list(_runs(run_root)), _indexed()):
        job_id_matches = _with_job(job_id, runs) or _with_job(job_id.partition("_")[0], runs)
        if job_id_matches:
            return _newest(job_id_matches)
    return None


def _with_job(job_id: str, runs: Sequence[Path]) -> list[Path]:
    return _without_elements([run for run in runs if job_id in _job_ids(run)])


def _job_ids(path: Path) -> Iterator[str]:
    """Yield the ids of the newest job of a run, or of the job arrays of a sweep."""
    run = RunDirectory(path)
    with suppress(RecordError, ManifestError, OSError):
        submission = read_submission(run)
        if submission is not None and submission.cluster == "slurm":
            yield from submission.job_ids
    with suppress(RecordError, ManifestError, OSError):
        start = newest_start(run)
        if start is not None and start.job_id is not None and not start.is_local:
            yield start.job_id
    with suppress(RecordError, ManifestError, OSError):
        sweep = read_sweep(path)
        if sweep is not None:
            yield from (chunk.job_id for chunk in sweep.chunks)


def _shown(run: Path, run_root: Path) -> str:
    return str(run.relative_to(run_root)) if run.is_relative_to(run_root) else str(run)


def _without_elements(runs: Sequence[Path]) -> list[Path]:
    """Leave out the elements of sweeps that are there too: a part of a sweep's id means the sweep."""
    sweeps = {run for run in runs if exists(RunDirectory(run).sweep_manifest)}
    kept = []
    for run in runs:
        sweep = run.with_name(run.name.rpartition("_")[0] or run.name)
        if sweep not in sweeps or not is_element(run, sweep):
            kept.append(run)
    return kept


def _newest(runs: Sequence[Path]) -> RunDirectory:
    return _by_submission([RunDirectory(run.absolute()) for run in runs])[0]


def _by_submission(runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    return sorted(runs, key=lambda run: (_submitted(run), run.run_id), reverse=True)


def all_runs(run_root: Path, *, everywhere: bool = False) -> list[RunDirectory]:
    """Return the runs under a root, the one that was submitted last first; the root need not exist.

    Args:
        everywhere: whether to return the runs of this user in all other places too, as the index knows them.
    """
    paths = dict.fromkeys(_runs(run_root.absolute()))
    if everywhere:
        paths |= dict.fromkeys(_indexed())
    return _by_submission([RunDirectory(path) for path in paths])


def chosen_run(text: str | None, run_root: Path) -> RunDirectory:
    """Return the run that ``text`` means, as ``find_run`` does; without a text the one that is ``last`` under the root.

    Raises:
        NoRunError: there is no such run, or there are several.
    """
    if text is not None:
        return find_run(text, run_root)
    last_here = _find_among(LAST, sorted(_runs(run_root)), run_root)
    if last_here is not None:
        return last_here
    sentence = f"there is no run under {run_root.absolute()}; submit one, or say with --run-root where runs are"
    last_elsewhere = _find_among(LAST, _indexed(), run_root)
    if last_elsewhere is not None:
        sentence = f"{sentence}, or write {LAST}, which is {last_elsewhere.path}"
    raise NoRunError(sentence)


def token_of(run_id: str) -> str:
    """Return the last letters of a run id that are random; the whole id where it has none."""
    token = run_id.rpartition("-")[2]
    return token if _TOKEN.fullmatch(token.partition("_")[0]) else run_id


def brief(run: RunDirectory) -> str:
    """Return a run's name, and its result or its newest attempt, from its records alone."""
    name = run.name
    try:
        result = read_result(run)
        if result is not None:
            return f"{name}, {result.status}"
        number = run.newest_attempt()
    except (RecordError, OSError):
        # The commands that show the run say what is wrong with it.
        return f"{name}, its records cannot be read"
    if number is not None:
        return f"{name}, attempt {number}"
    return f"{name}, submitted" if exists(run.path) else f"{name}, no directory"


def submission_time(run: RunDirectory) -> float:
    """Return when a run was submitted last, or when it began if that was by hand, in seconds since the epoch."""
    return _submitted(run) / 1e9


def _submitted(run: RunDirectory) -> int:
    """Return when a run was submitted last, or when it began if that was by hand, in nanoseconds."""
    with suppress(OSError):
        return run.submission.stat().st_mtime_ns
    with suppress(OSError):
        return run.attempt(0).start.stat().st_mtime_ns
    with suppress(OSError):
        return run.path.stat().st_mtime_ns
    return 0


def _runs(run_root: Path) -> Iterator[Path]:
    """Yield the run directories under a root."""
    for folder in directories(run_root):
        yield from (path for path in directories(folder) if is_run(path))


def _indexed() -> list[Path]:
    """Return the runs of the index with the elements of its sweeps, which have no entries of their own."""
    paths: dict[Path, None] = {}
    for run in indexed_runs():
        paths[run.path] = None
        if exists(run.sweep_manifest):
            siblings = directories(run.path.parent)
            paths |= dict.fromkeys(path for path in siblings if is_element(path, run.path) and is_run(path))
    return sorted(paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry(Record):
    """Where a run was submitted.

    Args:
        run_dir: its directory, an absolute path.
    """

    ADVICE: ClassVar[str] = "remove it, and name the run by its path"

    run_dir: str


def index_directory() -> Path | None:
    """Return the directory of the index; None for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME")
    with suppress(RuntimeError):
        return (Path(state) if state else Path.home() / ".local" / "state") / "hpcddp" / "runs"
    return None


def add_to_index(run: RunDirectory) -> None:
    """Write a run into the index, if that can be written: no run depends on it."""
    directory = index_directory()
    if directory is None:
        return
    path = str(run.path.absolute())
    # A run's id may be as long as a file name can be.
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    with suppress(OSError, ValueError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_record(directory / f"{name}.json", IndexEntry(run_dir=path))


def indexed_runs() -> list[RunDirectory]:
    """Return the runs of the index that still exist, in no order."""
    return [RunDirectory(path) for _, path in _entries() if is_run(path)]


def forget_missing_runs(below: Path) -> None:
    """Remove the entries of runs that were in a directory and do not exist any more."""
    for file, path in list(_entries()):
        if not exists(path) and path.is_relative_to(below):
            with suppress(OSError):
                file.unlink()


def is_run(path: Path) -> bool:
    """Return whether a run has begun or been submitted in a directory."""
    run = RunDirectory(path)
    # Mostly the first one is there. A path takes as long to build as the look at it.
    return exists(run.job_file) or exists(run.attempts) or exists(run.script) or exists(run.checkpoints)


def directories(path: Path) -> Iterator[Path]:
    """Yield the directories in a directory that are not hidden; none if it is closed to this user."""
    with suppress(OSError), os.scandir(path) as entries:
        yield from (Path(entry) for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _entries() -> Iterator[tuple[Path, Path]]:
    """Yield the files of the index, each with the run directory that it names."""
    directory = index_directory()
    files: list[Path] = []
    with suppress(OSError):
        files = [] if directory is None else list(directory.glob("*.json"))
    for file in files:
        # An entry that cannot be read is as good as none.
        with suppress(RecordError):
            entry = read_record(file, IndexEntry)
            if entry is not None and Path(entry.run_dir).is_absolute():
                yield file, Path(entry.run_dir)
