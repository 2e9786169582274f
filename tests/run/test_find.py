"""Which run a person means."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.find import NoRunError, all_runs, brief, chosen_run, find_run
from hpcddp.run.sweep import Sweep, write_sweep


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for run in ("digits/cluster-12", "digits/cluster-123", "resnet/other-7"):
        (tmp_path / "runs" / run / "attempts").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "no-run").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("text", "run"),
    [("cluster-123", "digits/cluster-123"), ("cluster-12", "digits/cluster-12"), ("oth", "resnet/other-7")],
)
def test_id_or_its_unique_beginning_names_a_run(root: Path, text: str, run: str) -> None:
    assert find_run(text, root).path == root / run


def test_path_names_a_run_wherever_it_is(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert find_run("digits/cluster-12", tmp_path / "elsewhere").path == root / "digits" / "cluster-12"


@pytest.mark.parametrize("text", ["", "no-run", "12", "file"])
def test_what_is_no_run_is_refused(root: Path, text: str) -> None:
    with pytest.raises(NoRunError) as caught:
        find_run(text, root)
    assert caught.value.message.startswith(f"no run under {root} matches {text!r}, and it is not a run directory; ")


def test_beginning_of_several_ids_is_refused_and_names_them(root: Path) -> None:
    with pytest.raises(
        NoRunError, match=r"'cluster-1' means 2 runs, digits/cluster-12, digits/cluster-123; write more of the id"
    ):
        find_run("cluster-1", root)


def test_same_id_under_two_names_is_refused(root: Path) -> None:
    (root / "resnet" / "cluster-12" / "attempts").mkdir(parents=True)
    with pytest.raises(NoRunError, match="means 2 runs, digits/cluster-12, resnet/cluster-12"):
        find_run("cluster-12", root)


def test_root_that_does_not_exist_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(NoRunError):
        find_run("any", tmp_path / "nothing")


def submit(root: Path, run: str, at: int) -> None:
    """Say when a run was submitted last."""
    path = RunDirectory(root / run).submission
    path.write_text("{}")
    os.utime(path, (at, at))


def test_the_run_that_was_submitted_last_is_the_default_also_when_it_was_resumed(root: Path) -> None:
    for at, run in enumerate(("digits/cluster-123", "resnet/other-7", "digits/cluster-12")):
        submit(root, run, at)
    assert [run.run_id for run in all_runs(root)] == ["cluster-12", "other-7", "cluster-123"]
    submit(root, "resnet/other-7", 9)
    assert chosen_run(None, root).run_id == "other-7"
    assert chosen_run("cluster-123", root).run_id == "cluster-123"


def test_a_script_that_was_submitted_by_hand_counts_from_its_first_attempt(root: Path) -> None:
    submit(root, "resnet/other-7", 100)
    submit(root, "digits/cluster-123", 50)
    start = RunDirectory(root / "digits" / "cluster-12").attempt(0).start
    start.parent.mkdir()
    start.write_text("{}")
    os.utime(start, (70, 70))
    assert [run.run_id for run in all_runs(root)] == ["other-7", "cluster-12", "cluster-123"]


def test_without_any_run_there_is_no_last_one(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match=r"there is no run under .*nothing; submit one, or say with --run-root where"):
        chosen_run(None, tmp_path / "nothing")


@pytest.fixture
def sweep(root: Path) -> Path:
    path = root / "digits" / "sweep-1"
    (path / "attempts").mkdir(parents=True)
    write_sweep(Sweep(sweep_id="sweep-1", path=path, elements=({}, {}, {}), chunks=()))
    (root / "digits" / "sweep-1_0" / "attempts").mkdir(parents=True)
    return path


def test_the_beginning_of_a_sweeps_id_means_the_sweep_and_not_its_elements(root: Path, sweep: Path) -> None:
    assert find_run("sweep", root).path == sweep
    assert find_run("sweep-1_0", root).path == root / "digits" / "sweep-1_0"


def test_an_element_that_has_not_begun_has_an_id_already(root: Path, sweep: Path) -> None:
    assert find_run("sweep-1_2", root).path == sweep.with_name("sweep-1_2")
    with pytest.raises(NoRunError):
        find_run("sweep-1_3", root)


def test_a_run_is_told_in_brief_by_its_files(root: Path) -> None:
    run = find_run("other-7", root)
    assert brief(run) == "resnet, submitted"
    run.attempt(0).path.mkdir()
    assert brief(run) == "resnet, attempt 0"
    run.result.write_text(json.dumps({"status": "failed"}))
    assert brief(run) == "resnet, failed"
