"""Which run a person means: a path, a run id, the beginning of one, or none for the last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import exists
from hpcddp.run.record import RecordError
from hpcddp.run.result import read_result
from hpcddp.run.sweep import MANIFEST, find_element, is_element

_NAMED_AT_MOST = 5


class NoRunError(UserError):
    """No run is called that, or several are."""

    kind = "no_run"


def find_run(text: str, run_root: Path) -> RunDirectory:
    """Return the run that ``text`` means.

    Args:
        text: the path of a run directory; or the id of a run or a sweep under ``run_root``, or the beginning of one
            that no other's id has. The directory of an element of a sweep that has not begun does not exist yet.
        run_root: where runs live, ``<run_root>/<name>/<run_id>/``; need not exist.

    Raises:
        NoRunError: there is no such run, or there are several.
    """
    path = Path(text)
    if _is_run(path):
        return RunDirectory(path.absolute())
    runs = sorted(_runs(run_root))
    exact = [run for run in runs if run.name == text]
    if not exact and (element := find_element(text, run_root)) is not None:
        return element
    found = exact or _without_elements([run for run in runs if text and run.name.startswith(text)])
    if not found:
        raise NoRunError(
            f"no run under {run_root} matches {text!r}, and it is not a run directory; write a run's path, its id, or "
            "--run-root"
        )
    if len(found) > 1:
        shown = ", ".join(str(run.relative_to(run_root)) for run in found[:_NAMED_AT_MOST])
        more = f" and {len(found) - _NAMED_AT_MOST} more" if len(found) > _NAMED_AT_MOST else ""
        raise NoRunError(f"{text!r} means {len(found)} runs, {shown}{more}; write more of the id, or a path")
    return RunDirectory(found[0].absolute())


def _without_elements(runs: Sequence[Path]) -> list[Path]:
    """Leave out the elements of sweeps that are there too: the beginning of a sweep's id means the sweep."""
    sweeps = [run for run in runs if exists(run / MANIFEST)]
    return [run for run in runs if not any(is_element(run, sweep) for sweep in sweeps)]


def all_runs(run_root: Path) -> list[RunDirectory]:
    """Return the runs under a root, the one that was submitted last first; the root need not exist."""
    runs = (RunDirectory(path.absolute()) for path in _runs(run_root))
    return sorted(runs, key=lambda run: (_submitted(run), run.run_id), reverse=True)


def last_run(run_root: Path) -> RunDirectory:
    """Return the run that was submitted last.

    Raises:
        NoRunError: there is none.
    """
    runs = all_runs(run_root)
    if not runs:
        raise NoRunError(
            f"there is no run under {run_root.absolute()}; submit one, or say with --run-root where runs are"
        )
    return runs[0]


def chosen_run(text: str | None, run_root: Path) -> RunDirectory:
    """Return the run that ``text`` means, as ``find_run`` does; the last one without a text."""
    return last_run(run_root) if text is None else find_run(text, run_root)


def brief(run: RunDirectory) -> str:
    """Return a run's name, and its result or its newest attempt."""
    state = "submitted"
    # The commands that show the run report a damaged one.
    with contextlib.suppress(RecordError, OSError):
        number = run.newest_attempt()
        state = state if number is None else f"attempt {number}"
        result = read_result(run)
        state = state if result is None else result.status
    return f"{run.path.parent.name}, {state}"


def _submitted(run: RunDirectory) -> int:
    """Return when a run was submitted last, or when it began if that was by hand, in nanoseconds."""
    for path in (run.submission, run.attempt(0).start, run.path):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime_ns
    return 0


def _runs(run_root: Path) -> Iterator[Path]:
    """Yield the run directories under a root."""
    for folder in _directories(run_root):
        yield from (path for path in _directories(folder) if _is_run(path))


def _directories(path: Path) -> Iterator[Path]:
    # Others' directories may be closed to us.
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        yield from (Path(entry) for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _is_run(path: Path) -> bool:
    """Return whether a run has begun or been submitted there."""
    run = RunDirectory(path)
    return any(exists(part) for part in (run.job_file, run.attempts, run.script, run.checkpoints))
