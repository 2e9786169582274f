"""One rank of two is told to stop; both do, after the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import read_decision
from hpcddp.stop.reasons import StopReason
from tests.distributed.training import evaluations, job_document, result, run_ranks, without_times

# The ranks have 9 and 8 batches of 16 validation samples, and ask each other once.
SPEC: dict[str, Any] = {"train__epochs": 2, "train__dataset_args": {"val": 257}}


def test_ranks_with_different_shares_leave_an_evaluation_together(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    jobs = [
        {"run": whole, "spec": job_document(**SPEC)},
        # Four steps, then the first question of the evaluation, which rank 1 answers.
        {"run": stopped, "spec": job_document(**SPEC), "stop_after_calls": 4, "stop_rank": 1},
        {"run": stopped, "spec": job_document(**SPEC), "attempt": 1},
    ]
    outcome = run_ranks(tmp_path / "ranks", 2, jobs)
    assert outcome.codes == [0, 0], outcome.outputs
    assert {error["kind"] for error in outcome.errors.values()} == {"stopped"}
    decision = read_decision(RunDirectory(stopped).attempt(0))
    assert decision is not None
    assert (decision.step, decision.reason, decision.saved) == (4, StopReason.WARNED, True)
    assert len(evaluations(stopped)) == 2
    assert without_times(stopped) == without_times(whole)
    assert result(stopped)["parameters_sha256"] == result(whole)["parameters_sha256"]
