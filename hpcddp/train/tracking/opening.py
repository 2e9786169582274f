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
from hpcddp.run.trackers import PACKAGES, chosen, is_installed
from hpcddp.spec.job import JobSpec
from hpcddp.stop.cause import Cause
from hpcddp.stop.reasons import StopReason
from hpcddp.train.context import TrainContext
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


class Tracking:
    """The trackers of one attempt.

    Args:
        context: the run and this rank.
        followers: one for each tracker; they have begun.
    """

    def __init__(self, context: TrainContext, followers: list[Follower]) -> None:
        self._context, self._followers = context, followers

    def stop(self) -> None:
        """Let the trackers finish, since the ranks have stopped; the decision says why."""
        self.end(_how_it_stopped(self._context))

    def end(self, ending: Ending) -> None:
        """Let all trackers finish at the same time, and leave behind whoever takes too long. Later calls do nothing."""
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.end(ending)
        deadline = time.monotonic() + _WAIT_S[ending]
        for follower in followers:
            follower.join(max(0.0, deadline - time.monotonic()))
            if follower.is_alive():
                name = follower.name.removeprefix("hpcddp-")
                self._context.tell(f"warning: {name} has not taken everything in time")


@contextmanager
def tracked(context: TrainContext, *, first_step: int | None) -> Iterator[Tracking]:
    """Show what rank 0 writes to ``metrics.jsonl`` while the block runs, and how it ended.

    Args:
        context: the run, which this attempt owns, and this rank.
        first_step: optimizer steps done, where the file holds nothing later when the block begins; None where it may.
    """
    names = chosen(context.spec.trackers) if context.is_main else ()
    followers = [
        Follower(name, _subject(name, context), connect=_opener(name, first_step), warn=context.tell)
        for name in names
        if _usable(name, context.tell)
    ]
    for follower in followers:
        follower.start()
    tracking = Tracking(context, followers)
    try:
        yield tracking
    except StoppedError:
        tracking.stop()
        raise
    except BaseException:
        tracking.end(Ending.FAILED)
        raise
    tracking.end(Ending.FINISHED)


def _usable(name: str, tell: Callable[[str], None]) -> bool:
    if is_installed(name):
        return True
    tell(f"warning: {name} is not installed here, and the training goes on without; run: pip install {PACKAGES[name]}")
    return False


def _subject(name: str, context: TrainContext) -> Subject:
    spec = context.spec
    return Subject(
        run=context.run,
        attempt=context.attempt,
        job=spec.name,
        settings=spec.trackers,
        config=config_of(spec),
        memory=Memory(context.run.tracker(name)),
    )


def _opener(name: str, first_step: int | None) -> Callable[[Subject], Tracker]:
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


def _how_it_stopped(context: TrainContext) -> Ending:
    try:
        decision = read_decision(context.run.attempt(context.attempt))
    except (OSError, ValueError):
        decision = None
    by_its_user = decision is not None and (
        decision.cause == Cause.CANCELLED or decision.reason == StopReason.INTERRUPTED.word
    )
    return Ending.CANCELLED if by_its_user else Ending.STOPPED
