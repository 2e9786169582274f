"""A rank dies or hangs: the others go on and a new process joins them, or they save their step and the job goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch  # noqa: TID253

from hpcddp.batch.sampler import GlobalBatches
from hpcddp.jobfile.datasets import DATASETS
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_file import read_job_file
from tests.cluster.jobs import HPCDDP
from tests.cluster.recoveries import assert_same, parameters, wait_for_world
from tests.cluster.scenarios import (
    OTHER_HOSTS,
    PREEMPTED_HOSTS,
    ScenarioContext,
    ScenarioResult,
    after_scenario,
)
from tests.cluster.tracked_run import TrackedRun, processes_with, records
from tests.submission.git_projects import git
from tests.waiting import wait_until

Sections = Mapping[str, Mapping[str, Any]]

# The steps that are left then take longer than a new process, on any machine; ``hurry`` ends them.
_SLOW_STEP_S = 0.4
_FIRST_STEPS = 10
_FOUR_RANKS: Mapping[str, Any] = {"nodes": 2, "tasks": 2, "on": OTHER_HOSTS, "seconds": _SLOW_STEP_S}


def start(
    context: ScenarioContext,
    *,
    max_failures: int = 1,
    seconds: float = _SLOW_STEP_S,
    behaviour: dict[str, float] | None = None,
    **sections: Any,
) -> TrackedRun:
    """Start a training of four ranks whose ranks that are left may go on, and wait until it is at work."""
    sections["requeue"] = {"max_failures": max_failures}
    tracked = context.start("run", **{**_FOUR_RANKS, "seconds": seconds}, sections=sections, behaviour=behaviour)
    tracked.wait_for_steps(_FIRST_STEPS)
    return tracked


def finish(context: ScenarioContext, tracked: TrackedRun) -> tuple[TrackedRun, TrackedRun]:
    """Wait for the end of a run; return it, and the undisturbed one."""
    tracked.hurry()
    reference = context.references.of(2, 2)
    tracked.wait_until_finished()
    return tracked, reference


def rank_1_killed(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """The model is edited before the rank dies: the new process runs that of the submission, as the others do."""
    context.directory.mkdir(parents=True)
    git(context.directory, "init")
    tracked = start(context, environment={"code": "snapshot"})
    assert len(tracked.sentinels()) == 4
    (context.directory / "run" / "traced_model.py").write_text("raise RuntimeError('the edited model')\n")
    tracked.signal(1, signal.SIGKILL)
    wait_for_world(tracked, 4)
    return finish(context, tracked)


def rank_of_element_killed(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """The run is an element of a sweep."""
    tracked = context.start_element("sweep", **_FOUR_RANKS, sections={"requeue": {"max_failures": 1}})
    return kill_rank_1(context, tracked)


def rank_of_script_by_hand_killed(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """The rendered script was given to sbatch."""
    job = context.write_job("by-hand", **_FOUR_RANKS, sections={"requeue": {"max_failures": 1}})
    script = job.with_name("job.sh")
    script.write_text(context.sandbox.run(*HPCDDP, "render", str(job), cwd=job.parent).stdout)
    job_id = context.sandbox.submit(script, cwd=job.parent)
    (path,) = wait_until(lambda: list(job.parent.glob(f"runs/*/*-{job_id}")), "the run directory")
    return kill_rank_1(context, TrackedRun(sandbox=context.sandbox, job=job, run=RunDirectory(path), job_id=job_id))


def kill_rank_1(context: ScenarioContext, tracked: TrackedRun) -> tuple[TrackedRun, TrackedRun]:
    tracked.wait_for_steps(_FIRST_STEPS)
    tracked.signal(1, signal.SIGKILL)
    wait_for_world(tracked, 4)
    return finish(context, tracked)


def rank_0_killed(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    tracked = start(context)
    tracked.signal(0, signal.SIGSEGV)
    wait_for_world(tracked, 4)
    return finish(context, tracked)


def pair_killed(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """Two ranks die at once, one of them rank 0."""
    tracked = start(context)
    ranks = tracked.ranks()
    for rank in (0, 3):
        tracked.signal(rank, signal.SIGKILL, ranks)
    wait_for_world(tracked, 4)
    return finish(context, tracked)


def all_killed_one_after_the_other(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """In the end all ranks are processes that have joined, and srun has ended; then the time limit is near."""
    # Long enough for four new processes, one after the other.
    tracked = start(context, max_failures=4, seconds=4 * _SLOW_STEP_S)
    for deaths, rank in enumerate((3, 0, 2, 1), start=1):
        tracked.signal(rank, signal.SIGKILL)
        # Each death has a recovery, and each new process another one.
        wait_for_world(tracked, 4, recoveries=2 * deaths)
    tracked.wait_until(lambda: srun_has_ended(tracked), "the end of the first srun", timeout_s=60)
    tracked.sandbox.run("scancel", "--signal=USR2", tracked.job_id)
    return finish(context, tracked)


def srun_has_ended(tracked: TrackedRun) -> bool:
    """Return whether the step with which the tasks began is gone."""
    step = f"{tracked.job_id}.0"
    return step not in tracked.sandbox.run("squeue", "--noheader", "--steps", "--format=%i").stdout.split()


@after_scenario(all_killed_one_after_the_other)
def test_the_new_processes_go_on_and_stop_together_when_all_first_ones_have_died(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert (tracked.attempts, len(tracked.events("train"))) == (2, 2)
    (requeue,) = tracked.events("requeue")
    assert requeue.cause == "time_limit"
    deaths = [event for event in tracked.events("recovery") if event.cause]
    assert [event.facts["dead"] for event in deaths] == [[3], [0], [2], [1]]
    assert tracked.sandbox.job(tracked.job_id)["JobState"] == "COMPLETED"
    assert_same(tracked, reference)


# The training has 184 steps.
_FAULTS_AT_THE_EDGES = (
    "kill@backward:0,rank=0,attempt=0",
    "kill@update:183,rank=1,attempt=0",
    "kill@evaluation:184,rank=2,attempt=0",
)


def killed_at_the_edges(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """Ranks die in the first step, in the last one, and in the evaluation after it."""
    variables = {"HPCDDP_FAULTS": ";".join(_FAULTS_AT_THE_EDGES)}
    sections: Sections = {"requeue": {"max_failures": 3}, "environment": {"env": variables}}
    tracked = context.start("run", nodes=2, tasks=2, on=OTHER_HOSTS, sections=sections, seconds=0.1)
    reference = context.references.of(2, 2)
    tracked.wait_until_finished()
    return tracked, reference


@pytest.mark.long
@after_scenario(killed_at_the_edges)
def test_deaths_in_the_first_step_the_last_one_and_the_last_evaluation_cost_no_step(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert tracked.attempts == 1
    # The last two may die in one moment, which is one event.
    dead = [rank for event in tracked.events("recovery") for rank in event.facts["dead"]]
    assert dead == [0, 1, 2]
    assert_same(tracked, reference)


def samples_of(tracked: TrackedRun, step: int) -> list[int]:
    """Return the samples of the step after some steps."""
    spec = read_job_file(tracked.run)
    assert spec.train is not None
    samples = DATASETS["digits"].samples
    assert samples is not None
    batches = GlobalBatches(samples[0], spec.global_batch_size, spec.batch.tail, spec.batch.order, spec.train.seed)
    return [int(sample) for sample in batches.indices(*batches.steps.place(step))]


@pytest.mark.parametrize(
    ("dead", "left"),
    [
        pytest.param(["rank 1 on n3"], 3, marks=after_scenario(rank_1_killed), id="one rank"),
        pytest.param(["rank 1 on n3"], 3, marks=after_scenario(rank_of_element_killed), id="an element of a sweep"),
        pytest.param(
            ["rank 1 on n3"],
            3,
            marks=[after_scenario(rank_of_script_by_hand_killed), pytest.mark.long],
            id="a script that was submitted by hand",
        ),
        pytest.param(["rank 0 on n3"], 3, marks=[after_scenario(rank_0_killed), pytest.mark.long], id="rank 0"),
        pytest.param(
            ["rank 0 on n3", "rank 3 on n4"], 2, marks=[after_scenario(pair_killed), pytest.mark.long], id="two ranks"
        ),
    ],
)
def test_the_others_go_on_without_a_step_lost_and_new_processes_join_them(
    scenario_result: tuple[TrackedRun, TrackedRun], dead: list[str], left: int
) -> None:
    tracked, reference = scenario_result
    job = tracked.sandbox.job(tracked.job_id)
    assert (tracked.attempts, job["JobState"], job["Restarts"]) == (1, "COMPLETED", "0")
    assert len(tracked.events("train")) == 1
    death, *joins = tracked.events("recovery")
    assert (death.cause, death.facts["world_size"]) == ("crash", left)
    assert all(f"{rank} was lost" in (death.reason or "") for rank in dead)
    assert joins[-1].facts["world_size"] == 4
    assert tracked.sentinels() == []
    assert_same(tracked, reference)


def ranks_killed_while_the_others_form(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """A rank dies in a step, and another one before it opens the process group of those that are left."""
    tracked = context.start(
        "run",
        nodes=2,
        tasks=2,
        on=OTHER_HOSTS,
        sections={
            "requeue": {"max_failures": 2},
            "environment": {"env": {"HPCDDP_FAULTS": "kill@backward:40,rank=1;kill@form:40,rank=0"}},
        },
    )
    return finish(context, tracked)


@after_scenario(ranks_killed_while_the_others_form)
def test_a_death_while_the_others_form_a_generation_is_survived(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert (tracked.attempts, len(tracked.events("train"))) == (1, 1)
    # New processes may be there only after the end: they import beside the training.
    first, second, *_ = tracked.events("recovery")
    assert [(event.cause, event.facts["dead"]) for event in (first, second)] == [("crash", [1]), ("crash", [0])]
    assert second.facts["world_size"] == 2
    assert_same(tracked, reference)


def rank_killed_that_the_others_need(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """A rank dies of a model whose result depends on the ranks; another run of it is undisturbed."""
    runs = [
        context.start(
            name,
            nodes=2,
            tasks=2,
            on=hosts,
            sections={"requeue": {"max_failures": 1}},
            behaviour={"depends_on_ranks": 1},
        )
        for name, hosts in (("disturbed", OTHER_HOSTS), ("undisturbed", PREEMPTED_HOSTS))
    ]
    runs[0].wait_for_steps(30)
    runs[0].signal(1, signal.SIGKILL)
    for tracked in runs:
        tracked.wait_until_finished()
    return runs[0], runs[1]


@after_scenario(rank_killed_that_the_others_need)
def test_ranks_that_cannot_go_on_with_fewer_wait_and_have_the_bits_of_the_undisturbed_run(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, undisturbed = scenario_result
    assert (tracked.attempts, len(tracked.events("train"))) == (1, 1)
    (recovery,) = tracked.events("recovery")
    assert recovery.facts["world_size"] == 4
    assert "the others waited" in (recovery.reason or "")
    losses = [[record["loss"] for record in records(run.run)] for run in (tracked, undisturbed)]
    assert losses[0] == losses[1]
    assert torch.equal(parameters(tracked), parameters(undisturbed))


def failures_used_up(context: ScenarioContext) -> TrackedRun:
    """A second rank dies, in the step in which the first one died, and only one failure is allowed."""
    tracked = start(context, max_failures=1, behaviour={"dies_again": 2})
    tracked.signal(1, signal.SIGKILL)
    tracked.wait_for_end("FAILED", timeout_s=120)
    return tracked


@after_scenario(failures_used_up)
def test_a_run_whose_failures_are_used_up_saves_its_step_and_ends(scenario_result: TrackedRun) -> None:
    (saved,) = [event for event in scenario_result.events("save") if event.reason == "other ranks have gone"]
    assert saved.step == records(scenario_result.run)[-1]["step"]
    (failure,) = scenario_result.events("failure")
    assert "requeue.max_failures is 1, and that is used up" in scenario_result.log()
    assert failure.attempt == 0
    # Not rank 1, whose death the others survived.
    assert "rank 2 on n4" in scenario_result.result["reason"]
    *_, cascade = scenario_result.events("recovery")
    assert cascade.step == saved.step
    samples = samples_of(scenario_result, saved.step or 0)
    assert cascade.facts["samples"] == samples
    named = f"on the samples {', '.join(map(str, samples[:16]))} and {len(samples) - 16} more"
    assert named in (cascade.reason or "")
    assert named in scenario_result.log()


def dying_again_and_again(context: ScenarioContext) -> TrackedRun:
    """Three ranks die, one after the other, in one step; more failures are allowed."""
    tracked = start(context, max_failures=5, behaviour={"dies_again": 2})
    tracked.signal(1, signal.SIGKILL)
    tracked.wait_for_end("FAILED", timeout_s=120)
    return tracked


@pytest.mark.long
@after_scenario(dying_again_and_again)
def test_a_step_in_which_three_generations_break_ends_the_run(scenario_result: TrackedRun) -> None:
    assert scenario_result.attempts == 1
    assert scenario_result.events("restart") == []
    *_, cascade = scenario_result.events("recovery")
    assert cascade.facts["is_cascade"] is True
    assert (cascade.reason or "").startswith(f"3 generations have broken in the step after step {cascade.step}, on ")
    assert (cascade.reason or "?") in scenario_result.log()
    (saved,) = [event for event in scenario_result.events("save") if event.reason == "other ranks have gone"]
    assert saved.step == cascade.step


def state_of_a_rank_changed(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """A parameter of a rank changes by itself after a save; later another rank dies."""
    save_every = _FIRST_STEPS - 2
    behaviour: dict[str, float] = {"rank": 2, "drifts_at": save_every + 1}
    tracked = start(context, max_failures=5, behaviour=behaviour, checkpoint={"every": {"steps": save_every}})
    tracked.signal(1, signal.SIGKILL)
    return finish(context, tracked)


@pytest.mark.long
@after_scenario(state_of_a_rank_changed)
def test_ranks_with_different_states_go_on_from_the_newest_checkpoint(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    (difference,) = tracked.events("recovery")
    why = f"after step {difference.step} the states of ranks 0,3 and rank 2 differ"
    assert difference.reason == f"{why}; the ranks end, and save none of them"
    assert [event for event in tracked.events("save") if event.reason == "other ranks have gone"] == []
    (restart,) = tracked.events("restart")
    assert restart.reason == f"{why}, and none of them is saved"
    assert [event.step for event in tracked.events("train")] == [0, _FIRST_STEPS - 2]
    assert_same(tracked, reference)


def code_edited(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """The user edits the model while the run trains; later a rank dies."""
    tracked = start(context)
    with tracked.job.with_name("traced_model.py").open("a") as file:
        file.write("# An edit.\n")
    tracked.signal(1, signal.SIGKILL)
    tracked.wait_until(lambda: len(tracked.events("recovery")) == 2, "the refusal", timeout_s=60)
    return finish(context, tracked)


@pytest.mark.long
@after_scenario(code_edited)
def test_a_new_process_does_not_join_with_edited_code(scenario_result: tuple[TrackedRun, TrackedRun]) -> None:
    tracked, reference = scenario_result
    death, refusal = tracked.events("recovery")
    assert death.facts["world_size"] == 3
    assert refusal.reason == (
        "a new process of rank 1 on n3 did not join (traced_model.py changed since the ranks began); the training goes "
        "on with 3 ranks"
    )
    assert_same(tracked, reference)


def user_code_raised(context: ScenarioContext) -> TrackedRun:
    """The user's code raises on one rank."""
    tracked = context.start(
        "run",
        nodes=2,
        tasks=2,
        on=OTHER_HOSTS,
        sections={"requeue": {"max_failures": 5}},
        behaviour={"raise_at": 40},
    )
    tracked.wait_for_end("FAILED", timeout_s=120)
    return tracked


def user_code_left(context: ScenarioContext) -> TrackedRun:
    """The user's code ends one rank."""
    tracked = context.start(
        "run", nodes=2, tasks=2, on=OTHER_HOSTS, sections={"requeue": {"max_failures": 1}}, behaviour={"exit_at": 40}
    )
    tracked.wait_until(lambda: tracked.attempts == 2, "the restart", timeout_s=120)
    context.sandbox.run("scancel", tracked.job_id)
    return tracked


@after_scenario(user_code_raised)
def test_the_users_own_error_is_never_survived(scenario_result: TrackedRun) -> None:
    assert (scenario_result.attempts, scenario_result.result["exit_code"]) == (1, 70)
    assert "a bug in the user's model" in scenario_result.result["reason"]
    assert scenario_result.events("recovery") == []


@pytest.mark.long
@after_scenario(user_code_left)
def test_a_rank_that_its_code_ends_is_not_survived(scenario_result: TrackedRun) -> None:
    assert scenario_result.events("recovery") == []
    assert [event.cause for event in scenario_result.events("restart")] == ["crash"]


def killed_before_the_ranks_have_met(context: ScenarioContext) -> TrackedRun:
    """A rank is killed while it imports torch."""
    tracked = context.start("run", nodes=2, tasks=2, on=OTHER_HOSTS, sections={"requeue": {"max_failures": 1}})

    def is_killed() -> bool:
        ranks = tracked.ranks()
        tracked.signal(1, signal.SIGKILL, ranks)
        return 1 in ranks

    tracked.wait_until(lambda: tracked.attempts, "the first attempt")
    tracked.wait_until(is_killed, "the process of rank 1")
    # Much earlier than at the rendezvous timeout of 5 minutes.
    tracked.wait_until(lambda: tracked.events("requeue"), "the requeue", timeout_s=60)
    context.sandbox.run("scancel", tracked.job_id)
    return tracked


@pytest.mark.long
@after_scenario(killed_before_the_ranks_have_met)
def test_ranks_do_not_wait_for_one_that_was_killed_before_they_met(scenario_result: TrackedRun) -> None:
    (requeue,) = scenario_result.events("requeue")
    assert requeue.cause == "crash"
    assert "rank 1 ended without an error message: Killed" in (requeue.reason or "")


def service_killed(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """The membership service is killed, and then a rank."""
    tracked = start(context)
    for process in processes_with(f"HPCDDP_ATTEMPT_DIR={tracked.attempt.path}"):
        if "members" in process.argv:
            os.kill(process.pid, signal.SIGKILL)
    time.sleep(1)
    tracked.signal(1, signal.SIGKILL)
    return finish(context, tracked)


@pytest.mark.long
@after_scenario(service_killed)
def test_without_the_service_the_next_death_ends_in_a_restart(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    assert tracked.events("recovery") == []
    assert [event.cause for event in tracked.events("restart")] == ["crash"]
    assert_same(tracked, reference)


def stopped_after_recovery(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """The time limit is near after a recovery."""
    tracked = start(context)
    tracked.signal(1, signal.SIGKILL)
    wait_for_world(tracked, 3)
    tracked.signal(2, signal.SIGUSR2)
    return finish(context, tracked)


@pytest.mark.long
@after_scenario(stopped_after_recovery)
def test_ranks_that_went_on_stop_together(scenario_result: tuple[TrackedRun, TrackedRun]) -> None:
    tracked, reference = scenario_result
    (requeue,) = tracked.events("requeue")
    assert requeue.cause == "time_limit"
    assert_same(tracked, reference)


def rank_stopped(context: ScenarioContext) -> tuple[TrackedRun, TrackedRun]:
    """The watchdogs of the others end the hang, and the service ends the step of the rank, which does not answer."""
    tracked = start(context, launch={"hang_timeout": "10s"})
    tracked.signal(1, signal.SIGSTOP)
    return finish(context, tracked)


@pytest.mark.long
@after_scenario(rank_stopped)
def test_after_a_stopped_rank_the_tasks_start_again_from_the_last_step(
    scenario_result: tuple[TrackedRun, TrackedRun],
) -> None:
    tracked, reference = scenario_result
    (restart,) = tracked.events("restart")
    assert restart.cause == "crash"
    assert_same(tracked, reference)


def restarted_after_kill(context: ScenarioContext) -> ScenarioResult:
    return _restarted(context, "SIGKILL of a rank, max_failures 1", signal.SIGKILL)


def restarted_after_crash(context: ScenarioContext) -> ScenarioResult:
    return _restarted(context, "segmentation fault of rank 0, max_failures 1", signal.SIGSEGV, rank=0)


def restarted_after_stop(context: ScenarioContext) -> ScenarioResult:
    hang = {"launch": {"hang_timeout": "10s"}}
    return _restarted(context, "SIGSTOP of a rank, max_failures 1", signal.SIGSTOP, sections=hang)


def _restarted(
    context: ScenarioContext, fault: str, number: signal.Signals, *, rank: int = 1, sections: Sections | None = None
) -> ScenarioResult:
    """A signal ends or stops a rank between two saves; the ranks that are left may not go on."""
    requeue = {"max_failures": 1, "recovery": "restart"}
    tracked = context.start("run", on=OTHER_HOSTS, sections={"requeue": requeue, **(sections or {})})
    tracked.wait_for_steps(40)
    tracked.signal(rank, number)
    return tracked, context.compare(fault, tracked)


@pytest.mark.parametrize(
    "signal_name",
    [
        pytest.param("SIGKILL", marks=after_scenario(restarted_after_kill)),
        pytest.param("SIGSEGV", marks=[after_scenario(restarted_after_crash), pytest.mark.long]),
        pytest.param("SIGSTOP", marks=after_scenario(restarted_after_stop)),
    ],
)
def test_the_rank_that_is_left_saves_its_step_and_the_job_goes_on_from_it(
    scenario_result: ScenarioResult, signal_name: str
) -> None:
    tracked, comparison = scenario_result
    (restart,) = tracked.events("restart")
    assert restart.cause == "crash", signal_name
    (saved,) = [event for event in tracked.events("save") if event.reason == "other ranks have gone"]
    assert [event.step for event in tracked.events("train")] == [0, saved.step]
    # The step in which the rank died was begun twice.
    assert comparison.steps_lost <= 1
    assert comparison.has_same_result, comparison
