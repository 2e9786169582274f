"""Real ranks that are killed, stopped or overtaken, and what the next attempt makes of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training import job_document, result, run_ranks, without_times

CHANGES: dict[str, dict[str, Any]] = {
    "fp64": {"train__optimizer": {"name": "sgd", "momentum": 0.9}},
    "norm": {
        "train__model": "tests.distributed.own_code:norm_model",
        "train__precision": "fp32",
        "batch__max_per_device_batch_size": 5,
        "batch__tail": "drop",
    },
    "complex": {
        "train__model": "tests.distributed.own_code:complex_model",
        "train__optimizer": {"name": "adamw"},
        "train__ema_decay": 0.8,
        "learning_rate__base": 0.01,
    },
}


def spec(case: str) -> dict[str, Any]:
    return job_document(train__epochs=3, checkpoint={"every": {"steps": 3}}, **CHANGES[case])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kill every rank of two ranks in step 8, once for each case, and run the same jobs without a kill."""
    root = tmp_path_factory.mktemp("killed")
    whole = [{"run": root / f"whole-{case}", "spec": spec(case)} for case in CHANGES]
    assert run_ranks(root / "reference", 2, whole).codes == [0, 0]
    for case in CHANGES:
        job = {"run": root / case, "spec": spec(case), "kill_after_calls": 7}
        assert run_ranks(root / f"kill-{case}", 2, [job]).codes == [-9, -9]
    shutil.copytree(root / "fp64", root / "spare")
    return root


@pytest.fixture(scope="module")
def resumed(killed: Path) -> Path:
    """Start the killed runs again."""
    again = [{"run": killed / case, "spec": spec(case), "attempt": 1} for case in CHANGES]
    outcome = run_ranks(killed / "again", 2, again)
    assert outcome.codes == [0, 0], outcome.outputs
    # The write after step 6 may have been killed, too.
    assert re.search(r"going on after step [36] ", outcome.outputs[0])
    return killed


@pytest.mark.parametrize("case", CHANGES)
def test_killed_run_comes_out_bit_for_bit_as_if_it_had_not_been(resumed: Path, case: str) -> None:
    assert result(resumed / case)["parameters_sha256"] == result(resumed / f"whole-{case}")["parameters_sha256"]
    assert without_times(resumed / case) == without_times(resumed / f"whole-{case}")


def test_every_rank_says_that_there_is_no_valid_checkpoint(killed: Path) -> None:
    run = killed / "spare"
    for path in run.glob("checkpoints/step-*/optimizer.pt"):
        path.write_bytes(path.read_bytes()[:-1])
    outcome = run_ranks(killed / "rotten", 2, [{"run": run, "spec": spec("fp64"), "attempt": 1}])
    assert outcome.codes == [65, 65]
    assert "is passed over" in outcome.outputs[0]
    assert "optimizer.pt has" in outcome.outputs[0]
