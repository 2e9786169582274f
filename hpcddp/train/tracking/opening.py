"""Start the process of the trackers at the beginning of an attempt, and end it with the attempt."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from hpcddp.jobfile.document import Path as KeyPath
from hpcddp.jobfile.job import JobSpec, secret_paths
from hpcddp.packages import is_installed
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import read_decision
from hpcddp.run.record import RecordError
from hpcddp.run.trackers import PACKAGES, chosen
from hpcddp.stop.listener import signals_held
from hpcddp.stop.reasons import Cause, StopReason
from hpcddp.train.errors import StoppedError
from hpcddp.train.tracking.protocol import AttemptEnding, StartMessage

# How long an attempt waits for its trackers at the end, in seconds. After a stop, the state and the decision are saved,
# so Slurm may end the job meanwhile. The wait then includes the start of another W&B process, if the signal ended the
# first.
_WAIT_S: Final[Mapping[AttemptEnding, float]] = MappingProxyType(
    {
        AttemptEnding.FINISHED: 30.0,
        AttemptEnding.FAILED: 2.0,
        AttemptEnding.STOPPED: 10.0,
        AttemptEnding.CANCELLED: 10.0,
    }
)
_COMMAND: Final = (sys.executable, "-P", "-m", "hpcddp.train.tracking")
# The password of scheme://user:password@host.
_PASSWORD: Final = re.compile(r"(?<=://)[^/@]*@")


class TrackedRun(Protocol):
    """A run with trackers, as one rank of an attempt knows it; a ``TrainContext`` is one."""

    @property
    def spec(self) -> JobSpec:
        """The job."""

    @property
    def run(self) -> RunDirectory:
        """The run's directory."""

    @property
    def attempt(self) -> int:
        """The number of the attempt."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files."""

    def print_on_rank_0(self, text: str) -> None:
        """Print one line, on rank 0 only."""


class Tracking:
    """The trackers of one attempt.

    Args:
        context: the run and this rank.
        process: the process of the trackers; None without trackers.
    """

    def __init__(self, context: TrackedRun, process: subprocess.Popen[bytes] | None) -> None:
        self._context = context
        self._process = process

    def stop(self) -> None:
        """Let the trackers finish after a stop, with the ending that follows from the decision."""
        self.end(_ending_of_stop(self._context))

    def end(self, ending: AttemptEnding, *, most_s: float = math.inf) -> None:
        """Let the trackers finish, and kill them if they take too long. Later calls do nothing.

        Args:
            ending: how the attempt ends.
            most_s: the longest to wait, in seconds, if that is less than usual.
        """
        process = self._process
        self._process = None
        if process is None:
            return
        try:
            process.communicate(f"{ending.name}\n".encode(), timeout=min(most_s, _WAIT_S[ending]))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self._context.print_on_rank_0("warning: the trackers have not taken everything in time")
        else:
            if process.returncode:
                self._context.print_on_rank_0(
                    f"warning: the process of the trackers ended with exit code {process.returncode}"
                )


@contextlib.contextmanager
def tracked(context: TrackedRun, *, first_step: int | None) -> Iterator[Tracking]:
    """Run the trackers while the block runs, on rank 0, and tell them how it ended.

    Args:
        context: the run, which this attempt owns, and this rank.
        first_step: optimizer steps done if ``metrics.jsonl`` has no later records at the start; None if it may have.
    """
    tracking = start_trackers(context, first_step=first_step)
    try:
        yield tracking
    except StoppedError:
        tracking.stop()
        raise
    except BaseException:
        tracking.end(AttemptEnding.FAILED)
        raise
    tracking.end(AttemptEnding.FINISHED)


def start_trackers(context: TrackedRun, *, first_step: int | None) -> Tracking:
    """Start the trackers of an attempt, on rank 0; arguments as for ``tracked``."""
    return Tracking(context, _start(context, first_step))


def _start(context: TrackedRun, first_step: int | None) -> subprocess.Popen[bytes] | None:
    """Return the process of the trackers; None on other ranks than 0, without trackers, or if it cannot be started."""
    if not context.is_main:
        return None
    spec = context.spec
    names = tuple(name for name in chosen(spec.trackers) if _usable(name, context.print_on_rank_0))
    if not names:
        return None
    appended_from = None
    if first_step is None:
        appended_from = 0
        with contextlib.suppress(OSError):
            appended_from = context.run.metrics.stat().st_size
    message = StartMessage(
        names=names,
        run=str(context.run.path),
        attempt=context.attempt,
        first_step=first_step,
        appended_from=appended_from,
        config=config_of(spec),
        settings=spec.trackers.model_dump(mode="json"),
    )
    try:
        # The process inherits the mask, so that signals to the job do not end it.
        with signals_held():
            process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, bufsize=0)
    except OSError as error:
        context.print_on_rank_0(f"warning: the trackers cannot be started ({error}); the training goes on without")
        return None
    line = memoryview(f"{message.as_json()}\n".encode())
    with contextlib.suppress(BrokenPipeError):
        while process.stdin is not None and line:
            line = line[process.stdin.write(line) :]
    return process


def _usable(name: str, print_line: Callable[[str], None]) -> bool:
    if is_installed(name):
        return True
    print_line(
        f"warning: {name} is not installed here, and the training goes on without; run: pip install {PACKAGES[name]}"
    )
    return False


def config_of(spec: JobSpec) -> dict[str, Any]:
    """Return the resolved job as JSON without possible secrets: variables, shell lines, passwords."""
    config = _without_secrets(spec.values(), ())
    uri = config["trackers"]["tracking_uri"]
    if uri is not None:
        config["trackers"]["tracking_uri"] = _PASSWORD.sub("", uri)
    return config


def _without_secrets(values: Mapping[str, Any], above: KeyPath) -> dict[str, Any]:
    shown = {}
    for key, value in values.items():
        path = (*above, key)
        if path not in secret_paths():
            shown[key] = _without_secrets(value, path) if isinstance(value, Mapping) else value
    return shown


def _ending_of_stop(context: TrackedRun) -> AttemptEnding:
    decision = None
    with contextlib.suppress(RecordError):
        decision = read_decision(context.run.attempt(context.attempt))
    if decision and (decision.cause == Cause.CANCELLED or decision.reason is StopReason.INTERRUPTED):
        return AttemptEnding.CANCELLED
    return AttemptEnding.STOPPED
