"""A cancelled run stays cancelled, whatever it was doing; a finished one stays finished; a live one is left alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from pathlib import Path

from tests.cluster.cancel_scenarios import (
    CANCELS,
    assert_cancelled_and_told,
    assert_cancelled_for_good,
    cancel,
    cancelled_and_preempted,
)
from tests.cluster.comparison import RunComparison, report
from tests.cluster.jobs import HPCDDP
from tests.cluster.scenarios import OTHER_HOSTS, ScenarioContext, after_scenario
from tests.cluster.tracked_run import TrackedRun


def cancelled_in_training(context: ScenarioContext) -> tuple[TrackedRun, RunComparison]:
    """Cancelled in the middle; then continued, by a new job, to the end."""
    tracked = context.start("run", on=OTHER_HOSTS)
    tracked.wait_for_steps(30)
    report("scancel in the training", cancel(tracked))
    attempts = tracked.attempts
    assert (tracked.sandbox.job(tracked.job_id)["JobState"], attempts) == ("CANCELLED", 1)
    document = json.loads(context.sandbox.run(*HPCDDP, "submit", "--resume", tracked.run.path, "--json").stdout)
    assert document["run_dir"] == str(tracked.run.path)
    resumed = TrackedRun(sandbox=tracked.sandbox, job=tracked.job, run=tracked.run, job_id=document["job_id"])
    return resumed, context.compare("scancel, then submit --resume", resumed)


def cancelled_in_a_save(context: ScenarioContext) -> TrackedRun:
    slow = {"environment": {"env": {"HPCDDP_FAULTS": "sleep=4@save.rename:46"}}}
    tracked = context.start("run", on=OTHER_HOSTS, sections=slow)
    tracked.wait_until(lambda: list(tracked.run.checkpoints.glob(".step-*46.*")), "the save after step 46")
    cancel(tracked)
    report("scancel during a save", tracked)
    return tracked


def cancelled_before_the_requeue(context: ScenarioContext) -> TrackedRun:
    tracked = context.start("run", on=OTHER_HOSTS)
    tracked.wait_for_steps(40)
    context.sandbox.run("scancel", "--signal=USR2", tracked.job_id)
    tracked.wait_until((tracked.attempt.path / "decision.json").exists, "the decision to stop")
    cancel(tracked)
    report("scancel between save and requeue", tracked)
    return tracked


def requeued_after_the_end(context: ScenarioContext) -> tuple[TrackedRun, str, str]:
    tracked = context.start("run", on=OTHER_HOSTS, epochs=2)
    tracked.wait_until_finished()
    before = digest_of(tracked.run.path)
    refused = context.sandbox.run("scontrol", "requeue", tracked.job_id, check=False)
    assert refused.returncode != 0, refused.stdout
    report("finished, then requeued", tracked)
    return tracked, before, digest_of(tracked.run.path)


def with_strangers(context: ScenarioContext) -> tuple[TrackedRun, RunComparison]:
    """Somebody talks to the port of rank 0 as soon as it is known, and goes on."""
    tracked = context.start("run", on=OTHER_HOSTS)
    tracked.wait_until(lambda: tracked.attempts and tracked.attempt.rendezvous.exists(), "a rendezvous")
    meeting = json.loads(tracked.attempt.rendezvous.read_text())
    while tracked.sandbox.job(tracked.job_id)["JobState"] == "RUNNING":
        place_of = (meeting["addresses"][0], meeting["port"])
        with contextlib.suppress(OSError), socket.create_connection(place_of, 1) as door:
            door.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(range(256)))
            time.sleep(0.3)
        time.sleep(0.1)
    return tracked, context.compare("another program on the port of rank 0", tracked)


def resumed_while_it_lives(context: ScenarioContext) -> tuple[TrackedRun, str, RunComparison]:
    tracked = context.start("run", on=OTHER_HOSTS)
    tracked.wait_for_steps(10)
    done = context.sandbox.run(*HPCDDP, "submit", "--resume", tracked.run.path, check=False)
    assert done.returncode == 2
    return tracked, done.stderr, context.compare("a second job for a run that lives", tracked)


def digest_of(directory: Path) -> str:
    """Return one digest of every file, but for the batch script's log."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != "batch.log":
            digest.update(f"{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@after_scenario(cancelled_in_training)
def test_a_cancelled_run_stays_cancelled_and_goes_on_only_when_it_is_told_to(
    scenario_result: tuple[TrackedRun, RunComparison],
) -> None:
    tracked, comparison = scenario_result
    assert comparison.has_same_result, comparison
    assert comparison.attempts == 2
    assert tracked.events("requeue") == []


@after_scenario(cancelled_in_a_save)
def test_a_cancel_during_a_save_leaves_a_checkpoint_that_loads(scenario_result: TrackedRun) -> None:
    assert_cancelled_for_good(scenario_result)
    assert scenario_result.events("requeue") == []


@after_scenario(cancelled_before_the_requeue)
def test_a_cancel_between_save_and_requeue_is_final(scenario_result: TrackedRun) -> None:
    assert_cancelled_for_good(scenario_result)


@after_scenario(cancelled_and_preempted, own_slurm=True)
def test_a_cancel_wins_before_in_and_after_a_preemption(scenario_result: list[TrackedRun]) -> None:
    for tracked in scenario_result:
        assert_cancelled_and_told(tracked)
    assert len(scenario_result) == len(CANCELS)


@after_scenario(requeued_after_the_end)
def test_slurm_refuses_to_requeue_a_finished_run_and_nothing_changes(
    scenario_result: tuple[TrackedRun, str, str],
) -> None:
    tracked, before, after = scenario_result
    job = tracked.sandbox.job(tracked.job_id)
    assert (job["ExitCode"], job["Restarts"], tracked.attempts) == ("0:0", "0", 1)
    assert before == after


@after_scenario(with_strangers)
def test_strangers_at_the_port_of_rank_0_change_nothing(scenario_result: tuple[TrackedRun, RunComparison]) -> None:
    _, comparison = scenario_result
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 1


@after_scenario(resumed_while_it_lives)
def test_a_run_that_lives_is_not_continued_by_a_second_job(
    scenario_result: tuple[TrackedRun, str, RunComparison],
) -> None:
    tracked, refusal, comparison = scenario_result
    assert tracked.job_id in refusal
    assert comparison.lost_nothing, comparison
    assert comparison.attempts == 1
