"""A training whose rank 0 is killed in the middle of a save comes out bit for bit as if it had not been."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.checkpoints import newest_valid
from hpcddp.stop.faults import SAVE_POINTS
from tests.distributed.training import job_document, result, run_ranks, without_times

# Saves after steps 2, 4, 6 and 8; the first, one in the middle of an epoch, and one that removes an old one.
STEPS = (2, 6, 8)


def spec() -> dict[str, Any]:
    return job_document(
        train__epochs=3,
        checkpoint={"every": {"steps": 2}, "keep": 2},
        train__optimizer={"name": "sgd", "momentum": 0.9},
    )


def no_warning(text: str) -> None:
    raise AssertionError(text)


def kill_and_resume(folder: Path, trials: Sequence[tuple[str, int]]) -> None:
    runs = {trial: folder / f"{trial[0]}-{trial[1]}" for trial in trials}
    for (point, step), run in runs.items():
        job = {"run": run, "spec": spec(), "faults": f"kill@{point}:{step},rank=0"}
        outcome = run_ranks(folder / f"kill-{run.name}", 2, [job])
        assert outcome.codes[0] == -9
        assert outcome.codes[1] != 0
        saved = step if point in ("save.latest", "save.prune") else step - 2
        newest = newest_valid(run / "checkpoints", expected=saved > 0, warn=no_warning)
        assert (newest.manifest.step if newest else 0) == saved
    again = [{"run": run, "spec": spec(), "attempt": 1} for run in runs.values()]
    whole = {"run": folder / "whole", "spec": spec()}
    assert run_ranks(folder / "again", 2, [whole, *again]).codes == [0, 0]
    for run in runs.values():
        assert result(run)["parameters_sha256"] == result(folder / "whole")["parameters_sha256"]
        assert without_times(run) == without_times(folder / "whole")


def test_killed_just_before_its_checkpoint_gets_its_name(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, [("save.rename", 6)])


@pytest.mark.long
def test_killed_at_any_point_of_any_save(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, list(product(SAVE_POINTS, STEPS)))
