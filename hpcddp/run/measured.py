"""What finished runs of a job have measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hpcddp.run.directory import RunDirectory


def newest_noise_scale(runs: Path) -> tuple[str, float] | None:
    """Return the run id and the gradient noise scale, in samples, of the newest run that has finished with one.

    Args:
        runs: the folder of a job's runs, ``<run_root>/<name>``; it need not exist.
    """
    found = []
    for path in runs.iterdir() if runs.is_dir() else ():
        result = RunDirectory(path).result
        try:
            document, written = json.loads(result.read_text()), result.stat().st_mtime_ns
        except (OSError, ValueError):
            # Runs that go on have none, and what is not readable here tells nothing about the batch.
            continue
        scale = document.get("noise_scale") if isinstance(document, dict) else None
        if isinstance(scale, int | float) and math.isfinite(scale) and scale > 0:
            found.append((written, path.name, float(scale)))
    return max(found)[1:] if found else None
