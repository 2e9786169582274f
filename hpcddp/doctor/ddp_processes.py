"""Starting the ranks of a comparison, and waiting for what they report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.doctor.ddp_errors import ComparisonError

Report = Mapping[str, Any]

_POLL_S: Final = 0.05
# How long the others may go on after one rank has failed: they may be about to say why.
_GRACE_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where ranks run.

    Args:
        python: the interpreter.
        directory: what the user's modules are imported from first, and the working directory.
        environment: the variables of the processes.
        scratch: a directory of this comparison alone.
        steps: K, optimizer steps to make.
        timeout_s: how long all ranks together may take, in seconds.
    """

    python: str
    directory: Path
    environment: Mapping[str, str]
    scratch: Path
    steps: int
    timeout_s: float


def run_ranks(place: Place, name: str, document: str, world_size: int) -> list[Report]:
    """Run ``world_size`` ranks to their end and return what each reported; a failed one reports its ``error``.

    Args:
        place: where.
        name: what this group of ranks is called, one word.
        document: the resolved job.
        world_size: ranks.

    Raises:
        ComparisonError: they took too long, or cannot be started.
    """
    folder = place.scratch / name
    folder.mkdir()
    (folder / "job.yaml").write_text(document, encoding="utf-8")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            processes.append(_start(place, folder, rank, world_size))  # noqa: PERF401  those started are ended below
        in_time = _wait(processes, place.timeout_s)
    except OSError as error:
        raise ComparisonError(f"the interpreter {place.python} cannot be started ({error})") from error
    finally:
        for process in processes:
            _end(process)
    if not in_time:
        slow = "one process" if world_size == 1 else f"{world_size} ranks"
        raise ComparisonError(
            f"{slow} took longer than {place.timeout_s:g} s; raise --timeout, or see whether ranks wait for each "
            "other in collectives of the model's own that not all of them enter"
        )
    return [_report(folder, rank, process.returncode) for rank, process in enumerate(processes)]


def _start(place: Place, folder: Path, rank: int, world_size: int) -> subprocess.Popen[bytes]:
    command = [place.python, "-P", "-m", "hpcddp.doctor.ddp_rank", str(folder), str(rank), str(world_size)]
    command += [str(place.steps), str(place.directory), str(place.timeout_s)]
    with (folder / f"rank-{rank}.log").open("wb") as log:
        # A session of its own, so that what the user's code starts ends with it.
        return subprocess.Popen(
            command,
            cwd=place.directory,
            env=dict(place.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Wait for all, or for little longer than the first that fails; return whether that came in time."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            return failed
        time.sleep(_POLL_S)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _report(folder: Path, rank: int, code: int) -> Report:
    path = folder / f"rank-{rank}.json"
    if path.exists():
        report: Report = json.loads(path.read_text(encoding="utf-8"))
        return report
    lines = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = lines[-1] if lines else "it said nothing"
    message = f"rank {rank} ended with code {code} before it could report ({said})"
    # Those that were ended for another rank's sake come last.
    return {"rank": rank, "error": {"kind": "ended", "message": message, "time": float("inf")}}
