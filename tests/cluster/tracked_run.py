"""A run under test: its state while it runs, its processes, and signals to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcddp.processes import find
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import Event, EventKind, read_events
from tests.cluster.jobs import result_of
from tests.cluster.sandbox import Sandbox
from tests.waiting import wait_until

_POLL_S = 0.05
_TASK_WORDS = ("-P", "-u", "-m", "hpcddp.task")


def trace_file(attempt: AttemptDirectory, rank: int) -> Path:
    """Return where the traced model writes a rank's forwards down."""
    return attempt.path / f"trace-{rank}"


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run that was submitted.

    Attributes:
        sandbox: where it runs.
        job: its job file.
        run: its directory.
        job_id: Slurm's id.
    """

    sandbox: Sandbox = field(repr=False)
    job: Path = field(repr=False)
    run: RunDirectory
    job_id: str

    @property
    def attempt(self) -> AttemptDirectory:
        """The newest attempt."""
        number = self.run.newest_attempt()
        assert number is not None, f"{self.run.path} has no attempt yet"
        return self.run.attempt(number)

    @property
    def attempts(self) -> int:
        """How many attempts have started."""
        number = self.run.newest_attempt()
        return 0 if number is None else number + 1

    @property
    def result(self) -> dict[str, Any]:
        """The document of result.json."""
        return result_of(self.run)

    def events(self, kind: EventKind) -> list[Event]:
        """Return the events of one kind."""
        return [event for event in read_events(self.run.events) if event.kind == kind]

    def log(self) -> str:
        """Return everything that the batch script and the ranks printed."""
        logs = [self.run.batch_log, *sorted(self.run.attempts.glob("*/rank-*.log"))]
        return "\n".join(path.read_text(errors="replace") for path in logs if path.is_file())

    def wait_until(self, holds: Callable[[], object], what: str, *, timeout_s: float = 300) -> None:
        """Wait until something holds; a job that has ended meanwhile fails at once."""
        wait_until(holds, lambda: f"{what} of {self.run.path}\n{self._description()}", timeout_s)

    def wait_for_steps(self, count: int, *, attempt: int = 0) -> None:
        """Wait until rank 0 has computed so many steps in an attempt."""
        path = trace_file(self.run.attempt(attempt), 0)

        def reached() -> bool:
            return path.exists() and path.read_bytes().count(b"\n") >= count

        self.wait_until(reached, f"{count} steps in attempt {attempt}")

    def wait_for_attempt(self, attempt: int) -> None:
        """Wait until an attempt has started."""
        self.wait_until(lambda: self.attempts > attempt, f"the start of attempt {attempt}")

    def wait_until_finished(self, *, timeout_s: float = 900) -> dict[str, str]:
        """Wait until the run has finished and return what Slurm says."""
        return self.wait_for_end("COMPLETED", timeout_s=timeout_s)

    def wait_for_end(self, state: str, *, timeout_s: float = 300) -> dict[str, str]:
        """Wait until the job has ended in a state and none of its processes is left; return what Slurm says."""
        fields = self.sandbox.wait(self.job_id, states={state}, timeout=timeout_s)
        self.wait_until(lambda: not self.processes(), f"the end of {self.processes()}", timeout_s=60)
        return fields

    def ranks(self) -> dict[int, int]:
        """Return the process id of each rank of the newest attempt that is there now."""
        processes = processes_with(f"HPCDDP_ATTEMPT_DIR={self.attempt.path}")
        # srun has these words behind its own.
        tasks = {process.pid: process for process in processes if process.argv[1:] == _TASK_WORDS}
        return {
            int(process.environment["SLURM_PROCID"]): pid
            for pid, process in tasks.items()
            if process.parent not in tasks
        }

    def workers(self, rank: int) -> list[int]:
        """Return the process ids of a rank's children: its loader's workers."""
        parent = self.ranks()[rank]
        return [process.pid for process in processes_with(str(self.run.path)) if process.parent == parent]

    def signal(self, rank: int, number: signal.Signals, ranks: Mapping[int, int] | None = None) -> None:
        """Signal one rank and nobody else; one that has gone is no error.

        Args:
            rank: the rank.
            number: the signal.
            ranks: what ``ranks`` returned earlier; None looks now.
        """
        pid = (self.ranks() if ranks is None else ranks).get(rank)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def processes(self) -> list[str]:
        """Return what is left of the run on any host, a line each."""
        return [f"{process.pid}: {' '.join(process.argv)}" for process in processes_with(str(self.run.path))]

    def _description(self) -> str:
        return f"{self.sandbox.job(self.job_id)}\n{self.processes()}\n{self.log()[-6000:]}"


@dataclass(frozen=True, kw_only=True)
class Process:
    pid: int
    parent: int
    argv: tuple[str, ...]
    environment: dict[str, str]


def processes_with(text: str) -> list[Process]:
    """Return the processes whose environment holds a text; every host's, for they are namespaces of this machine."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal() or int(path.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environment = (path / "environ").read_bytes()
            process = find(int(path.name))
            if text.encode() in environment and process is not None:
                argv = (path / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
                pairs = (entry.partition("=") for entry in environment.decode(errors="replace").split("\0"))
                values = {name: value for name, _, value in pairs}
                found.append(Process(pid=process.pid, parent=process.parent, argv=tuple(argv), environment=values))
    return found


def records(run: RunDirectory, key: str = "loss") -> list[dict[str, Any]]:
    """Return the records of a run's metrics with a key: that of steps, if none is given; a damaged line is none."""
    found = []
    for line in run.metrics.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict) and key in record]


def take_directory_away(tracked: TrackedRun, seconds: float) -> None:
    """Take the run directory away for a time."""
    path, elsewhere = tracked.run.path, tracked.run.path.with_name("elsewhere")
    path.rename(elsewhere)
    time.sleep(seconds)
    elsewhere.rename(path)
