"""Plays: what happens to one run or a few on the real Slurm. They are played side by side, and tests look at the end.

A test names its play with ``@looks_at(function)`` and takes the fixture ``played``: what the function returned.
Plays of all selected tests begin together, so that one waits while another computes. ``long=True`` lets a play begin
before the others; ``apart=True`` gives it a Slurm of its own, because it disturbs all of it.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.slurm.hostlist import expand
from tests.slurm.account import Account, account_of, report
from tests.slurm.jobs import submit, write_job
from tests.slurm.life import Life
from tests.slurm.live import Sandbox
from tests.slurm.sandboxes import QUICK, sandbox_with

# Twenty-four epochs of 23 steps: 552 steps of 30 ms are 17 s, of which hardly any needs the machine.
EPOCHS = 24
STEP_S = 0.03
STEPS_PER_EPOCH = 23
# What is preempted lies on the first two hosts, everything else on the others.
PREEMPTED, UNDISTURBED = "n1,n2", "n3,n4"
_AT_ONCE = 4


class References:
    """The same runs uninterrupted, one for each number of ranks, made when they are first asked for."""

    def __init__(self, sandbox: Sandbox, directory: Path) -> None:
        self._sandbox, self._directory = sandbox, directory
        self._known: dict[tuple[int, int], Life] = {}
        self._lock = threading.Lock()

    def of(self, nodes: int, tasks: int) -> Life:
        """Return the uninterrupted run on so many hosts with so many ranks each."""
        with self._lock:
            if (nodes, tasks) not in self._known:
                place = Place(sandbox=self._sandbox, directory=self._directory, references=self)
                hosts = UNDISTURBED.split(",")
                on = ",".join(hosts[:nodes]) if nodes <= len(hosts) else None
                life = place.start(f"reference-{nodes}-{tasks}", nodes=nodes, tasks=tasks, on=on, seconds=0)
                life.finish()
                self._known[nodes, tasks] = life
            return self._known[nodes, tasks]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a play is played.

    Attributes:
        sandbox: the Slurm.
        directory: the play's own.
        references: the uninterrupted runs.
        over: set when nothing more is to be started.
    """

    sandbox: Sandbox
    directory: Path
    references: References
    over: threading.Event = field(default_factory=threading.Event)

    def start(
        self,
        name: str,
        *,
        nodes: int = 2,
        tasks: int = 1,
        epochs: int = EPOCHS,
        on: str | None = None,
        partition: str = "low",
        behaviour: dict[str, float] | None = None,
        seconds: float = STEP_S,
        sections: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Life:
        """Submit the training.

        Args:
            name: tells the runs of one play apart.
            nodes: hosts.
            tasks: ranks on each.
            epochs: the length; another one than the usual has no uninterrupted run to compare with.
            on: hosts to choose from; None = any.
            partition: its partition.
            behaviour: what the model does besides.
            seconds: how long a step takes at least.
            sections: what is laid over sections of the job file.
        """
        assert not self.over.is_set(), "the tests have ended"
        directory = self.directory / name
        directory.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("traced.py"), directory)
        resources = {"nodes": nodes, "tasks_per_node": tasks, "cpus_per_task": 1, "time_limit": 20}
        placed = {"partition": partition, **({} if on is None else {"nodelist": on})}
        changes = dict(sections or {})
        changes["resources"] = {**resources, **placed, **changes.get("resources", {})}
        train = {"model": "traced:build", "dataset": "digits", "epochs": epochs, "precision": "fp64"}
        arguments = {"model_args": {"seconds": seconds, **(behaviour or {})}}
        changes["train"] = {**train, **arguments, **changes.get("train", {})}
        job = write_job(directory, sections=changes)
        submitted = submit(self.sandbox, job)
        return Life(
            sandbox=self.sandbox, job=job, run=RunDirectory(Path(submitted["run_dir"])), job_id=submitted["job_id"]
        )

    def preempt(self, on: str = PREEMPTED, *, seconds: float = 3) -> str:
        """Let a job of higher priority take hosts for itself, and return its id at once."""
        count = len(expand(on))
        words = ("--partition=high", "--exclusive", f"--nodelist={on}", f"--nodes={count}", "--output=/dev/null")
        return self.sandbox.submit(*words, f"--wrap=sleep {seconds}")

    def account(self, fault: str, life: Life, *, nodes: int = 2, tasks: int = 1) -> Account:
        """Wait until a run has finished, and measure it."""
        reference = self.references.of(nodes, tasks)
        life.finish()
        account = account_of(life, reference)
        report(fault, life, account)
        return account


Play = Callable[[Place], Any]


@dataclass(frozen=True)
class Billing:
    """A play and how it is played; see the module."""

    play: Play
    long: bool = False
    apart: bool = False


class Plays:
    """Plays the plays.

    Args:
        billings: what is to be played.
        sandbox: where those are played that are not apart.
        directory: for their files.
    """

    def __init__(self, billings: Iterable[Billing], sandbox: Sandbox, directory: Path) -> None:
        self._sandbox, self._directory = sandbox, directory
        self._references = References(sandbox, directory)
        self._stage = ThreadPoolExecutor(_AT_ONCE)
        self._over = threading.Event()
        # One after the other.
        self._elsewhere = ThreadPoolExecutor(1)
        self._futures: dict[Play, Future[Any]] = {}
        for billing in sorted(dict.fromkeys(billings), key=lambda one: not one.long):
            if billing.apart:
                self._futures[billing.play] = self._elsewhere.submit(self._play_apart, billing.play)
            else:
                self._futures[billing.play] = self._stage.submit(self._play, billing.play, sandbox)

    def outcome(self, play: Play) -> Any:
        """Return what a play returned, once it is over; raise what it raised."""
        return self._futures[play].result()

    def close(self) -> None:
        """Play nothing more."""
        self._over.set()
        for stage in (self._stage, self._elsewhere):
            stage.shutdown(wait=False, cancel_futures=True)
        self._sandbox.cancel_all()
        for stage in (self._stage, self._elsewhere):
            stage.shutdown(wait=True)

    def _play(self, play: Play, sandbox: Sandbox) -> Any:
        directory = self._directory / getattr(play, "__name__", "play")
        return play(Place(sandbox=sandbox, directory=directory, references=self._references, over=self._over))

    def _play_apart(self, play: Play) -> Any:
        with sandbox_with(*QUICK) as sandbox:
            return self._play(play, sandbox)


def looks_at(play: Play, *, long: bool = False, apart: bool = False) -> pytest.MarkDecorator:
    """Return the mark of a test that looks at the end of a play; see the module."""
    # A mark that is called with one function takes it for the test.
    return pytest.mark.play.with_args(play, long=long, apart=apart)


def billings_of(items: Iterable[pytest.Item]) -> list[Billing]:
    """Return the plays that tests ask for."""
    marks = (item.get_closest_marker("play") for item in items)
    return [Billing(*mark.args, **mark.kwargs) for mark in marks if mark is not None]
