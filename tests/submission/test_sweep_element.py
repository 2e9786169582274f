"""An element of a sweep, when its batch script begins."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.write import dump_for_script, parse_resolved
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.find import NoRunError
from hpcddp.run.job_file import write_exported_values
from hpcddp.run.job_records import SubmissionRecord, write_submission_record
from hpcddp.run.sweep import Chunk, Sweep, read_sweep, sweep_of, write_sweep
from hpcddp.slurm import commands
from hpcddp.submission.request import SubmissionError
from hpcddp.submission.resume import request_to_resume, resume
from hpcddp.submission.sweep_element import ElementError, find_to_resume
from hpcddp.supervise.begin import begin
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import make_fake_slurm
from tests.submission.requests import request_of

JOB = """name: demo
batch: {global_batch_size: 8}
train: {model: resnet18, dataset: digits}
sweep: {train.seed: 5..7}
"""
SCRIPT_JOB = dump_for_script(parse_resolved(JOB))


@pytest.fixture(autouse=True)
def job_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Slurm is there to be asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "show_job", lambda _: None)


def batch(index: int, array: str = "7", **more: str) -> dict[str, str]:
    """The environment of a batch script."""
    return {"SLURM_JOB_ID": "99", "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": str(index), **more}


def begun(element: int, environment: dict[str, str], run_id: str | None = "s1") -> AttemptDirectory:
    text = begin(
        run_root="runs", name="demo", run_id=run_id, job_text=SCRIPT_JOB, environment=environment, element=element
    )
    return AttemptDirectory.from_text(text)


def submitted_sweep(*, first: int = 0) -> Sweep:
    """Lay down what a submission leaves."""
    path = Path("runs/demo/s1").absolute()
    elements = tuple({"train.seed": seed} for seed in (5, 6, 7))
    sweep = Sweep(sweep_id="s1", path=path, elements=elements, chunks=(Chunk(job_id="7", first=first, count=3),))
    for folder in (sweep.logs, sweep.directory.submitit):
        folder.mkdir(parents=True, mode=0o700)
    write_sweep(sweep)
    sweep.directory.script.write_text("#!/bin/bash\n")
    sweep.directory.job_file.write_text(JOB)
    write_exported_values(sweep.directory, {})
    record = SubmissionRecord(
        cluster="slurm", job_id="7", directory=str(Path.cwd()), python="py", time=0.0, run_dir=str(sweep.path)
    )
    write_submission_record(sweep.directory, record)
    return sweep


def test_an_element_begins_as_a_run_of_its_own_with_its_values() -> None:
    sweep = submitted_sweep()
    run = begun(1, batch(1)).run
    assert run.path == sweep.run(1).path
    spec = parse_resolved(run.job_file.read_text())
    assert (spec.train.seed if spec.train else None, spec.sweep) == (6, None)
    document = json.loads(run.submission.read_text())
    assert json.loads(run.plan.read_text())["steps_per_epoch"] == 180
    facts = {name: document[name] for name in ("cluster", "job_id", "directory", "sweep", "index")}
    assert facts == {"cluster": "slurm", "job_id": "7_1", "directory": str(Path.cwd()), "sweep": "s1", "index": 1}


def test_its_log_is_the_one_that_slurm_writes() -> None:
    sweep = submitted_sweep()
    sweep.batch_log("7_2").write_text("from the script\n")
    run = begun(2, batch(2)).run
    assert run.batch_log.read_text() == "from the script\n"


def test_it_gets_the_pickle_of_the_sweep_if_that_is_the_one_that_was_submitted() -> None:
    sweep = submitted_sweep()
    pickle = sweep.directory.submitit / "submitted.pkl"
    pickle.write_bytes(b"pickle")
    digest = hashlib.sha256(b"pickle").hexdigest()
    run = begun(0, batch(0, HPCDDP_PICKLE_SHA256=digest)).run
    assert (run.submitit / "7_0_submitted.pkl").read_bytes() == b"pickle"
    run = begun(1, batch(1, HPCDDP_PICKLE_SHA256="another")).run
    assert not run.submitit.exists()


def test_an_element_of_a_script_submitted_by_hand_keeps_the_manifest() -> None:
    environment = batch(2, HPCDDP_SWEEP_FIRST="0", SLURM_CLUSTER_NAME="big")
    run = begun(2, environment, run_id=None).run
    assert run.run_id == "big-7_2"
    sweep = sweep_of(run)
    assert sweep is not None
    assert sweep.sweep_id == "big-7"
    assert sweep.job_id(2) == "7_2"
    # Its script is not kept, which is what a submission without this file says.
    assert not run.submission.exists()


def test_an_element_past_the_end_is_refused(golden: GoldenMessages) -> None:
    with pytest.raises(ElementError) as caught:
        begun(3, batch(3))
    message = golden.message(caught.value)
    assert message.startswith("the sweep s1 has no element 3; ")
    assert " --array=0-2, " in message


def test_an_element_is_resumed_with_a_script_of_its_own(tmp_path: Path) -> None:
    sweep = submitted_sweep()
    script = sweep.directory.script.read_text()
    run = begun(1, batch(1)).run
    slurm = make_fake_slurm(tmp_path / "slurm")
    submission = resume(run, request_to_resume(run, environment=slurm.environment()))
    assert submission.job_id == "101"
    document = json.loads(run.submission.read_text())
    assert (document["job_id"], document["sweep"], document["index"]) == ("101", "s1", 1)
    assert run.script.read_text() == (run.submitit / "101_submission.sh").read_text()
    assert "\n  seed: 6\n" in run.script.read_text()
    assert sweep.directory.script.read_text() == script


def test_an_element_is_resumed_with_another_job_that_has_its_values(tmp_path: Path) -> None:
    submitted_sweep()
    run = begun(2, batch(2)).run
    slurm = make_fake_slurm(tmp_path / "slurm")
    Path("job.yaml").write_text(JOB + "resources: {cpus_per_task: 3}\n")
    job = load_job(Path("job.yaml"))
    resume(run, request_of(job, environment=slurm.environment()))
    spec = parse_resolved(run.job_file.read_text())
    assert (spec.train.seed if spec.train else None, spec.sweep, spec.resources.cpus_per_task) == (7, None, 3)
    assert "--array" not in run.script.read_text()


def test_an_element_keeps_its_values_where_the_job_file_has_no_sweep(tmp_path: Path) -> None:
    submitted_sweep()
    run = begun(0, batch(0)).run
    slurm = make_fake_slurm(tmp_path / "slurm")
    Path("job.yaml").write_text(JOB.partition("sweep:")[0])
    job = load_job(Path("job.yaml"))
    resume(run, request_of(job, environment=slurm.environment()))
    assert "\n  seed: 5\n" in run.job_file.read_text()


def test_a_job_with_a_sweep_does_not_continue_a_run_of_its_own(golden: GoldenMessages) -> None:
    Path("job.yaml").write_text(JOB)
    run = RunDirectory(Path("runs/demo/r1").absolute())
    run.path.mkdir(parents=True, mode=0o700)
    with pytest.raises(SubmissionError) as caught:
        resume(run, request_of(load_job(Path("job.yaml"))))
    message = golden.message(caught.value)
    assert " the run r1 is not an element " in message
    assert message.endswith(": --set sweep=null")


def test_a_whole_sweep_is_not_resumed_at_once(golden: GoldenMessages) -> None:
    sweep = submitted_sweep()
    with pytest.raises(SubmissionError) as caught:
        resume(sweep.directory, request_to_resume(sweep.directory, environment={}))
    message = golden.message(caught.value)
    assert message.startswith("s1 is a sweep, ")
    assert ": hpcddp submit --resume s1; " in message
    assert message.endswith(": hpcddp submit --resume s1_0")
    Path("job.yaml").write_text(JOB)
    with pytest.raises(SubmissionError) as caught:
        resume(sweep.directory, request_of(load_job(Path("job.yaml"))))
    assert caught.value.message == message


def test_an_element_that_never_began_is_found_by_its_id_or_path_to_be_resumed() -> None:
    sweep = submitted_sweep()
    for text in ("s1_2", str(sweep.run(2).path)):
        run = find_to_resume(text, Path("runs"))
        assert run.path == sweep.run(2).path
        spec = parse_resolved(run.job_file.read_text())
        assert spec.train is not None
        assert spec.train.seed == 7
        assert json.loads(run.submission.read_text())["job_id"] == "7_2"
    assert read_sweep(sweep.path) == sweep


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("s1_3", "the sweep s1 has elements 0 to 2"),
        ("s2_0", "matches 's2_0'"),
        ("s1_x", "matches 's1_x'"),
        ("_0", "matches '_0'"),
        ("nothing", "matches 'nothing'"),
    ],
)
def test_what_is_no_element_is_no_run(golden: GoldenMessages, text: str, fact: str) -> None:
    submitted_sweep()
    with pytest.raises(NoRunError, match=fact) as caught:
        find_to_resume(text, Path("runs"))
    golden.message(caught.value)
