"""Run three trainings at once on a real Slurm with random faults: each result must equal that without faults.

The faults are preemptions, signals, ranks that are killed, also two at once, or stopped, slurmstepds that are killed,
hosts and links that are lost, slurmctld ended or killed, a full disk, run directories that are away for seconds, and
damaged checkpoints and records. Each step is recorded once, and the result has the bits of the undisturbed run.

usage: python -m benchmarks.soak [--seconds 1800] [--every 20] [--seed 0] [--results benchmarks/results]

As root: the hosts are network namespaces. After the given time no new run begins and no fault is injected; the
remaining runs end undisturbed. Prints one line for each fault and each run, and writes all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpcddp.run.checkpoints import list_checkpoints, valid_or_none
from hpcddp.slurm.commands import SlurmCommandError
from hpcddp.slurm.hostlist import expand
from tests.cluster.comparison import RunComparison, compare_runs
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.cluster.scenarios import References, ScenarioContext
from tests.cluster.slurm_faults import kill_step_daemon, link_cut, wait_for_node, without_controller, without_slurmd
from tests.cluster.tracked_run import TrackedRun, take_directory_away, trace_file
from tests.small_disk import FILLS, make_room, small_disk

RUNS_AT_ONCE = 3
_NODES, _TASKS = 2, 2
# Twice as long as in the usual scenarios: faults have something to hit.
_STEP_S = 0.18
_LONGEST_RUN_S = 900
# Whatever fails here is a fault on purpose, also when it hits one run five times before it has started.
_SECTIONS: dict[str, dict[str, Any]] = {
    "requeue": {"max_failures": 1000, "max_attempts_without_progress": 1000},
    "launch": {"hang_timeout": "20s", "rendezvous_timeout": "60s"},
}
# slurmctld saves its state every five seconds.
_STATE_SAVED_S = 6
_DAMAGED = (b"", b"null", b"12\n", b"\xff\xfe", b'{"version": 1, "kind"')


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a run that has finished has cost, and its numbers against the undisturbed run.

    Attributes:
        requeues: how often its job was requeued.
        restarts: how often its tasks were started again in the same job.
        comparison: what it has lost and repeated.
    """

    requeues: int
    restarts: int
    comparison: RunComparison


def account_of(tracked: TrackedRun, reference: TrackedRun) -> Account:
    """Return the account of a run that has finished.

    Args:
        tracked: the run.
        reference: the undisturbed run.
    """
    return Account(
        requeues=int(tracked.sandbox.job(tracked.job_id)["Restarts"]),
        restarts=len(tracked.events("restart")),
        comparison=compare_runs(tracked, reference),
    )


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that has ended.

    Attributes:
        name: the lane and the number of the run in it.
        account: what it has cost; None if it did not finish.
        problem: why it did not finish.
    """

    name: str
    account: Account | None
    problem: str | None = None

    @property
    def is_well(self) -> bool:
        """Whether it finished as the undisturbed run did."""
        return self.account is not None and self.account.comparison.has_same_result


@dataclass(kw_only=True)
class Soak:
    """A soak.

    Attributes:
        place: where.
        seconds: how long faults happen.
        every: seconds from one fault to the next, on average.
        dice: decides.
        faults: what happened, with the seconds after the beginning.
        ended: the runs that have ended.
        undisturbed: held while a run is submitted or compared, which needs slurmctld, space and its directory.
    """

    context: ScenarioContext
    seconds: float
    every: float
    dice: random.Random
    faults: list[tuple[float, str]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    undisturbed: threading.Lock = field(default_factory=threading.Lock)
    _living: dict[int, TrackedRun] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> list[Ended]:
        """Run the soak, and return every run that was started."""
        # Made before the first fault.
        reference = self.context.references.of(_NODES, _TASKS)
        with ThreadPoolExecutor(RUNS_AT_ONCE) as lanes:
            futures = [lanes.submit(self._live, lane, reference) for lane in range(RUNS_AT_ONCE)]
            try:
                self._make_trouble()
            finally:
                self._stopping.set()
            for future in futures:
                future.result()
        return self.ended

    def _live(self, lane: int, reference: TrackedRun) -> None:
        number = 0
        while not self._stopping.is_set():
            name = f"lane{lane}-run{number}"
            with self.undisturbed:
                tracked = self.context.start(name, nodes=_NODES, tasks=_TASKS, seconds=_STEP_S, sections=_SECTIONS)
            self._living[lane] = tracked
            try:
                tracked.wait_until_finished(timeout_s=_LONGEST_RUN_S)
                with self.undisturbed:
                    ended = Ended(name=name, account=account_of(tracked, reference))
            except (AssertionError, SlurmCommandError) as error:
                ended = Ended(name=name, account=None, problem=str(error))
            self._tell(ended)
            number += 1

    def _tell(self, ended: Ended) -> None:
        self.ended.append(ended)
        print(f"{ended.name}: {'well' if ended.is_well else 'NOT WELL'} {ended.account or ended.problem}", flush=True)

    def _make_trouble(self) -> None:
        began = time.monotonic()
        while (passed := time.monotonic() - began) < self.seconds:
            pause = self.dice.uniform(0.5, 1.5) * self.every
            if self._stopping.wait(min(pause, self.seconds - passed)) or time.monotonic() - began >= self.seconds:
                break
            if not self._living:
                # A busy machine has started no run yet.
                continue
            fault = self.dice.choice(FAULTS)
            tracked = self.dice.choice(list(self._living.values()))
            name = fault.__name__.removeprefix("_").replace("_", " ")
            print(
                f"{time.monotonic() - began:6.0f} s: {name}, run {tracked.run.path.parent.parent.parent.name}",
                flush=True,
            )
            self.faults.append((time.monotonic() - began, name))
            fault(self, tracked)
            self._release()

    def _release(self) -> None:
        """Release jobs that Slurm holds because they could not be started, as an administrator does."""
        done = self.context.sandbox.run("squeue", "--noheader", "--states=PENDING", "--format=%i %r")
        for line in done.stdout.splitlines():
            job_id, _, reason = line.partition(" ")
            if "held" in reason:
                print(f"job {job_id} is released: {reason}", flush=True)
                self.context.sandbox.run("scontrol", "release", job_id)

    def host_of(self, tracked: TrackedRun) -> str | None:
        """Return one of a run's hosts, None if it has none now."""
        fields = tracked.sandbox.job(tracked.job_id)
        hosts = expand(fields["NodeList"]) if fields["JobState"] == "RUNNING" else []
        return self.dice.choice(hosts) if hosts else None

    def signal(self, tracked: TrackedRun, *numbers: signal.Signals) -> None:
        """Signal one of a run's ranks, if there is one."""
        ranks = tracked.ranks() if tracked.attempts else {}
        for number in numbers if ranks else ():
            tracked.signal(self.dice.choice(list(ranks)), number, ranks)


def _preemption(soak: Soak, tracked: TrackedRun) -> None:
    hosts = tracked.sandbox.job(tracked.job_id)["NodeList"]
    soak.context.preempt(hosts if hosts not in ("", "(null)") else "n1,n2")


def _warning_to_one_rank(soak: Soak, tracked: TrackedRun) -> None:
    soak.signal(tracked, signal.SIGUSR2)


def _storm_of_signals(soak: Soak, tracked: TrackedRun) -> None:
    soak.signal(tracked, *soak.dice.choices([signal.SIGUSR2, signal.SIGTERM], k=30))


def _rank_killed(soak: Soak, tracked: TrackedRun) -> None:
    soak.signal(tracked, signal.SIGKILL)


def _two_ranks_killed(soak: Soak, tracked: TrackedRun) -> None:
    soak.signal(tracked, signal.SIGKILL)
    time.sleep(soak.dice.uniform(0, 0.2))
    soak.signal(tracked, signal.SIGKILL)


def _step_daemon_killed(soak: Soak, tracked: TrackedRun) -> None:
    ranks = tracked.ranks() if tracked.attempts else {}
    if ranks:
        with suppress(AssertionError, OSError):
            kill_step_daemon(soak.dice.choice(list(ranks.values())))


def _rank_stopped(soak: Soak, tracked: TrackedRun) -> None:
    # Before the first step a standstill is only noticed after half an hour: compiling may take that long.
    trace = trace_file(tracked.attempt, 0) if tracked.attempts else None
    if trace is not None and trace.exists() and trace.stat().st_size:
        soak.signal(tracked, signal.SIGSTOP)


def _requeue_by_the_user(_: Soak, tracked: TrackedRun) -> None:
    # A job that has just ended cannot be requeued; Incomplete leaves it alone.
    tracked.sandbox.run("scontrol", "requeue", "Incomplete", tracked.job_id, check=False)


def _slurmd_killed(soak: Soak, tracked: TrackedRun) -> None:
    _host_away(soak, tracked, without_slurmd)


def _link_cut(soak: Soak, tracked: TrackedRun) -> None:
    _host_away(soak, tracked, link_cut)


def _host_away(soak: Soak, tracked: TrackedRun, away: Callable[..., Any]) -> None:
    if (host := soak.host_of(tracked)) is not None:
        with away(tracked.sandbox, host):
            time.sleep(soak.dice.uniform(3, 25))
        wait_for_node(tracked.sandbox, host)


def _controller_away(soak: Soak, tracked: TrackedRun) -> None:
    with soak.undisturbed, without_controller(tracked.sandbox):
        soak.signal(tracked, signal.SIGUSR2)
        time.sleep(soak.dice.uniform(1, 15))


def _controller_killed(soak: Soak, tracked: TrackedRun) -> None:
    """It forgets what it has not saved: a requeue is to be repeated, a submission could not be."""
    with soak.undisturbed:
        time.sleep(_STATE_SAVED_S)
        soak.signal(tracked, signal.SIGUSR2)
        time.sleep(soak.dice.uniform(0, 8))
        with without_controller(tracked.sandbox, signal="KILL"):
            time.sleep(soak.dice.uniform(0, 4))


def _disk_full(soak: Soak, tracked: TrackedRun) -> None:
    fill = FILLS[soak.dice.choice(list(FILLS))]
    with soak.undisturbed:
        fill(soak.context.directory)
        try:
            if soak.dice.choice([True, False]):
                soak.signal(tracked, signal.SIGUSR2)
            time.sleep(soak.dice.uniform(1, 15))
        finally:
            make_room(soak.context.directory)


def _directory_away(soak: Soak, tracked: TrackedRun) -> None:
    """The directory of a job that runs: Slurm fails one that it starts meanwhile, as it cannot open the job's log."""
    if soak.host_of(tracked) is None:
        return
    if soak.dice.choice([True, False]):
        soak.signal(tracked, signal.SIGUSR2)
        time.sleep(soak.dice.uniform(0, 2))
    with soak.undisturbed:
        take_directory_away(tracked, soak.dice.uniform(0.5, 15))


def _checkpoint_damaged(soak: Soak, tracked: TrackedRun) -> None:
    """The newest one, where an older one is valid."""
    saved = list_checkpoints(tracked.run.checkpoints)
    if any(map(valid_or_none, saved[1:])):
        with suppress(FileNotFoundError):
            soak.dice.choice(sorted(saved[0].iterdir())).write_bytes(soak.dice.choice(_DAMAGED))
    soak.signal(tracked, signal.SIGKILL)


def _records_damaged(soak: Soak, tracked: TrackedRun) -> None:
    """A line of a log, and a record of an attempt that has ended."""
    damage = soak.dice.choice(_DAMAGED)
    with soak.dice.choice([tracked.run.events, tracked.run.metrics]).open("ab") as log:
        log.write(damage)
    ended = [path for number in range(tracked.attempts - 1) for path in tracked.run.attempt(number).path.glob("*.json")]
    if ended:
        soak.dice.choice(sorted(ended)).write_bytes(damage)


FAULTS: tuple[Callable[[Soak, TrackedRun], None], ...] = (
    _preemption,
    _preemption,
    _warning_to_one_rank,
    _storm_of_signals,
    _rank_killed,
    _rank_killed,
    _two_ranks_killed,
    _rank_stopped,
    _step_daemon_killed,
    _requeue_by_the_user,
    _slurmd_killed,
    _link_cut,
    _controller_away,
    _controller_killed,
    _disk_full,
    _directory_away,
    _checkpoint_damaged,
    _records_damaged,
)


@contextmanager
def place_of_soak(directory: Path) -> Iterator[ScenarioContext]:
    """Start a Slurm whose runs lie on a disk that a fault can fill.

    Args:
        directory: where the disk is mounted; all runs lie in it.
    """
    # The hosts of a Slurm do not see what is mounted later.
    with small_disk(directory, size="512m", inodes=20_000), sandbox_with(*QUICK) as sandbox:
        yield ScenarioContext(sandbox=sandbox, directory=directory, references=References(sandbox, directory))


def summary(soak: Soak, *, seed: int) -> dict[str, Any]:
    """Return the results of a soak as a JSON document."""
    accounts = [ended.account for ended in soak.ended if ended.account is not None]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "seconds": soak.seconds,
        "seed": seed,
        "faults": dict(Counter(name for _, name in soak.faults)),
        "runs": len(soak.ended),
        "runs_well": sum(ended.is_well for ended in soak.ended),
        "attempts": sum(account.comparison.attempts for account in accounts),
        "requeues": sum(account.requeues for account in accounts),
        "restarts": sum(account.restarts for account in accounts),
        "steps_repeated": sum(account.comparison.steps_lost for account in accounts),
        "each": [asdict(ended) for ended in soak.ended],
    }


def main() -> int:
    """Run a soak from the command line; 0 if every result is right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--every", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="hpcddp-soak-") as directory,
        place_of_soak(Path(directory)) as context,
    ):
        soak = Soak(context=context, seconds=options.seconds, every=options.every, dice=random.Random(options.seed))
        soak.run()
        document = summary(soak, seed=options.seed)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"soak-{document['date'].partition('T')[0]}-{options.seconds:.0f}s-{options.seed}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps({name: value for name, value in document.items() if name != "each"}, indent=2))
    return 0 if document["runs"] == document["runs_well"] else 1


if __name__ == "__main__":
    sys.exit(main())
