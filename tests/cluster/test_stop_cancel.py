"""A cancelled run stays cancelled, whatever it was doing; a finished one stays finished; a live one is left alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from dataclasses import dataclass
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
from tests.cluster.save_scenarios import cancelled_then_damaged
from tests.cluster.scenarios import ONE_HOST, OTHER_HOSTS, ScenarioContext, ScenarioResult, after_scenario
from tests.cluster.tracked_run import TrackedRun, trace_file


def cancelled_in_a_save(context: ScenarioContext) -> TrackedRun:
    slow = {"environment": {"env": {"HPCDDP_FAULTS": "sleep=4@save.rename:46"}}}
    tracked = context.start("run", nodes=1, on=ONE_HOST, sections=slow)
    tracked.wait_until(lambda: list(tracked.run.checkpoints.glob(".step-*46.*")), "the save after step 46")
    cancel(tracked)
    report("scancel during a save", tracked)
    return tracked


def cancelled_before_the_requeue(context: ScenarioContext) -> TrackedRun:
    tracked = context.start("run", nodes=1, on=ONE_HOST)
    tracked.wait_for_steps(40)
    context.sandbox.run("scancel", "--signal=USR2", tracked.job_id)
    tracked.wait_until((tracked.attempt.path / "decision.json").exists, "the decision to stop")
    cancel(tracked)
    report("scancel between save and requeue", tracked)
    return tracked


@dataclass(frozen=True, kw_only=True)
class Pestered:
    """A run that was pestered while it lived and when it had finished.

    Attributes:
        refusal: what was said to a second job for it while it lived.
        digests: its directory, before and after a requeue that Slurm refused.
    """

    tracked: TrackedRun
    comparison: RunComparison
    refusal: str
    digests: tuple[str, str]


def pestered(context: ScenarioContext) -> Pestered:
    """Somebody talks to the port of rank 0 as soon as it is known, and goes on; somebody submits a second job.

    Then come signals to the batch script alone, each of which would end a shell without a trap, and one to srun too.
    """
    tracked = context.start("run", on=OTHER_HOSTS)
    tracked.wait_until(lambda: tracked.attempts and tracked.attempt.rendezvous.exists(), "a rendezvous")
    meeting = json.loads(tracked.attempt.rendezvous.read_text())
    refusal = ""
    while tracked.sandbox.job(tracked.job_id)["JobState"] == "RUNNING":
        place_of = (meeting["addresses"][0], meeting["port"])
        with contextlib.suppress(OSError), socket.create_connection(place_of, 1) as door:
            door.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(range(256)))
            time.sleep(0.3)
        time.sleep(0.1)
        if not refusal and trace_file(tracked.attempt, 0).exists():
            second = context.sandbox.run(*HPCDDP, "submit", "--resume", tracked.run.path, check=False)
            assert second.returncode == 2
            refusal = second.stderr
            for name in ("HUP", "INT", "TERM", "USR1", "USR2"):
                context.sandbox.run("scancel", "--batch", f"--signal={name}", tracked.job_id)
            context.sandbox.run("scancel", "--full", "--signal=INT", tracked.job_id)
    comparison = context.compare("strangers at the port of rank 0, a second job, signals to the batch script", tracked)
    before = digest_of(tracked.run.path)
    requeue = context.sandbox.run("scontrol", "requeue", tracked.job_id, check=False)
    assert requeue.returncode != 0, requeue.stdout
    report("finished, then requeued", tracked)
    digests = before, digest_of(tracked.run.path)
    return Pestered(tracked=tracked, comparison=comparison, refusal=refusal, digests=digests)


def digest_of(directory: Path) -> str:
    """Return one digest of every file, but for the batch script's log."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != "batch.log":
            digest.update(f"{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@after_scenario(cancelled_then_damaged)
def test_a_cancelled_run_stays_cancelled_and_goes_on_only_when_it_is_told_to(scenario_result: ScenarioResult) -> None:
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


@after_scenario(pestered)
def test_slurm_refuses_to_requeue_a_finished_run_and_nothing_changes(scenario_result: Pestered) -> None:
    job = scenario_result.tracked.sandbox.job(scenario_result.tracked.job_id)
    assert (job["ExitCode"], job["Restarts"], scenario_result.tracked.attempts) == ("0:0", "0", 1)
    before, after = scenario_result.digests
    assert before == after


@after_scenario(pestered)
def test_strangers_at_the_port_of_rank_0_a_second_job_and_signals_to_the_script_change_nothing(
    scenario_result: Pestered,
) -> None:
    assert scenario_result.comparison.lost_nothing, scenario_result.comparison
    assert scenario_result.comparison.attempts == 1


@after_scenario(pestered)
def test_a_run_that_lives_is_not_continued_by_a_second_job(scenario_result: Pestered) -> None:
    assert scenario_result.tracked.job_id in scenario_result.refusal
