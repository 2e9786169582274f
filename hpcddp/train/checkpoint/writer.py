"""Write checkpoints in a background thread, on rank 0.

The thread only writes files: no collective, no output, no work on a device. The training thread reports, counts and
raises the results of writes between two steps. A loader process that is forked during a write therefore inherits no
lock that the writing thread holds.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from hpcddp.errors import nearest
from hpcddp.jobfile.fields import Best
from hpcddp.run.checkpoints import Checkpoint, Manifest, Writer
from hpcddp.run.directory import RunDirectory
from hpcddp.run.evaluations import mode_of, read_evaluations
from hpcddp.run.events import append_event
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.run.publish import advance_latest, point_best, prune, publish
from hpcddp.run.record import RecordError
from hpcddp.train.errors import SaveError

_FAILURES_ALLOWED: Final = 2
# A file server that restarts is back after some minutes; a loop may save many times in that time.
_OUTAGE_ALLOWED_S: Final = 300.0
_NAMES_SHOWN: Final = 8
# How torch.load(weights_only=True) names what it does not load.
_NOT_LOADED: Final = re.compile(r"GLOBAL (\S+)")
# The training has the CPUs first.
_NICENESS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """Result of a save.

    Args:
        step: optimizer steps done.
        seconds: duration from the start of the save until it was published or had failed.
        error: the error of a failed save; None = it succeeded.
    """

    step: int
    seconds: float
    error: OSError | None


class CheckpointWriter:
    """Writes one checkpoint at a time in a background thread.

    Args:
        attempt: the attempt of this process.
        keep: number of checkpoints to keep.
        best: the metric whose best checkpoint is kept besides; None = no metric.
        metrics: the file with its values; None = that of the run.
        now: seconds since the epoch.
        monotonic: seconds on a monotonic clock.
        print_line: writes a line to the log; called in the calling thread.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        attempt: int,
        keep: int,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        print_line: Callable[[str], None],
        best: Best | None = None,
        metrics: Path | None = None,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._keep = keep
        self._best = best
        self._metrics = metrics or run.metrics
        self._has_warned_of_metric = False
        self._is_loadable_checked = False
        self._now = now
        self._monotonic = monotonic
        self._print_line = print_line
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | None = None
        self._fatal: BaseException | None = None
        self._has_raised = False
        self._warnings: list[str] = []
        self._failed_at: list[float] = []
        self._last_failure: SaveOutcome | None = None
        self.seconds: list[float] = []
        """Durations of the successful saves, in order, from which the deadline is derived."""

    @property
    def saved(self) -> bool:
        """Whether the last completed write has succeeded; True if there was none."""
        return not self._failed_at and not self._has_raised

    @property
    def busy(self) -> bool:
        """Whether a write is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def _must_end(self) -> bool:
        return (
            len(self._failed_at) > _FAILURES_ALLOWED and self._failed_at[-1] - self._failed_at[0] >= _OUTAGE_ALLOWED_S
        )

    def start(self, manifest: Manifest, writers: Mapping[str, Writer], *, reason: str, began: float) -> None:
        """Start to write a checkpoint, after the last write has ended.

        Args:
            manifest: the manifest of the checkpoint.
            writers: one function per file; the data that they write must not change until the write has ended.
            reason: why a save is made, in a few words, for the event log.
            began: when the save began, on the clock ``monotonic``.

        Raises:
            SaveError: saving has failed too often, and for too long.
            FencedError: another attempt owns the run.
        """
        self.wait()
        self.raise_if_failing()
        # Until now the training waited: for the write before, and for the copy that this one writes.
        blocked_s = self._monotonic() - began
        arguments = (manifest, writers, reason, began, blocked_s)
        self._thread = threading.Thread(target=self._work, args=arguments, name="hpcddp-checkpoint")
        self._thread.start()

    def settle(self) -> SaveOutcome | None:
        """Report the result of the last write if it has ended, without waiting, and return it as ``wait`` does.

        Raises:
            SaveError: saving has failed too often, and for too long.
            FencedError: another attempt owns the run.
        """
        if self.busy:
            return None
        outcome = self.wait()
        self.raise_if_failing()
        return outcome

    def wait(self) -> SaveOutcome | None:
        """Wait for the running write, and return its result.

        Returns:
            The result; None if there was no write since the last call.

        Raises:
            FencedError: another attempt owns the run.
            Exception: any other error of the write, except OSError, which is part of the result.
        """
        self.join()
        self._thread = None
        self._tell_warnings()
        fatal = self._fatal
        self._fatal = None
        if fatal is not None:
            self._has_raised = True
            raise fatal
        outcome = self._outcome
        self._outcome = None
        if outcome is None:
            return None
        self._has_raised = False
        if outcome.error is None:
            self._failed_at.clear()
            self.seconds.append(outcome.seconds)
            return outcome
        self._failed_at.append(self._monotonic())
        self._last_failure = outcome
        if not self._must_end:
            self._print_line(
                f"warning: saving after step {outcome.step} failed ({outcome.error}); the training goes on, the "
                "checkpoints before it are kept"
            )
        return outcome

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the running write without reporting its result; return whether it has ended.

        Args:
            timeout_s: the longest to wait, in seconds; None = as long as it takes.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def _tell_warnings(self) -> None:
        for warning in self._warnings:
            self._print_line(f"warning: {warning}")
        self._warnings.clear()

    def raise_if_failing(self) -> None:
        """Raise if three saves in a row or more have failed, over five minutes or longer.

        Raises:
            SaveError: names the last failure.
        """
        last = self._last_failure
        if last is not None and self._must_end:
            raise SaveError(
                f"saving after step {last.step} failed ({last.error}), as all {len(self._failed_at)} saves of the last "
                f"{self._failed_at[-1] - self._failed_at[0]:.0f} s did; make room or make "
                f"{self._run.checkpoints} writable"
            ) from last.error

    def _work(
        self, manifest: Manifest, writers: Mapping[str, Writer], reason: str, began: float, blocked_s: float
    ) -> None:
        # In Linux the niceness is that of the thread (setpriority(2), "C library/kernel differences").
        os.nice(_NICENESS)
        step = manifest.step
        directory = self._run.checkpoints
        try:
            published = publish(directory, manifest, writers, may_publish=self._raise_if_fenced)
            seconds = self._monotonic() - began
            self._outcome = SaveOutcome(step=step, seconds=seconds, error=None)
            # The checkpoint counts; errors of what follows are warnings.
            self._try(
                lambda: self._append_event(step, reason, seconds, blocked_s), f"{self._run.events} cannot be written"
            )
            self._try(
                lambda: advance_latest(directory, step, may_publish=self._raise_if_fenced),
                f"{directory / 'latest'} cannot be written",
            )
            self._keep_best()
            self._warn_if_not_loadable(published)
            self._try(lambda: self._prune(published), f"old checkpoints in {directory} cannot be removed")
        except OSError as error:
            self._outcome = SaveOutcome(step=step, seconds=self._monotonic() - began, error=error)
        except BaseException as error:  # noqa: BLE001  it ends the training, in the thread that trains
            self._fatal = error

    def _warn_if_not_loadable(self, published: Checkpoint) -> None:
        """Warn once if the first checkpoint holds what no restore loads, such as arrays of numpy."""
        if self._is_loadable_checked:
            return
        self._is_loadable_checked = True
        for name in published.manifest.files:
            try:
                # Reads no tensor. Other errors are those of the disk, which a restore names.
                with suppress(RuntimeError, OSError, ValueError):
                    torch.load(published.path / name, map_location="cpu", weights_only=True, mmap=True)
            except pickle.UnpicklingError as error:
                type_name = _NOT_LOADED.search(str(error))
                what = "objects" if type_name is None else type_name[1]
                self._warnings.append(
                    f"no restore will load {published.path / name}: it holds {what}, and only tensors, numbers, texts "
                    "and their containers are loaded; let state_dict return those"
                )

    def keep_best(self) -> None:
        """Let ``checkpoints/best`` name the checkpoint of the best evaluation so far, while no write is running.

        Raises:
            FencedError: another attempt owns the run.
        """
        self._keep_best()
        self._tell_warnings()

    def _keep_best(self) -> None:
        best = self._best
        if best is not None:
            self._try(lambda: self._point_best(best), f"{self._run.checkpoints / 'best'} cannot be written")

    def _point_best(self, best: Best) -> None:
        evaluations = read_evaluations(self._metrics, best)
        values = evaluations.pop(best.metric, {})
        point_best(self._run.checkpoints, values, best.mode or mode_of(best.metric), may_publish=self._raise_if_fenced)
        if evaluations and not values and not self._has_warned_of_metric:
            self._has_warned_of_metric = True
            names = ", ".join(sorted(evaluations)[:_NAMES_SHOWN])
            warning = (
                f"no checkpoint is kept as the best: its metric is {best.metric}, and the evaluations so far report "
                f"{names}"
            )
            near = nearest(best.metric, evaluations)
            if near is not None:
                warning += f"; did you mean {near}?"
            self._warnings.append(warning)

    def _prune(self, newest: Checkpoint) -> None:
        self._raise_if_fenced()
        prune(self._run.checkpoints, keep=self._keep, newest=newest.path, attempt=self._attempt)

    def _append_event(self, step: int, reason: str, seconds: float, blocked_s: float) -> None:
        self._raise_if_fenced()
        append_event(
            self._run.events,
            kind="save",
            time=self._now(),
            attempt=self._attempt,
            step=step,
            reason=reason,
            seconds=round(seconds, 3),
            blocked_s=round(blocked_s, 3),
        )

    def _try(self, action: Callable[[], None], what: str) -> None:
        try:
            action()
        except (OSError, RecordError) as error:
            self._warnings.append(f"{what} ({error}); the checkpoint is whole")

    def _raise_if_fenced(self) -> None:
        raise_if_fenced(self._run, self._attempt)
