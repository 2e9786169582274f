"""What finished runs of a job have measured."""

from __future__ import annotations

from pathlib import Path

from hpcddp.run.directory import RunDirectory
from hpcddp.run.record import RecordError
from hpcddp.run.result import read_result


def newest_noise_scale(runs: Path) -> tuple[str, float] | None:
    """Return the run id and the gradient noise scale, in samples, of the newest run that has finished with one.

    Args:
        runs: the folder of a job's runs, ``<run_root>/<name>``; it need not exist.
    """
    found = []
    for path in runs.iterdir() if runs.is_dir() else ():
        run = RunDirectory(path)
        try:
            result = read_result(run)
            if result is not None and result.noise_scale is not None:
                found.append((run.result.stat().st_mtime_ns, path.name, result.noise_scale))
        except (OSError, RecordError):
            # What is not readable here tells nothing about the batch.
            continue
    return max(found)[1:] if found else None
