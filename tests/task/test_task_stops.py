"""Two real ranks on this machine: signals, failures and hangs, and the rank that is named."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from hpcddp.run.collectives import read_collectives
from hpcddp.stop.reasons import StopReason
from tests.facts import assert_facts, line_from
from tests.messages import GoldenMessages
from tests.submission.local_run import start
from tests.task.test_umask import mode, open_to_others
from tests.waiting import wait_until

SHORT_TIMEOUT = "launch: {hang_timeout: 5s}"


def test_a_signal_to_one_rank_stops_both_after_the_same_step_with_a_checkpoint(
    tmp_path: Path, golden: GoldenMessages
) -> None:
    before = os.umask(0o027)
    run = start(tmp_path)
    os.umask(before)
    run.wait_until_it_trains()
    rank_1 = run.tasks()[1]
    for _ in range(3):
        # At once: after the first signal the ranks soon end.
        os.kill(rank_1, signal.SIGUSR2)
    run.wait_for_end()
    decision = run.decision
    assert decision is not None
    assert (decision.reason, decision.saved, decision.step) == (StopReason.WARNED, True, run.steps()[-1])
    assert (run.run.checkpoints / f"step-{decision.step:06d}").is_dir()
    assert [(event.facts["rank"], event.facts["signal"]) for event in run.events("signal")] == [(1, "SIGUSR2")]
    assert [event.step for event in run.events("save")].count(decision.step) == 1
    assert run.failures == []
    assert_facts(golden.message(line_from(run.log(1), "SIGUSR2: the training")), "saved", "at the end of a step")
    for rank in (0, 1):
        handlers = tmp_path / f"handlers-{rank}.json"
        check_handlers(json.loads(handlers.read_text()))
        # A model of the user's own writes with the umask of its submitter.
        assert mode(handlers) == 0o640
    assert open_to_others(run.run) == []


def check_handlers(handlers: dict[str, str]) -> None:
    """Check that our handlers do nothing, and that there are no others."""
    of_python = {name: handler for name, handler in handlers.items() if not handler.isdecimal()}
    assert {name: of_python.pop(name) for name in ("SIGTERM", "SIGUSR2", "SIGINT")} == dict.fromkeys(
        ("SIGTERM", "SIGUSR2", "SIGINT"), "do_nothing"
    )
    # submitit's, on a signal that nobody sends.
    assert of_python.pop("SIGRTMAX") == "SignalHandler.checkpoint_and_try_requeue"
    assert of_python == {}


def test_a_signal_before_torch_is_imported_is_not_lost(tmp_path: Path) -> None:
    run = start(tmp_path)
    wait_until(
        lambda: len(run.tasks()) == 2 and all(run.attempt.rank_log(rank).exists() for rank in (0, 1)), "the tasks", 120
    )
    run.signal(0, signal.SIGTERM)
    run.wait_for_end()
    assert run.decision is not None
    assert (run.decision.reason, run.decision.saved) == (StopReason.TERMINATED, True)
    assert run.steps() == list(range(1, run.decision.step + 1))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("exit=0", marks=pytest.mark.long("test_stop_failures.py has a rank that exits with 0")),
        pytest.param("kill", marks=pytest.mark.long("test_stop_failures.py kills a rank")),
    ],
)
def test_a_rank_that_ends_without_a_record_is_named_and_is_no_success(
    tmp_path: Path, fault: str, golden: GoldenMessages
) -> None:
    run = start(tmp_path, f"{fault}@step:5,rank=1")
    run.wait_for_end()
    assert run.result["status"] == "failed"
    assert run.result["exit_code"] == 71
    reason = golden.message(run.result["reason"], {f" on {socket.gethostname()}": " on HOST"})
    assert reason.startswith("rank 1 on ")
    assert_facts(reason, "ended without an error message", "step 5")
    assert [(failure.rank, failure.secondary) for failure in run.failures] == [(0, True)]
    wait_until(lambda: not run.tasks(), "the end of all tasks", 120)


@pytest.mark.long("tests/cluster/test_commands.py has an exception on one rank")
def test_an_exception_of_one_rank_is_the_first_and_the_other_only_followed(
    tmp_path: Path, golden: GoldenMessages
) -> None:
    run = start(tmp_path, "exception@step:5,rank=1")
    run.wait_for_end()
    first, follower = run.failures
    assert (first.rank, first.kind, first.exit_code, first.step, first.device) == (1, "InjectedError", 70, 5, "cpu")
    assert (follower.rank, follower.secondary, follower.exit_code) == (0, True, 71)
    assert run.result["exit_code"] == 70
    reason = golden.message(run.result["reason"], {f" on {socket.gethostname()}": " on HOST"})
    assert_facts(reason, "rank 1", "(cpu) failed first after step 5", "InjectedError")
    said = run.run.batch_log.read_text(encoding="utf-8")
    assert "raise InjectedError" in said
    assert "failed as a consequence" in said
    assert_facts(golden.message(line_from(run.log(1), "an error of the job's own code")), "the job is not requeued")
    assert_facts(golden.message(line_from(run.log(0), "failed as a consequence")), "the batch log names the one")
    wait_until(lambda: not run.tasks(), "the end of all tasks", 120)


@pytest.mark.long("tests/cluster/test_stop_failures.py stops a rank")
def test_a_rank_that_stands_still_is_named_and_the_stacks_of_the_other_are_dumped(tmp_path: Path) -> None:
    run = start(tmp_path, "stop@step:5,rank=1", launch=SHORT_TIMEOUT)
    run.wait_for_end()
    assert run.result["exit_code"] == 124
    assert run.result["reason"].startswith("rank 1 on ")
    hang = next(failure for failure in run.failures if failure.rank == 0)
    assert (hang.kind, hang.exit_code, hang.waiting) == ("hang", 124, True)
    assert "hangs: nothing happened for" in run.log(0)
    assert "in _engine_run_backward" in run.log(0)
    wait_until(lambda: not run.tasks(), "the end of all tasks", 120)


@pytest.mark.long("tests/cluster/test_stop_failures.py has a stuck rank, and test_distributed.py the recorder of gloo")
def test_a_rank_that_is_stuck_is_named_with_the_place_and_all_stacks_are_dumped(tmp_path: Path) -> None:
    run = start(tmp_path, "sleep=600@step:5,rank=1", launch=SHORT_TIMEOUT)
    run.wait_for_end()
    stuck, waiting = run.failures
    assert (stuck.rank, stuck.kind, stuck.exit_code, stuck.waiting) == (1, "hang", 124, False)
    assert (waiting.rank, waiting.kind, waiting.waiting) == (0, "hang", True)
    assert "after step 5; this rank is at " in stuck.message
    assert "in trigger" in stuck.message
    assert run.result["exit_code"] == 124
    assert all("most recent call first" in run.log(rank) for rank in (0, 1))
    # The real recorder of gloo: rank 0 is in a collective that rank 1 has not reached.
    found = read_collectives(run.attempt)
    (waits,) = {one.number for one in found[0] if not one.is_finished} - {one.number for one in found[1]}
    assert waits == max(one.number for one in found[1]) + 1
    wait_until(lambda: not run.tasks(), "the end of all tasks", 120)
