"""What the batch script runs before and after the tasks."""

import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hpcddp.launch.attempt import begin, end, main
from hpcddp.launch.claim import RunDirectoryError
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.failure import FailureRecord, write_failure
from hpcddp.run.files import read_json, write_json
from hpcddp.slurm import commands
from hpcddp.spec.job import JobSpec
from hpcddp.spec.write import dump_job

LOCAL = {"HPCDDP_LOCAL_JOB_ID": str(os.getpid())}
JOB = "name: demo\n"


def begin_in(
    root: Path, *, run_id: str | None = "r1", job: str = JOB, environment: dict[str, str] | None = None
) -> str:
    return begin(run_root=str(root), name="demo", run_id=run_id, job_text=job, environment=environment or LOCAL)


def begun(root: Path) -> AttemptDirectory:
    return AttemptDirectory.from_text(begin_in(root))


def another_process() -> dict[str, str]:
    """An environment of a local job whose predecessor in the same directory has died."""
    return {"HPCDDP_LOCAL_JOB_ID": "999999"}


def test_the_first_attempt_creates_a_private_run(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    assert attempt.path == tmp_path / "demo" / "r1" / "attempts" / "0"
    assert attempt.run.path.stat().st_mode & 0o777 == 0o700
    assert attempt.run.job_file.read_text() == JOB
    assert [event["event"] for event in read_events(attempt.run.events)] == ["start"]


def test_each_attempt_has_a_token_of_its_own(tmp_path: Path) -> None:
    first = begun(tmp_path)
    write_json(first.start, {**read_json(first.start), "job_id": "999998"})
    second = AttemptDirectory.from_text(begin_in(tmp_path))
    assert second.number == 1
    assert read_json(first.start)["token"] != read_json(second.start)["token"]


def test_a_second_job_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(RunDirectoryError, match=rf"is taken: job {os.getpid()} is still using it; use another run id"):
        begin_in(tmp_path, environment=another_process())


def job_text(**changes: Any) -> str:
    """The resolved text of a small job; keys such as ``train__seed`` change single values."""
    document: dict[str, Any] = {
        "name": "demo",
        "batch": {"global_batch_size": 30},
        "train": {"model": "resnet18", "dataset": "digits"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        document.setdefault(section, {})[name] = value
    return dump_job(JobSpec.model_validate(document), environment_values=False)


def begun_twice(root: Path, **changes: Any) -> AttemptDirectory:
    """Begin a run, then begin it again with a changed job after the first one's has died."""
    first = AttemptDirectory.from_text(begin_in(root, job=job_text()))
    write_json(first.start, {**read_json(first.start), "job_id": "999998"})
    return AttemptDirectory.from_text(begin_in(root, job=job_text(**changes)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train__seed": 3}, "train.seed is 0 there and 3 here"),
        ({"batch__global_batch_size": 31}, "batch.global_batch_size is 30 there and 31 here"),
        ({"train__optimizer": {"name": "adamw"}}, 'train.optimizer.name is "sgd" there and "adamw" here'),
    ],
)
def test_a_run_never_changes_its_training(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(
        RunDirectoryError, match=rf"holds another job file than this script: {sentence}, .*bring the old value back"
    ):
        begun_twice(tmp_path, **changes)


def test_a_run_goes_on_with_other_resources(tmp_path: Path) -> None:
    changes = {"resources__nodes": 3, "batch__max_per_device_batch_size": 4, "requeue__signal_lead": None}
    attempt = begun_twice(tmp_path, **changes)
    assert attempt.number == 1
    assert attempt.run.job_file.read_text() == job_text(**changes)


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    write_json(attempt.run.result, {"status": "finished"})
    write_json(attempt.start, {**read_json(attempt.start), "job_id": "999998"})
    assert begin_in(tmp_path) == ""
    assert attempt.run.newest_attempt() == 0


def test_a_failed_result_goes_when_the_run_is_continued(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    write_json(attempt.run.result, {"status": "failed"})
    write_json(attempt.start, {**read_json(attempt.start), "job_id": "999998"})
    begin_in(tmp_path)
    assert read_json(attempt.run.result) is None


def test_a_script_for_sbatch_that_is_run_by_hand_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["begin", "--run-root", str(tmp_path), "--name", "demo"], {}) == 2
    assert capsys.readouterr().err == (
        "hpcddp: this script was rendered for sbatch; run it with sbatch, or use hpcddp submit --cluster local\n"
    )


def test_the_end_of_a_finished_run_is_0_whatever_srun_said(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    write_json(attempt.run.result, {"status": "finished"})
    assert end(attempt, code=137, environment=LOCAL)[0] == 0


def test_the_end_names_the_first_failing_rank(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    record = FailureRecord(
        rank=1, host="n2", time=1.0, kind="ValueError", message="boom", traceback="T", exit_code=70, secondary=False
    )
    write_failure(attempt, record)
    code, text = end(attempt, code=137, environment=LOCAL)
    assert (code, text.splitlines()[0]) == (70, "rank 1 on n2 failed first: ValueError: boom")
    result = read_json(attempt.run.result)
    assert (result["status"], result["exit_code"]) == ("failed", 70)
    assert result["reason"] == "rank 1 on n2 failed first: ValueError: boom"


def test_tasks_that_end_with_0_and_no_result_are_not_a_success(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    code, text = end(attempt, code=0, environment=LOCAL)
    assert code == 71
    assert text.startswith("the tasks ended without a result and without naming a cause")
    assert read_json(attempt.run.result)["status"] == "failed"


def test_the_derived_run_id_is_the_clusters_name_and_the_job_id(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "my cluster", "PATH": ""}
    directory = begin_in(tmp_path, run_id=None, environment=environment)
    assert RunDirectory(tmp_path / "demo" / "my-cluster-12").attempt(0).path == Path(directory)


def test_a_job_id_that_comes_again_is_refused_and_so_is_its_requeue(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "toy"}
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, run_id=None, environment=environment))
    with pytest.raises(RunDirectoryError, match="it belongs to another job 12"):
        begin_in(tmp_path, run_id=None, environment=environment)
    with pytest.raises(RunDirectoryError, match="it belongs to another job 12"):
        # What was refused stays refused, although a requeue of it looks like one of the run's own job.
        begin_in(tmp_path, run_id=None, environment={**environment, "SLURM_RESTART_COUNT": "1"})
    assert attempt.run.newest_attempt() == 0


def test_a_requeue_of_the_runs_own_job_is_the_next_attempt(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "toy"}
    begin_in(tmp_path, run_id=None, environment=environment)
    requeued = begin_in(tmp_path, run_id=None, environment={**environment, "SLURM_RESTART_COUNT": "1"})
    assert AttemptDirectory.from_text(requeued).number == 1


def test_a_preempted_job_stays_until_slurm_takes_it_or_it_would_never_be_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begun(tmp_path)
    preempted = {"JobState": "RUNNING", "Requeue": "1", "PreemptTime": "2026-01-01T00:00:00"}
    answers = [preempted, preempted, preempted, {**preempted, "JobState": "COMPLETING"}]
    waits: list[float] = []
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(commands, "show_job", lambda _: answers.pop(0))
    monkeypatch.setattr(time, "sleep", waits.append)
    try:
        code, text = end(attempt, code=143, environment={"SLURM_JOB_ID": "7"})
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert (code, answers, len(waits)) == (71, [], 2)
    assert text.startswith("Slurm preempted job 7 (state RUNNING)")
    assert not attempt.run.result.exists()


def test_a_job_that_its_user_ended_is_cancelled_and_not_failed(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    assert end(attempt, code=143, environment=LOCAL, cancelled=True)[0] == 130
    assert read_json(attempt.run.result)["status"] == "cancelled"
