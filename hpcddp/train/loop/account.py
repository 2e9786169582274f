"""The account of an attempt: what its time went into, which rank 0 writes to the event log at each save."""

from __future__ import annotations

from contextlib import suppress
from statistics import median_low

import torch
import torch.distributed as dist

from hpcddp.run.events import append_event
from hpcddp.run.ownership import raise_if_fenced
from hpcddp.train.context import TrainContext
from hpcddp.train.distributed import collective_device
from hpcddp.train.loop.step import StepTimer


class TimeAccount:
    """Adds up durations, in seconds.

    Attributes:
        train_s: of the steps.
        eval_s: of the evaluations.
        save_s: for which the training waited for saves.
    """

    def __init__(self) -> None:
        self.train_s = 0.0
        self.eval_s = 0.0
        self.save_s = 0.0

    def write(self, context: TrainContext, timer: StepTimer, step: int) -> None:
        """Gather what the ranks have measured in their steps, and write the account of a save; a collective.

        Raises:
            FencedError: another attempt owns the run; on rank 0.
        """
        rank_means = torch.tensor(timer.means(), dtype=torch.float64, device=collective_device())
        means = rank_means.new_empty(context.world_size, len(rank_means))
        dist.all_gather(list(means), rank_means)
        if not context.is_main:
            return
        data_waits, forwards = means.T.tolist()
        raise_if_fenced(context.run, context.attempt)
        # A report can do without; a disk that is full or missing does not delay the training.
        with suppress(OSError):
            append_event(
                context.run.events,
                kind="account",
                time=context.now(),
                attempt=context.attempt,
                step=step,
                train_s=round(self.train_s, 3),
                eval_s=round(self.eval_s, 3),
                save_s=round(self.save_s, 3),
                wait_s=round(timer.steps * max(data_waits), 3),
                slowest=_slowest_rank(data_waits, forwards),
            )


def _slowest_rank(data_waits: list[float], forwards: list[float]) -> dict[str, float | None] | None:
    """Return the fields of a ``SlowestRank``; None if there is one rank, or nothing was measured.

    Args:
        data_waits: for each rank, its mean wait for data in a step, in seconds.
        forwards: for each rank, its mean forward in a step, in seconds; 0 if forwards are not measured.
    """
    sums = [data_wait_s + forward_s for data_wait_s, forward_s in zip(data_waits, forwards, strict=True)]
    if len(sums) == 1 or not any(sums):
        return None
    rank = sums.index(max(sums))
    return {
        "rank": rank,
        "data_wait_s": data_waits[rank],
        "forward_s": forwards[rank] if any(forwards) else None,
        "median_s": median_low(sums),
    }
