"""Which run a person means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.find import (
    NoRunError,
    add_to_index,
    all_runs,
    brief,
    chosen_run,
    find_run,
    index_directory,
    indexed_runs,
    run_of_job,
    token_of,
)
from hpcddp.run.job_records import SubmissionRecord, write_submission_record
from hpcddp.run.record import write_record
from hpcddp.run.result import Result
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from tests.messages import GoldenMessages


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for run in ("digits/cluster-12", "digits/cluster-123", "resnet/other-7"):
        (tmp_path / "runs" / run / "attempts").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "no-run").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("text", "run"),
    [("cluster-123", "digits/cluster-123"), ("cluster-12", "digits/cluster-12"), ("othe", "resnet/other-7")],
)
def test_id_or_its_unique_beginning_names_a_run(root: Path, text: str, run: str) -> None:
    assert find_run(text, root).path == root / run


def test_path_names_a_run_wherever_it_is(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert find_run("digits/cluster-12", tmp_path / "elsewhere").path == root / "digits" / "cluster-12"


@pytest.mark.parametrize("text", ["no-run", "34", "file", "oth", "ther-7", "1"])
def test_what_is_no_run_is_refused(root: Path, text: str, golden: GoldenMessages) -> None:
    with pytest.raises(NoRunError) as caught:
        find_run(text, root)
    assert f"no run under {root} matches {text!r}" in golden.message(caught.value)


@pytest.mark.parametrize("text", ["", " "])
def test_no_run_is_meant_by_an_empty_text(root: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The path "" is the working directory.
    monkeypatch.chdir(next(root.glob("*/*")))
    with pytest.raises(NoRunError, match="RUN is empty"):
        find_run(text, root)


def test_beginning_of_several_ids_is_refused_and_names_them(root: Path, golden: GoldenMessages) -> None:
    with pytest.raises(NoRunError, match="'cluster-1' means 2 runs") as caught:
        find_run("cluster-1", root)
    message = golden.message(caught.value)
    assert "digits/cluster-12, digits/cluster-123;" in message
    assert "write more of the id" in message


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


def test_an_element_that_started_last_is_not_the_last_run(root: Path, sweep: Path) -> None:
    submit(root, "resnet/other-7", 0)
    submit(root, "digits/cluster-123", 0)
    submit(root, "digits/sweep-1", 10)
    submit(root, "digits/sweep-1_0", 30)
    submit(root, "digits/cluster-12", 20)
    assert chosen_run(None, root) == find_run("last", root) == RunDirectory(root / "digits" / "cluster-12")
    submit(root, "digits/sweep-1", 40)
    assert chosen_run(None, root) == find_run("last", root) == RunDirectory(sweep)


def test_the_hint_from_another_directory_names_the_run_that_last_means(root: Path, sweep: Path) -> None:
    for at, run in enumerate(("digits/cluster-12", "digits/sweep-1", "digits/sweep-1_0")):
        submit(root, run, at)
        add_to_index(RunDirectory(root / run))
    with pytest.raises(NoRunError, match=f"or write last, which is {sweep}$"):
        chosen_run(None, root.parent / "elsewhere")
    assert find_run("last", root.parent / "elsewhere") == RunDirectory(sweep)


def test_a_script_that_was_submitted_by_hand_counts_from_its_first_attempt(root: Path) -> None:
    submit(root, "resnet/other-7", 100)
    submit(root, "digits/cluster-123", 50)
    start = RunDirectory(root / "digits" / "cluster-12").attempt(0).start
    start.parent.mkdir()
    start.write_text("{}")
    os.utime(start, (70, 70))
    assert [run.run_id for run in all_runs(root)] == ["other-7", "cluster-12", "cluster-123"]


def test_without_any_run_there_is_no_last_one(tmp_path: Path, golden: GoldenMessages) -> None:
    with pytest.raises(NoRunError, match="there is no run under") as caught:
        chosen_run(None, tmp_path / "nothing")
    message = golden.message(caught.value)
    assert str(tmp_path / "nothing") in message
    assert "--run-root" in message


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
    write_record(run.result, Result(status="failed"))
    assert brief(run) == "resnet, failed"


IDS = ("20261121-101500-3fa2", "20261122-111500-d09c", "20261123-121500-77aa")


@pytest.fixture
def runs(tmp_path: Path) -> list[RunDirectory]:
    """Return three runs of one job, the newest last, in a root that is not the working directory's."""
    made = []
    for at, run_id in enumerate(IDS):
        run = RunDirectory(tmp_path / "project" / "runs" / "digits" / run_id)
        run.attempts.mkdir(parents=True)
        record = SubmissionRecord(
            cluster="slurm", job_id=str(40 + at), directory="/", python="python", time=0.0, run_dir=str(run.path)
        )
        write_submission_record(run, record)
        os.utime(run.submission, (at, at))
        made.append(run)
    return made


@pytest.mark.parametrize(
    ("text", "place"), [("d09c", 1), ("20261122-", 1), ("41", 1), ("digits", 2), ("last", 2), (IDS[0], 0)]
)
def test_a_part_of_an_id_a_name_and_a_job_id_name_a_run(
    runs: list[RunDirectory], tmp_path: Path, text: str, place: int
) -> None:
    assert find_run(text, tmp_path / "project" / "runs") == runs[place]
    with pytest.raises(NoRunError):
        find_run(text, tmp_path / "elsewhere")
    for run in runs:
        add_to_index(run)
    assert find_run(text, tmp_path / "elsewhere") == runs[place]


def test_a_job_id_that_a_rebuilt_cluster_gave_twice_means_the_newest_run(
    runs: list[RunDirectory], tmp_path: Path
) -> None:
    runs[2].submission.write_text(runs[1].submission.read_text())
    assert find_run("41", tmp_path / "project" / "runs") == runs[2]


@pytest.mark.parametrize("text", ["41", "1", "2026", "20260141", "601", "0041"])
def test_a_number_within_an_id_names_no_run(runs: list[RunDirectory], tmp_path: Path, text: str) -> None:
    """It is the id of a job, perhaps of one that has no run: another one must not be cancelled."""
    (tmp_path / "here" / "digits" / "20260141-004100-0123" / "attempts").mkdir(parents=True)
    with pytest.raises(NoRunError, match=f"matches '{text}'"):
        find_run(text, tmp_path / "here")
    add_to_index(runs[1])
    if text == "41":
        assert find_run(text, tmp_path / "here") == runs[1]


def test_runs_under_the_root_come_before_those_of_the_index(runs: list[RunDirectory], tmp_path: Path) -> None:
    add_to_index(runs[2])
    here = RunDirectory(tmp_path / "here" / "digits" / "20260101-000000-0123")
    here.attempts.mkdir(parents=True)
    assert find_run("last", tmp_path / "here") == here
    assert find_run("digits", tmp_path / "here") == here
    assert find_run("77aa", tmp_path / "here") == runs[2]


def test_an_element_of_a_sweep_is_named_by_a_part_of_the_sweeps_id_and_by_its_job_id(tmp_path: Path) -> None:
    path = tmp_path / "far" / "digits" / "20261121-101500-3fa2"
    (path / "attempts").mkdir(parents=True)
    chunks = (Chunk(job_id="50", first=0, count=2), Chunk(job_id="53", first=2, count=1))
    write_sweep(Sweep(sweep_id=path.name, path=path, elements=({}, {}, {}), chunks=chunks))
    add_to_index(RunDirectory(path))
    for text, element in (("3fa2_2", 2), ("50_1", 1), ("53_0", 2)):
        assert find_run(text, tmp_path).path == path.with_name(f"{path.name}_{element}")
    for text in ("3fa2", "50", "53", "digits"):
        assert find_run(text, tmp_path).path == path
    found = [run_of_job(job_id, tmp_path) for job_id in ("53", "53_0", "2026")]
    assert [run and run.path for run in found] == [path, path, None]


def test_an_element_is_named_by_its_jobs_name_in_the_newest_sweep_of_that_name(root: Path, sweep: Path) -> None:
    newest = sweep.with_name("sweep-2")
    (newest / "attempts").mkdir(parents=True)
    write_sweep(Sweep(sweep_id="sweep-2", path=newest, elements=({}, {}), chunks=()))
    for at, path in enumerate((sweep, newest)):
        submit(root, f"digits/{path.name}", at)
    assert find_run("digits_1", root).path == newest.with_name("sweep-2_1")
    with pytest.raises(NoRunError):
        find_run("digits_2", root)
    # A job's own name comes first.
    (root / "digits_1" / "other-8" / "attempts").mkdir(parents=True)
    assert find_run("digits_1", root).run_id == "other-8"


def test_an_element_of_the_last_sweep_and_of_a_job_is_named_like_the_sweep(
    root: Path, sweep: Path, golden: GoldenMessages
) -> None:
    older = root / "digits" / "sweep-0"
    (older / "attempts").mkdir(parents=True)
    write_sweep(Sweep(sweep_id="sweep-0", path=older, elements=({}, {}, {}, {}), chunks=()))
    submit(root, "digits/sweep-0", 10)
    submit(root, "digits/sweep-1", 20)
    for text in ("last_2", "digits_2"):
        assert find_run(text, root).path == sweep.with_name("sweep-1_2")
    for text in ("last_3", "sweep-1_3", "digits_7"):
        with pytest.raises(NoRunError, match=f"'{text}' is no run") as caught:
            find_run(text, root)
        message = golden.message(caught.value)
        assert "sweep-1 has elements 0 to 2" in message
        assert "write sweep-1_2" in message


@pytest.mark.parametrize(("text", "meant"), [("digit", "digits"), ("resent", "resnet"), ("Digits", "digits")])
def test_a_name_that_is_nearly_that_of_a_job_gets_it_as_advice(root: Path, text: str, meant: str) -> None:
    with pytest.raises(NoRunError, match=f"; did you mean {meant}?"):
        find_run(text, root)


def test_the_index_is_never_the_truth(runs: list[RunDirectory], tmp_path: Path) -> None:
    for run in runs:
        add_to_index(run)
    directory = index_directory()
    assert directory is not None
    assert directory.stat().st_mode & 0o777 == 0o700
    assert sorted(run.run_id for run in indexed_runs()) == sorted(IDS)
    runs[0].attempts.rmdir()
    runs[0].submission.unlink()
    runs[0].path.rmdir()
    for number, content in enumerate((b"", b"\xff", b"null", b"[]", b'{"run_dir": 3}', b'{"run_dir": "a\\u0000b"}')):
        (directory / f"{number}.json").write_bytes(content)
    os.mkfifo(directory / "fifo.json")
    assert sorted(run.run_id for run in indexed_runs()) == sorted(IDS[1:])
    with pytest.raises(NoRunError, match=f"the run {runs[0].path} does not exist any more") as gone:
        find_run(IDS[0], tmp_path / "elsewhere")
    queue = f"squeue --me --name=digits,digits-{IDS[0]}"
    assert f"if its job still waits or runs, end it with scancel ID ({queue} shows the id)" in gone.value.message
    with pytest.raises(NoRunError, match="matches '1121', and it is not"):
        find_run("1121", tmp_path / "elsewhere")
    assert find_run("last", tmp_path / "elsewhere") == runs[2]


def test_an_index_that_cannot_be_written_is_no_error(
    runs: list[RunDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    add_to_index(runs[0])
    assert indexed_runs() == []


def test_only_random_letters_are_a_short_form() -> None:
    assert [token_of(text) for text in (IDS[1], f"{IDS[1]}_3", "cluster-12", "demo")] == [
        "d09c", "d09c_3", "cluster-12", "demo",
    ]  # fmt: skip
