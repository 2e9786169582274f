"""The thread that writes checkpoints beside the training, on rank 0.

It writes files and nothing else: no collective, no output, no work on a device. What came of a write is told, counted
and raised by the thread that trains, at the next boundary of a step. So a loader process that is forked while a write
is under way inherits no lock that this thread holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from hpcddp.run.checkpoints import Checkpoint
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import append_event
from hpcddp.run.hashed_file import Writer
from hpcddp.run.lease import raise_if_fenced
from hpcddp.run.manifest import Manifest
from hpcddp.run.publish import advance_latest, prune, publish
from hpcddp.train.errors import SaveError

_FAILURES_ALLOWED: Final = 2
_LOOK_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """What came of a save.

    Args:
        step: optimizer steps done.
        seconds: from its beginning, at the step's boundary, until it was published or had failed.
        error: why nothing was published; None = it was.
    """

    step: int
    seconds: float
    error: OSError | None

    @property
    def saved(self) -> bool:
        """Whether a checkpoint of that step is there."""
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """One write, as it is handed to the thread."""

    manifest: Manifest
    writers: Mapping[str, Writer]
    reason: str
    began: float


def _nothing() -> None:
    pass


class CheckpointWriter:
    """Writes one checkpoint at a time, beside the thread that calls it.

    Args:
        run: the run.
        attempt: the attempt that this process belongs to.
        keep: checkpoints that stay.
        now: seconds since the epoch.
        monotonic: seconds on a clock that never goes back.
        tell: is told, by the thread that calls, what a person should know.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        keep: int,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        self._run, self._attempt, self._keep = run, attempt, keep
        self._now, self._monotonic, self._tell = now, monotonic, tell
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | None = None
        self._fatal: BaseException | None = None
        self._warnings: list[str] = []
        self._failures = 0
        self._last_failure: SaveOutcome | None = None
        self.seconds: list[float] = []
        """How long each save took until it was published, in order: what a deadline must leave room for."""

    @property
    def saved(self) -> bool:
        """Whether the last write that is over, if there was one, has published its checkpoint."""
        return not self._failures

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, manifest: Manifest, writers: Mapping[str, Writer], *, reason: str, began: float) -> None:
        """Begin to write a checkpoint; waits for the one before it.

        Args:
            manifest: what it holds.
            writers: one function per file; what they write must not change until the write is over.
            reason: why now, in a few words, for the event log.
            began: when the save began, on the clock ``monotonic``.

        Raises:
            SaveError: saves before this one failed too often.
            FencedError: another attempt owns the run.
        """
        self.wait()
        self.raise_if_failing()
        write = _Write(manifest=manifest, writers=writers, reason=reason, began=began)
        self._thread = threading.Thread(target=self._work, args=(write,), name="hpcddp-checkpoint")
        self._thread.start()

    def settle(self) -> None:
        """Tell, count and raise what has come of the last write, if it is over; costs nothing otherwise.

        Raises:
            SaveError: the third save in a row failed.
            FencedError: another attempt owns the run.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
            self.raise_if_failing()

    def wait(self, *, alive: Callable[[], None] = _nothing) -> SaveOutcome | None:
        """Wait for the write that is under way, and return what came of it.

        Args:
            alive: called about every second meanwhile.

        Returns:
            None if nothing has been written since the last time.

        Raises:
            FencedError: another attempt owns the run.
            Exception: whatever else broke the write, but for an error of the disk.
        """
        while not self.join(_LOOK_EVERY_S):
            alive()
        self._thread = None
        return self._collect()

    def join(self, timeout_s: float) -> bool:
        """Wait for the write that is under way, without hearing what comes of it; return whether it is over.

        Args:
            timeout_s: the longest to wait, in seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def _collect(self) -> SaveOutcome | None:
        for warning in self._warnings:
            self._tell(f"warning: {warning}")
        self._warnings.clear()
        fatal, self._fatal = self._fatal, None
        if fatal is not None:
            raise fatal
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return None
        if outcome.error is None:
            self._failures = 0
            self.seconds.append(outcome.seconds)
            return outcome
        self._failures += 1
        self._last_failure = outcome
        if self._failures <= _FAILURES_ALLOWED:
            self._tell(
                f"warning: saving after step {outcome.step} failed ({outcome.error}); the training goes on, the "
                "checkpoints before it are kept"
            )
        return outcome

    def raise_if_failing(self) -> None:
        """Give up when three saves in a row have failed.

        Raises:
            SaveError: names the last failure.
        """
        last = self._last_failure
        if last is not None and self._failures > _FAILURES_ALLOWED:
            raise SaveError(
                f"saving after step {last.step} failed ({last.error}), for the {self._failures}rd time in a row; make "
                f"room or make {self._run.checkpoints} writable"
            ) from last.error

    def _work(self, write: _Write) -> None:
        step = write.manifest.step
        try:
            published = publish(self._run.checkpoints, write.manifest, write.writers, may_publish=self._raise_if_fenced)
            seconds = self._monotonic() - write.began
            self._outcome = SaveOutcome(step=step, seconds=seconds, error=None)
            self._tidy(published, write.reason, seconds)
        except OSError as error:
            self._outcome = SaveOutcome(step=step, seconds=self._monotonic() - write.began, error=error)
        except BaseException as error:  # noqa: BLE001  it ends the training, in the thread that trains
            self._fatal = error

    def _tidy(self, published: Checkpoint, reason: str, seconds: float) -> None:
        """Do what comes after a checkpoint: its event, ``latest``, the end of old ones. None of it can undo it."""
        step, directory = published.manifest.step, self._run.checkpoints
        self._try(lambda: self._append_event(step, reason, seconds), f"{self._run.events} cannot be written")
        self._try(
            lambda: advance_latest(directory, step, may_publish=self._raise_if_fenced),
            f"{directory / 'latest'} cannot be written",
        )
        self._try(lambda: self._prune(published), f"old checkpoints in {directory} cannot be removed")

    def _prune(self, newest: Checkpoint) -> None:
        self._raise_if_fenced()
        prune(self._run.checkpoints, keep=self._keep, newest=newest.path, attempt=self._attempt)

    def _append_event(self, step: int, reason: str, seconds: float) -> None:
        self._raise_if_fenced()
        append_event(
            self._run.events,
            kind="save",
            time=self._now(),
            attempt=self._attempt,
            step=step,
            reason=reason,
            seconds=round(seconds, 3),
        )

    def _try(self, action: Callable[[], None], what: str) -> None:
        try:
            action()
        except OSError as error:
            self._warnings.append(f"{what} ({error}); the checkpoint is whole")

    def _raise_if_fenced(self) -> None:
        raise_if_fenced(self._run, self._attempt)
