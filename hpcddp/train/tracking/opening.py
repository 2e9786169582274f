"""Start the process of the trackers at the beginning of an attempt, and end it with the attempt."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Self

from hpcddp.jobfile.document import Path as KeyPath
from hpcddp.jobfile.job import JobSpec, secret_paths
from hpcddp.packages import is_installed
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.job_records import read_decision
from hpcddp.run.record import RecordError
from hpcddp.run.trackers import PACKAGES, chosen
from hpcddp.stop.listener import signals_held
from hpcddp.stop.reasons import Cause, StopReason
from hpcddp.train.errors import StoppedError
from hpcddp.train.tracking.protocol import AttemptEnding

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


class Tracking:
    """The trackers of one attempt.

    As a context it tells them how its block ended.

    Args:
        process: the process of the trackers; None without trackers.
        attempt: the attempt, which owns the run.
        print_line: prints a line.
    """

    def __init__(
        self, process: subprocess.Popen[bytes] | None, attempt: AttemptDirectory, print_line: Callable[[str], None]
    ) -> None:
        self._process = process
        self._attempt = attempt
        self._print_line = print_line

    def stop(self) -> None:
        """Let the trackers finish after a stop, with the ending that follows from the decision."""
        decision = None
        with contextlib.suppress(RecordError):
            decision = read_decision(self._attempt)
        ending = AttemptEnding.STOPPED
        if decision and (decision.cause == Cause.CANCELLED or decision.reason is StopReason.INTERRUPTED):
            ending = AttemptEnding.CANCELLED
        self.end(ending)

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
            self._print_line("warning: the trackers have not taken everything in time")
        else:
            if process.returncode:
                self._print_line(f"warning: the process of the trackers ended with exit code {process.returncode}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Tell the trackers how the block ended."""
        if error is None:
            self.end(AttemptEnding.FINISHED)
        elif isinstance(error, StoppedError):
            self.stop()
        else:
            self.end(AttemptEnding.FAILED)


def start_trackers(
    spec: JobSpec, attempt: AttemptDirectory, *, first_step: int | None, print_line: Callable[[str], None]
) -> Tracking:
    """Start the trackers of an attempt, on the rank that writes the run's files; none if they cannot be started.

    Args:
        attempt: the attempt, which owns the run.
        first_step: optimizer steps done if ``metrics.jsonl`` has no later records at the start; None if it may have.
        print_line: prints a line.
    """
    names = [name for name in chosen(spec.trackers) if _usable(name, print_line)]
    if not names:
        return Tracking(None, attempt, print_line)
    appended_from = None
    if first_step is None:
        appended_from = 0
        with contextlib.suppress(OSError):
            appended_from = attempt.run.metrics.stat().st_size
    message = {
        "names": names,
        "run": str(attempt.run.path),
        "attempt": attempt.number,
        "first_step": first_step,
        "appended_from": appended_from,
        "config": config_of(spec),
        "settings": spec.trackers.model_dump(mode="json"),
    }
    try:
        # The process inherits the mask, so that signals to the job do not end it.
        with signals_held():
            process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, bufsize=0)
    except OSError as error:
        print_line(f"warning: the trackers cannot be started ({error}); the training goes on without")
        return Tracking(None, attempt, print_line)
    line = memoryview(f"{json.dumps(message)}\n".encode())
    with contextlib.suppress(BrokenPipeError):
        while process.stdin is not None and line:
            line = line[process.stdin.write(line) :]
    return Tracking(process, attempt, print_line)


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
