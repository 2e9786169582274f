"""Scenarios on the real Slurm: functions that submit runs, cause faults and wait for the end.

A test names its scenario with ``@after_scenario(function)`` and takes the fixture ``scenario_result``, which is what
the function returned. The scenarios of all selected tests run concurrently, so that one waits while another computes.
With ``long=True`` a scenario starts before the others. With ``own_slurm=True`` it has a Slurm of its own, because it
disturbs the whole cluster.
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
from hpcddp.run.sweep import read_sweep
from hpcddp.slurm.hostlist import expand
from tests.cluster.comparison import RunComparison, compare_runs, report
from tests.cluster.jobs import submit, write_job
from tests.cluster.sandbox import Sandbox
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.cluster.tracked_run import TrackedRun

# Eight epochs of 23 steps: 184 steps of 100 ms are 18 s, of which hardly any needs the machine.
EPOCHS = 8
STEP_S = 0.1
STEPS_PER_EPOCH = 23
# Preemptions take the first two hosts; every run that is not to be preempted uses the others.
PREEMPTED_HOSTS, OTHER_HOSTS = "n1,n2", "n3,n4"
# For runs of one rank: each rank is a second or more of the processor, and many faults need no second one.
ONE_HOST = "n3"
_AT_ONCE = 4
_OWN_SLURMS_AT_ONCE = 2


class References:
    """The same runs uninterrupted, one for each number of ranks, made when they are first asked for."""

    def __init__(self, sandbox: Sandbox, directory: Path) -> None:
        self._sandbox, self._directory = sandbox, directory
        self._runs: dict[str, TrackedRun] = {}
        self._lock = threading.Lock()

    def of(self, nodes: int, tasks: int) -> TrackedRun:
        """Return the uninterrupted run on so many hosts with so many ranks each."""
        name = f"reference-{nodes}-{tasks}"
        with self._lock:
            if name not in self._runs:
                context = ScenarioContext(sandbox=self._sandbox, directory=self._directory, references=self)
                hosts = OTHER_HOSTS.split(",")
                on = ",".join(hosts[:nodes]) if nodes <= len(hosts) else None
                tracked = context.start(name, nodes=nodes, tasks=tasks, on=on, seconds=0)
                tracked.wait_until_finished()
                self._runs[name] = tracked
            return self._runs[name]


@dataclass(frozen=True, kw_only=True)
class ScenarioContext:
    """What a scenario needs to start runs.

    Attributes:
        sandbox: the Slurm.
        directory: the scenario's own.
        references: the uninterrupted runs.
        ended: set when nothing more is to be started.
    """

    sandbox: Sandbox
    directory: Path
    references: References
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self, name: str, **words: Any) -> TrackedRun:
        """Submit the training; the arguments are those of ``write_job``."""
        job = self.write_job(name, **words)
        submitted = submit(self.sandbox, job)
        return TrackedRun(
            sandbox=self.sandbox, job=job, run=RunDirectory(Path(submitted["run_dir"])), job_id=submitted["job_id"]
        )

    def start_element(self, name: str, **words: Any) -> TrackedRun:
        """Submit the training as the first of two elements of a sweep, and cancel the other one."""
        job = self.write_job(name, **words)
        sweep = read_sweep(Path(submit(self.sandbox, job, "--sweep", "train.seed=0,1")["sweep_dir"]))
        assert sweep is not None
        self.sandbox.run("scancel", str(sweep.job_id(1)))
        return TrackedRun(sandbox=self.sandbox, job=job, run=sweep.run(0), job_id=str(sweep.job_id(0)))

    def write_job(
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
    ) -> Path:
        """Write the job file of the training.

        Args:
            name: the name of its directory, unique in its scenario.
            nodes: hosts.
            tasks: ranks on each.
            epochs: the length; another one than the usual has no uninterrupted run to compare with.
            on: hosts to choose from; None = any.
            partition: its partition.
            behaviour: what the model does besides.
            seconds: how long a step takes at least.
            sections: what is laid over sections of the job file.
        """
        assert not self.ended.is_set(), "the tests have ended"
        directory = self.directory / name
        directory.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("traced_model.py"), directory)
        resources = {"nodes": nodes, "tasks_per_node": tasks, "cpus_per_task": 1, "time_limit": 20}
        placed = {"partition": partition, **({} if on is None else {"nodelist": on})}
        changes = dict(sections or {})
        changes["resources"] = {**resources, **placed, **changes.get("resources", {})}
        train = {"model": "traced_model:build", "dataset": "digits", "epochs": epochs, "precision": "fp64"}
        arguments = {"model_args": {"seconds": seconds, **(behaviour or {})}}
        changes["train"] = {**train, **arguments, **changes.get("train", {})}
        return write_job(directory, sections=changes)

    def preempt(self, on: str = PREEMPTED_HOSTS, *, seconds: float = 3) -> str:
        """Let a job of higher priority take hosts for itself, and return its id at once."""
        count = len(expand(on))
        words = ("--partition=high", "--exclusive", f"--nodelist={on}", f"--nodes={count}", "--output=/dev/null")
        return self.sandbox.submit(*words, f"--wrap=sleep {seconds}")

    def compare(self, fault: str, tracked: TrackedRun, *, nodes: int = 2, tasks: int = 1) -> RunComparison:
        """Wait until a run has finished, and compare it with the uninterrupted run."""
        reference = self.references.of(nodes, tasks)
        tracked.wait_until_finished()
        comparison = compare_runs(tracked, reference)
        report(fault, tracked, comparison)
        return comparison


Scenario = Callable[[ScenarioContext], Any]
ScenarioResult = tuple[TrackedRun, RunComparison]


@dataclass(frozen=True)
class ScheduledScenario:
    """A scenario and how to run it; see the module."""

    scenario: Scenario
    long: bool = False
    own_slurm: bool = False


class Scenarios:
    """Runs scenarios in threads.

    Args:
        scheduled: the scenarios.
        sandbox: the Slurm of the scenarios that need none of their own.
        directory: where each scenario gets a directory.
    """

    def __init__(self, scheduled: Iterable[ScheduledScenario], sandbox: Sandbox, directory: Path) -> None:
        self._sandbox = sandbox
        self._references = References(sandbox, directory)
        self._executor = ThreadPoolExecutor(_AT_ONCE)
        self._ended = threading.Event()
        self._own_slurm_executor = ThreadPoolExecutor(_OWN_SLURMS_AT_ONCE)
        self._futures: dict[Scenario, Future[Any]] = {}
        for number, one in enumerate(sorted(dict.fromkeys(scheduled), key=lambda one: not one.long)):
            # Scenarios of two files may have the same name.
            folder = directory / f"{number}-{getattr(one.scenario, '__name__', 'scenario')}"
            if one.own_slurm:
                self._futures[one.scenario] = self._own_slurm_executor.submit(
                    self._run_on_own_slurm, one.scenario, folder
                )
            else:
                self._futures[one.scenario] = self._executor.submit(self._run, one.scenario, folder, sandbox)

    def result_of(self, scenario: Scenario) -> Any:
        """Wait for the end of a scenario; return what it returned, or raise what it raised."""
        return self._futures[scenario].result()

    def close(self) -> None:
        """Start nothing more, cancel all jobs and wait for the scenarios that run."""
        self._ended.set()
        for executor in (self._executor, self._own_slurm_executor):
            executor.shutdown(wait=False, cancel_futures=True)
        self._sandbox.cancel_all()
        for executor in (self._executor, self._own_slurm_executor):
            executor.shutdown(wait=True)

    def _run(self, scenario: Scenario, directory: Path, sandbox: Sandbox) -> Any:
        return scenario(
            ScenarioContext(sandbox=sandbox, directory=directory, references=self._references, ended=self._ended)
        )

    def _run_on_own_slurm(self, scenario: Scenario, directory: Path) -> Any:
        with sandbox_with(*QUICK) as sandbox:
            return self._run(scenario, directory, sandbox)


def after_scenario(scenario: Scenario, *, long: bool = False, own_slurm: bool = False) -> pytest.MarkDecorator:
    """Return the mark of a test that checks the result of a scenario; see the module."""
    # A mark that is called with one function takes it for the test.
    return pytest.mark.scenario.with_args(scenario, long=long, own_slurm=own_slurm)


def scenarios_of(items: Iterable[pytest.Item]) -> list[ScheduledScenario]:
    """Return the scenarios of tests."""
    marks = (item.get_closest_marker("scenario") for item in items)
    return [ScheduledScenario(*mark.args, **mark.kwargs) for mark in marks if mark is not None]
