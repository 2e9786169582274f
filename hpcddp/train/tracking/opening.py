"""The trackers of a run, from the beginning of an attempt to its end."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

from hpcddp.run.decision import read_decision
from hpcddp.run.directory import RunDirectory
from hpcddp.run.trackers import PACKAGES, chosen, is_installed
from hpcddp.spec.job import JobSpec
from hpcddp.stop.cause import Cause
from hpcddp.stop.reasons import StopReason
from hpcddp.train.errors import StoppedError
from hpcddp.train.tracking.follower import Follower
from hpcddp.train.tracking.memory import Memory
from hpcddp.train.tracking.protocol import Ending, Subject, Tracker

# How long an attempt waits for its trackers at the end. A job that must leave has seconds left, and has saved already.
_WAIT_S: Final[Mapping[Ending, float]] = MappingProxyType(
    {Ending.FINISHED: 30.0, Ending.FAILED: 2.0, Ending.STOPPED: 3.0, Ending.CANCELLED: 3.0}
)
# The password of scheme://user:password@host.
_PASSWORD: Final = re.compile(r"(?<=://)[^/@]*@")


@contextmanager
def tracked(
    spec: JobSpec, run: RunDirectory, attempt: int, *, first_step: int, tell: Callable[[str], None]
) -> Iterator[None]:
    """Show what is written to ``metrics.jsonl`` while the block runs, and how it ended.

    On rank 0 alone. The file holds what the checkpoint knows when the block begins, and nothing later.

    Args:
        spec: the job.
        run: the run.
        attempt: the attempt that begins; it owns the run.
        first_step: optimizer steps done.
        tell: is told what goes wrong with a tracker.
    """
    followers = [
        Follower(name, _subject(name, spec, run, attempt), connect=_opener(name, first_step), warn=tell)
        for name in chosen(spec.trackers)
        if _usable(name, tell)
    ]
    for follower in followers:
        follower.start()
    ending = Ending.FAILED
    try:
        yield
        ending = Ending.FINISHED
    except StoppedError:
        ending = _how_it_stopped(run, attempt)
        raise
    finally:
        _end(followers, ending, tell)


def _usable(name: str, tell: Callable[[str], None]) -> bool:
    if is_installed(name):
        return True
    tell(f"warning: {name} is not installed here, and the training goes on without; run: pip install {PACKAGES[name]}")
    return False


def _subject(name: str, spec: JobSpec, run: RunDirectory, attempt: int) -> Subject:
    return Subject(
        run=run,
        attempt=attempt,
        job=spec.name,
        settings=spec.trackers,
        config=config_of(spec),
        memory=Memory(run.tracker(name)),
    )


def _opener(name: str, first_step: int) -> Callable[[Subject], Tracker]:
    def connect(subject: Subject) -> Tracker:
        # The tracker's library takes a second to import, which this thread has.
        module = importlib.import_module(f"hpcddp.train.tracking.{name}")
        tracker: Tracker = module.connect(subject, first_step)
        return tracker

    return connect


def config_of(spec: JobSpec) -> dict[str, Any]:
    """Return the resolved job as JSON, without what may be or hold a secret: variables, shell lines, passwords."""
    config = spec.model_dump(mode="json")
    for name in ("env", "setup"):
        config["environment"].pop(name)
    uri = config["trackers"]["tracking_uri"]
    if uri is not None:
        config["trackers"]["tracking_uri"] = _PASSWORD.sub("", uri)
    return config


def _how_it_stopped(run: RunDirectory, attempt: int) -> Ending:
    try:
        decision = read_decision(run.attempt(attempt))
    except (OSError, ValueError):
        decision = None
    by_its_user = decision is not None and (
        decision.cause == Cause.CANCELLED or decision.reason == StopReason.INTERRUPTED.word
    )
    return Ending.CANCELLED if by_its_user else Ending.STOPPED


def _end(followers: list[Follower], ending: Ending, tell: Callable[[str], None]) -> None:
    """Let all trackers finish at the same time, and leave behind whoever takes too long."""
    for follower in followers:
        follower.end(ending)
    deadline = time.monotonic() + _WAIT_S[ending]
    for follower in followers:
        follower.join(max(0.0, deadline - time.monotonic()))
        if follower.is_alive():
            tell(f"warning: {follower.name.removeprefix('hpcddp-')} has not taken everything in time")
