"""Submitting a sweep: how often sbatch is called, with what, and what lies on disk before anything runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.overrides import sweep_overrides
from hpcddp.jobfile.read import load_job
from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import read_submission
from hpcddp.run.sweep import Chunk, read_sweep
from hpcddp.slurm.job_environment import NO_DEPENDENCY, Dependency
from hpcddp.submission.request import SubmissionError
from hpcddp.submission.submit import prepare, submit
from hpcddp.submission.sweep import SweepSubmission, submit_sweep
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import FakeSlurm, make_fake_slurm
from tests.submission.requests import request_of

JOB = "name: demo\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: digits}\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return make_fake_slurm(tmp_path / "slurm")


def submitted(
    slurm: FakeSlurm,
    count: int,
    *,
    parallel: int | None = None,
    dependency: Dependency = NO_DEPENDENCY,
    **environment: str,
) -> SweepSubmission:
    sweep = sweep_overrides([f"train.seed=0..{count - 1}"], None, parallel)
    return submit_sweep(
        request_of(
            load_job(Path("job.yaml"), options=sweep),
            run_id="s1",
            environment=slurm.environment(**environment),
            dependency=dependency,
        )
    )


def test_a_sweep_is_one_call_and_its_directives_say_all(slurm: FakeSlurm) -> None:
    submission = submitted(slurm, 1000, parallel=7)
    assert slurm.calls == [["first=0"]]
    assert "#SBATCH --array=0-999%7\n" in (submission.sweep.path / "job.sbatch").read_text()
    assert submission.sweep.chunks == (Chunk(job_id="101", first=0, count=1000),)


def test_the_number_of_files_does_not_grow_with_the_elements(slurm: FakeSlurm) -> None:
    submission = submitted(slurm, 1000)
    files = sorted(str(path.relative_to("runs/demo")) for path in Path("runs/demo").rglob("*") if path.is_file())
    assert files == [
        "s1/code.json",
        "s1/environment.json",
        "s1/job.sbatch",
        "s1/job.yaml",
        "s1/source.json",
        "s1/submission.json",
        "s1/submitit/submitted.pkl",
        "s1/sweep.json",
    ]
    assert submission.sweep == read_sweep(submission.sweep.path)
    assert all(path.stat().st_mode & 0o077 == 0 for path in Path("runs").rglob("*"))


def test_the_pickle_of_all_elements_is_the_one_whose_digest_goes_along(slurm: FakeSlurm) -> None:
    (slurm.directory / "bin" / "sbatch").write_text(
        '#!/bin/bash\necho "$HPCDDP_PICKLE_SHA256" >"$RECORD/digest"\necho 101\n'
    )
    submission = submitted(slurm, 3)
    pickle = submission.sweep.directory.submitit / "submitted.pkl"
    assert (slurm.directory / "digest").read_text().strip() == hashlib.sha256(pickle.read_bytes()).hexdigest()


def test_a_sweep_longer_than_an_array_is_as_few_arrays_as_can_be(slurm: FakeSlurm) -> None:
    submission = submitted(slurm, 2500)
    assert slurm.calls == [
        ["--array=0-1000", "first=0"],
        ["--array=0-1000", "first=1001"],
        ["--array=0-497", "first=2002"],
    ]
    assert submission.sweep.job_id(2400) == "103_398"


def test_a_site_with_short_arrays_is_asked_when_it_refuses(slurm: FakeSlurm) -> None:
    refusal = "Batch job submission failed: Invalid job array specification"
    submission = submitted(slurm, 25, MAX_ARRAY_SIZE="11", REFUSED_CALL="1", REFUSAL=refusal)
    assert slurm.calls[1:] == [["--array=0-10", "first=0"], ["--array=0-10", "first=11"], ["--array=0-2", "first=22"]]
    assert [chunk.first for chunk in submission.sweep.chunks] == [0, 11, 22]


def test_the_schedulers_own_limit_on_arrays_counts_too(slurm: FakeSlurm) -> None:
    submitted(slurm, 1500, SCHEDULER_PARAMETERS="bf_interval=1,max_array_tasks=900")
    assert slurm.calls == [["--array=0-899", "first=0"], ["--array=0-599", "first=900"]]


def test_where_only_some_run_at_once_each_array_waits_for_the_one_before_it(slurm: FakeSlurm) -> None:
    submitted(slurm, 1500, parallel=4, dependency=Dependency(conditions=("afterany:7",), runs=("/runs/a",)))
    assert slurm.calls == [
        ["--dependency=afterany:7", "--array=0-1000%4", "first=0"],
        ["--dependency=afterany:7,afterany:101", "--array=0-498%4", "first=1001"],
    ]


@pytest.fixture(params=["INT", "TERM", "HUP"])
def signal_from_sbatch(request: pytest.FixtureRequest, slurm: FakeSlurm) -> Iterator[str]:
    """Let sbatch send a signal to its parent before it answers; SIGHUP also where the tests run under nohup."""
    sbatch = slurm.directory / "bin" / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("number=", f"kill -{request.param} $PPID; number=", 1))
    handler_before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield request.param
    signal.signal(signal.SIGHUP, handler_before)


@pytest.mark.usefixtures("signal_from_sbatch")
@pytest.mark.parametrize("is_sweep", [False, True])
def test_a_submission_that_is_interrupted_is_recorded_and_told(slurm: FakeSlurm, *, is_sweep: bool) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        submit_run_or_sweep(slurm, is_sweep=is_sweep)
    (run,) = Path("runs/demo").absolute().iterdir()
    assert str(caught.value) == f"{run.name} was submitted all the same; to end it: hpcddp cancel {run}"
    submission = read_submission(RunDirectory(run))
    assert submission is not None
    assert submission.job_id == "101"


@pytest.mark.usefixtures("signal_from_sbatch")
@pytest.mark.parametrize("is_sweep", [False, True])
def test_a_submission_that_is_interrupted_and_refused_leaves_nothing(slurm: FakeSlurm, *, is_sweep: bool) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^sbatch refused the job: "):
        submit_run_or_sweep(slurm, is_sweep=is_sweep, refused_call="1")
    assert not Path("runs").exists()


def submit_run_or_sweep(slurm: FakeSlurm, *, is_sweep: bool, refused_call: str = "0") -> None:
    if is_sweep:
        submitted(slurm, 3, REFUSED_CALL=refused_call)
    else:
        submit(request_of(load_job(Path("job.yaml")), environment=slurm.environment(REFUSED_CALL=refused_call)))


def test_ctrl_c_does_not_reach_sbatch(slurm: FakeSlurm) -> None:
    """The terminal sends its signals to the whole process group of the command."""
    sbatch = slurm.directory / "bin" / "sbatch"
    sbatch.write_text("#!/bin/bash\nkill -INT -- -$PPID; sleep 0.2; echo 101\n")
    (slurm.directory / "bin" / "scontrol").write_text("#!/bin/bash\n")
    completed = subprocess.run(
        [sys.executable, "-m", "hpcddp", "submit", "job.yaml", "--cluster", "slurm"],
        env={**os.environ, **slurm.environment(SLURM_CONF=str(sbatch))},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
        check=False,
    )
    (run,) = Path("runs/demo").absolute().iterdir()
    assert completed.returncode == 130, completed.stderr
    assert f"hpcddp: interrupted: {run.name} was submitted all the same; " in completed.stderr.replace("\n", " ")
    submission = read_submission(RunDirectory(run))
    assert submission is not None
    assert submission.job_id == "101"


def test_when_one_array_is_refused_nothing_is_left(slurm: FakeSlurm, golden: GoldenMessages) -> None:
    with pytest.raises(HpcddpError, match=r"sbatch refused the job: .*no more") as caught:
        submitted(slurm, 2500, REFUSED_CALL="3", REFUSAL="no more")
    golden.message(caught.value)
    assert slurm.cancelled == ["101", "102"]
    assert not Path("runs").exists()


def test_a_site_without_arrays_says_so(slurm: FakeSlurm, golden: GoldenMessages) -> None:
    with pytest.raises(SubmissionError) as caught:
        submitted(slurm, 1500, MAX_ARRAY_SIZE="0")
    message = golden.message(caught.value)
    assert "no job arrays (MaxArraySize); " in message
    assert message.endswith(" --set")


def refusal_of(slurm: FakeSlurm, *axes: str) -> str:
    job = load_job(Path("job.yaml"), overrides=["batch.split=error"], options=sweep_overrides(axes, None, None))
    with pytest.raises(SubmissionError) as caught:
        prepare(request_of(job, environment=slurm.environment()))
    return str(caught.value)


def test_an_element_whose_batch_has_no_plan_is_refused_with_its_values(
    slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    Path("job.yaml").write_text(f"{JOB}resources: {{tasks_per_node: 2}}\n")
    axes = ("batch.global_batch_size=8,9", "train.seed=0..2")
    message = golden.message(refusal_of(slurm, *axes))
    assert message.startswith("element 3 of the sweep, ")
    assert " with batch.global_batch_size=9: " in message


def test_an_element_whose_data_is_not_there_is_refused_with_its_values(
    slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    message = golden.message(refusal_of(slurm, "train.data_dir=/tmp,/no/such"))
    assert message.startswith("element 1 ")
    assert " with train.data_dir=\"/no/such\": train.data_dir is '/no/such', " in message


def test_json_lists_every_element_with_its_values_and_its_job(slurm: FakeSlurm) -> None:
    document = submitted(slurm, 2).as_json()
    assert document["sweep_id"] == "s1"
    assert document["job_ids"] == ["101"]
    assert document["elements"][1] == {
        "run_id": "s1_1",
        "job_id": "101_1",
        "run_dir": str(Path("runs/demo/s1_1").absolute()),
        "values": {"train.seed": 1},
    }


def test_a_sweep_of_one_run_says_so(slurm: FakeSlurm, golden: GoldenMessages) -> None:
    (warning,) = submitted(slurm, 1).warnings
    assert golden.message(warning).startswith("the sweep makes one run, ")
    assert "0.1,0.2 or 0..4" in warning
    shutil.rmtree("runs")
    assert submitted(slurm, 2).warnings == []


def test_a_refused_run_leaves_nothing(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    request = request_of(load_job(Path("job.yaml")), environment=slurm.environment(REFUSED_CALL="1", REFUSAL="no"))
    with pytest.raises(HpcddpError, match="sbatch refused the job"):
        submit(request)
    assert not Path("runs").exists()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcddp.submission.submit.write_submission_record", no_space)
    cancelled: list[str] = []
    monkeypatch.setattr("submitit.SlurmJob.cancel", lambda job, **_: cancelled.append(job.job_id))
    with pytest.raises(SubmissionError, match=r"job 102 was cancelled, .*submission\.json") as caught:
        submit(request_of(load_job(Path("job.yaml")), environment=slurm.environment()))
    golden.message(caught.value)
    assert cancelled == ["102"]
    assert not Path("runs").exists()


@pytest.mark.parametrize("run_root", ["\udcff", "a\x1b[31mb", "a\nb"])
def test_a_run_directory_that_no_script_can_hold_is_refused_before_the_submission(
    slurm: FakeSlurm, run_root: str
) -> None:
    Path(run_root).mkdir()
    job = load_job(Path("job.yaml"))
    job = replace(job, spec=job.spec.model_copy(update={"run_root": run_root}))
    with pytest.raises(HpcddpError):
        submit(request_of(job, environment=slurm.environment()))
    assert slurm.calls == []
    assert list(Path(run_root).iterdir()) == []
