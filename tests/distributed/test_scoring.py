"""Evaluation on real ranks: one value, the same on all of them and in one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.scoring_rank import METRICS, evaluate_samples
from tests.forked_python import ForkedPython
from tests.messages import GoldenMessages


@pytest.mark.parametrize("ranks", [2, 5])
def test_evaluation_on_several_ranks_equals_that_of_one_process(
    golden: GoldenMessages, tmp_path: Path, ranks: int
) -> None:
    script = Path(__file__).with_name("scoring_rank.py")
    processes = [ForkedPython(script, str(tmp_path / "store"), str(rank), str(ranks)) for rank in range(ranks)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, outputs
    assert len({output for output, _ in outputs}) == 1
    answer = json.loads(outputs[0][0])
    message = golden.message(answer["error"])
    assert "metric odd returns 1 numbers per sample" in message
    assert "2 on another; return as many" in message
    for samples, found in enumerate(answer["found"], start=1):
        expected = evaluate_samples(samples, METRICS)
        assert found.pop("loss") == pytest.approx(expected.pop("loss"), rel=0, abs=1e-12)
        assert np.array_equal([found[name] for name in expected], list(expected.values()), equal_nan=True), samples
