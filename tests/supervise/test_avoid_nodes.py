"""A requeued job keeps away from the nodes on which its run fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpcddp.run.events import append_event, read_events
from hpcddp.run.failure import write_failure
from hpcddp.run.job_records import FailureRecord, Rank, write_ranks
from hpcddp.run.node_faults import EXPIRY_S
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.supervise.attempts import SLURM, Scenario
from tests.supervise.fake_slurm import AWAY, FakeSlurm

AVOID = "requeue: {max_failures: 9, avoid_failed_nodes: true}\n"
NODES = {**SLURM, "SLURM_JOB_NODELIST": "n[1-2]"}
UPDATE = "update 7 {{'ExcNodeList': '{}'}}"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(monkeypatch)
    monkeypatch.setattr("time.monotonic", lambda: fake.waited)
    return fake


@pytest.fixture
def scenario(tmp_path: Path, slurm: FakeSlurm) -> Scenario:
    del slurm
    return scenario_with(tmp_path, AVOID)


def scenario_with(directory: Path, more: str) -> Scenario:
    scenario = Scenario(directory, NODES, more)
    begin_work(scenario)
    return scenario


def begin_work(scenario: Scenario) -> None:
    attempt = scenario.attempt
    write_ranks(attempt, [Rank(host="n1"), Rank(host="n2")])
    attempt.step.write_text("7.0\n")
    append_event(attempt.run.events, kind="train", time=time.time(), attempt=attempt.number, step=0)
    append_event(attempt.run.events, kind="save", time=time.time(), attempt=attempt.number, step=attempt.number + 1)


def fail(scenario: Scenario, rank: int, message: str = "the connection is lost") -> None:
    record = FailureRecord(
        rank=rank,
        host=f"n{rank + 1}",
        time=time.time(),
        kind="RuntimeError",
        message=message,
        traceback="Traceback",
        exit_code=71,
        secondary=False,
    )
    write_failure(scenario.attempt, record)


def fail_twice_on_n2(scenario: Scenario) -> None:
    """The run fails on n2, is restarted in its job, and fails there again."""
    fail(scenario, 1)
    ending = scenario.end()
    assert ending.next_attempt is not None
    scenario.attempt = ending.next_attempt
    begin_work(scenario)
    fail(scenario, 1)


def note_fault(scenario: Scenario, node: str, *, age_s: float = 0.0, fault: str = "lost") -> None:
    """An earlier requeue has noted a fault of a node."""
    when = time.time() - age_s
    append_event(scenario.attempt.run.events, kind="requeue", time=when, attempt=0, node_faults={node: fault})


def exclusions(scenario: Scenario) -> list[object]:
    return [event.facts["nodes"] for event in read_events(scenario.attempt.run.events) if event.kind == "exclusion"]


def test_a_node_that_is_twice_the_first_to_fail_is_excluded_by_a_requeue(
    scenario: Scenario, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    fail_twice_on_n2(scenario)
    ending = scenario.end()
    assert ending.next_attempt is None
    assert slurm.calls == ["requeue 7", UPDATE.format("n2")]
    assert exclusions(scenario) == [["n2"]]
    assert_facts(golden.message(capsys.readouterr().err), "job 7", "n2", "attempts 0, 1")


def test_without_the_field_the_node_is_noted_and_the_tasks_are_started_again(tmp_path: Path, slurm: FakeSlurm) -> None:
    scenario = scenario_with(tmp_path, "requeue: {max_failures: 9}\n")
    fail_twice_on_n2(scenario)
    assert scenario.end().next_attempt is not None
    assert slurm.calls == []
    restarts = [event for event in read_events(scenario.attempt.run.events) if event.kind == "restart"]
    assert [event.facts["node_faults"] for event in restarts] == [{"n2": "failure"}] * 2


def test_a_hardware_error_excludes_its_node_at_once(scenario: Scenario, slurm: FakeSlurm) -> None:
    fail(scenario, 0, "CUDA error: uncorrectable ECC error encountered")
    assert scenario.end().next_attempt is None
    assert slurm.calls == ["requeue 7", UPDATE.format("n1")]


def test_the_log_of_a_rank_without_a_record_may_name_a_hardware_error(scenario: Scenario, slurm: FakeSlurm) -> None:
    scenario.attempt.rank_log(0).write_text("terminate called: CUDA error: uncorrectable ECC error encountered\n")
    write_failure(
        scenario.attempt,
        FailureRecord(
            rank=1, host="n2", time=1.0, kind="peer", message="gone", traceback="", exit_code=71, secondary=True
        ),
    )
    scenario.end()
    assert slurm.calls == ["requeue 7", UPDATE.format("n1")]


def test_nodes_that_the_user_has_excluded_stay_excluded(scenario: Scenario, slurm: FakeSlurm) -> None:
    slurm.become("RUNNING", ExcNodeList="n[8-9]")
    note_fault(scenario, "n5")
    note_fault(scenario, "n9")
    append_event(scenario.attempt.run.events, kind="exclusion", time=time.time(), attempt=0, nodes=["n7"])
    fail(scenario, 1)
    scenario.attempt.ranks.unlink()
    scenario.end()
    assert slurm.calls == ["requeue 7", UPDATE.format("n8,n9,n5")]
    assert exclusions(scenario)[-1] == ["n5"]


def test_a_node_is_excluded_for_a_day(scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages) -> None:
    slurm.become("RUNNING", ExcNodeList="n2,n9")
    note_fault(scenario, "n2", age_s=EXPIRY_S + 1)
    append_event(scenario.attempt.run.events, kind="exclusion", time=time.time(), attempt=0, nodes=["n2"])
    scenario.attempt.ranks.unlink()
    fail(scenario, 0)
    scenario.end()
    assert slurm.calls == ["requeue 7", UPDATE.format("n9")]
    reasons = [event.reason for event in read_events(scenario.attempt.run.events) if event.kind == "exclusion"]
    assert_facts(golden.message(reasons[-1]), "job 7 may run on n2 again")


def test_nodes_that_the_job_must_get_are_not_excluded(scenario: Scenario, slurm: FakeSlurm) -> None:
    slurm.become("RUNNING", ReqNodeList="n2")
    fail_twice_on_n2(scenario)
    assert scenario.end().next_attempt is not None
    assert slurm.calls == []


def test_no_more_than_eight_nodes_are_excluded(scenario: Scenario, slurm: FakeSlurm) -> None:
    for number in range(10, 20):
        note_fault(scenario, f"n{number}", age_s=100 - number)
    scenario.attempt.ranks.unlink()
    fail(scenario, 0)
    scenario.end()
    assert slurm.calls[-1] == UPDATE.format(",".join(f"n{number}" for number in range(19, 11, -1)))


def test_slurm_must_be_able_to_start_the_job_without_the_nodes(
    scenario: Scenario, slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    slurm.needed_nodes = {"n4"}
    note_fault(scenario, "n4", age_s=60)
    note_fault(scenario, "n5")
    scenario.attempt.ranks.unlink()
    fail(scenario, 0)
    scenario.end()
    assert slurm.calls == ["requeue 7", UPDATE.format("n5")]
    reasons = [event.reason for event in read_events(scenario.attempt.run.events) if event.kind == "exclusion"]
    assert_facts(golden.message(reasons[-1]), "kept away from n5", "not kept away from n4", "configuration")


def test_a_refusal_of_slurm_is_one_sentence_and_the_requeue_holds(
    scenario: Scenario, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    def refuse(job_id: str, **fields: str) -> None:
        if "ExcNodeList" in fields:
            raise AWAY
        slurm.update_job(job_id, **fields)

    monkeypatch.setattr("hpcddp.slurm.commands.update_job", refuse)
    note_fault(scenario, "n5")
    scenario.attempt.ranks.unlink()
    fail(scenario, 0)
    assert "Slurm runs job 7 again" in scenario.end().text
    reasons = [event.reason for event in read_events(scenario.attempt.run.events) if event.kind == "exclusion"]
    assert_facts(golden.message(reasons[-1]), "not excluded", "Unable to contact slurm controller")


def test_damaged_notes_are_left_out(scenario: Scenario, slurm: FakeSlurm) -> None:
    events = scenario.attempt.run.events
    for noted in ("n5", ["n5"], {"n5": "haunted"}, {"n5": 3}, None):
        append_event(events, kind="requeue", time=time.time(), attempt=0, node_faults=noted)
    append_event(events, kind="exclusion", time=time.time(), attempt=0, nodes="n5")
    scenario.attempt.ranks.unlink()
    fail(scenario, 0)
    scenario.end()
    assert slurm.calls == ["requeue 7"]
