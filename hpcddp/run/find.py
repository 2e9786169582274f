"""Which run a person means: a path, a run id, or the beginning of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.run.directory import RunDirectory

_NAMED_AT_MOST = 5


class NoRunError(UserError):
    """No run is called that, or several are."""

    kind = "no_run"


def find_run(text: str, run_root: Path) -> RunDirectory:
    """Return the run that ``text`` means.

    Args:
        text: the path of a run directory; or the id of a run under ``run_root``, or the beginning of one that no other
            run's id has.
        run_root: where runs live, ``<run_root>/<name>/<run_id>/``; need not exist.

    Raises:
        NoRunError: there is no such run, or there are several.
    """
    path = Path(text)
    if _is_run(path):
        return RunDirectory(path.absolute())
    runs = sorted(_runs(run_root))
    exact = [run for run in runs if run.name == text]
    found = exact or [run for run in runs if text and run.name.startswith(text)]
    if not found:
        raise NoRunError(
            f"{text!r} is no run: it is no run directory, and no run under {run_root} has an id that begins so; write "
            "a run's path, its id, or --run-root"
        )
    if len(found) > 1:
        shown = ", ".join(str(run.relative_to(run_root)) for run in found[:_NAMED_AT_MOST])
        more = f" and {len(found) - _NAMED_AT_MOST} more" if len(found) > _NAMED_AT_MOST else ""
        raise NoRunError(f"{text!r} means {len(found)} runs, {shown}{more}; write more of the id, or a path")
    return RunDirectory(found[0].absolute())


def _runs(run_root: Path) -> Iterator[Path]:
    """Yield the run directories under a root."""
    for folder in _directories(run_root):
        yield from (path for path in _directories(folder) if _is_run(path))


def _directories(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _is_run(path: Path) -> bool:
    """Return whether a run has begun or been submitted there."""
    run = RunDirectory(path)
    return any(part.exists() for part in (run.job_file, run.attempts, run.script, run.checkpoints))
