"""Whether the process of a run on this machine is there."""

from __future__ import annotations

import socket
from pathlib import Path

from hpcddp.report.traces import Traces


def is_there(traces: Traces, *, proc: Path = Path("/proc"), host: str | None = None) -> bool | None:
    """Return whether a local run's script runs; None if it was started on another machine.

    Args:
        traces: what the run's files say.
        proc: where the kernel shows processes (proc(5)).
        host: this machine's name; None asks for it.
    """
    if traces.job is None:
        return None
    start = traces.start
    if start is not None and start["host"] != (host or socket.gethostname()):
        return None
    try:
        words = (proc / traces.job.job_id / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    # A process id comes again: the process must be the run's script.
    return str(traces.run.script).encode() in words
