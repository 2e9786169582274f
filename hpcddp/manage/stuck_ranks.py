"""Tell which rank of a run that makes no progress is stuck, by the marks of the ranks that wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from hpcddp.errors import listed
from hpcddp.manage.format import numbered_text
from hpcddp.manage.run_progress import time_written
from hpcddp.manage.status import RunStatus
from hpcddp.run.job_records import known_hosts

# The ranks that wait for one rank leave their marks within seconds; an older mark is of an earlier wait.
_SAME_WAIT_S: Final = 15.0
_RANKS_SHOWN: Final = 4


def stuck_rank_lines(status: RunStatus) -> Iterator[str]:
    """Yield which ranks the others wait for, and since when; nothing where no rank of the training has said so."""
    if status.files.attempt is None:
        return
    attempt = status.run.attempt(status.files.attempt)
    hosts = known_hosts(attempt) or []
    times = {rank: time_written(attempt.rank_wait(rank)) for rank in range(len(hosts))}
    newest = max(times.values(), default=0.0)
    if newest <= time_written(status.run.metrics):
        return
    waiting = [rank for rank in times if times[rank] >= newest - _SAME_WAIT_S]
    stuck = [rank for rank in times if rank not in waiting]
    since = time.strftime("%H:%M:%S", time.localtime(newest))
    if stuck:
        places = [f"rank {rank} on {hosts[rank]}" for rank in stuck[:_RANKS_SHOWN]]
        if len(stuck) > _RANKS_SHOWN:
            places.append(f"{len(stuck) - _RANKS_SHOWN} more")
        verb = "holds" if len(stuck) == 1 else "hold"
        yield (
            f"{listed(places)} {verb} up {numbered_text('rank', waiting)}, which waited for other ranks at {since}: "
            "stopped, stuck in native code or in its data, or on a lost host; if that lasts for launch.hang_timeout, "
            "the attempt ends"
        )
    elif len(waiting) == len(times):
        yield f"all ranks wait for each other, as they said at {since}"
