"""What the batch script runs before and after the tasks."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import UserError
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.write import DamagedJobError, OtherDefaultsError, dump_for_script, dump_job
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import EventKind, append_event, read_events
from hpcddp.run.failure import beginning
from hpcddp.run.files import read_json, write_json
from hpcddp.run.job_records import ProgramExit, Start, read_start, write_exit, write_start
from hpcddp.run.ownership import RunDirectoryError, is_alive, refuse_another_training
from hpcddp.run.record import write_record
from hpcddp.run.result import Result
from hpcddp.run.sweep import Sweep, write_sweep
from hpcddp.slurm import commands
from hpcddp.slurm.job_environment import Dependency
from hpcddp.supervise import begin as begin_module
from hpcddp.supervise.__main__ import main
from hpcddp.supervise.begin import begin
from hpcddp.supervise.refusals import PATIENCE_S, BudgetError, CancelledError, PredecessorError
from hpcddp.version import __version__
from tests.facts import assert_facts, line_from
from tests.messages import GoldenMessages
from tests.submission.local_run import script_process
from tests.supervise.fake_slurm import AWAY, FakeSlurm
from tests.supervise.stdin import stdin_of

LOCAL = {"HPCDDP_LOCAL_JOB_ID": str(os.getpid())}


def job(**changes: Any) -> JobSpec:
    """A small job; keys such as ``train__seed`` change single values."""
    document: dict[str, Any] = {
        "name": "demo",
        "batch": {"global_batch_size": 30},
        "train": {"model": "resnet18", "dataset": "digits"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        document.setdefault(section, {})[name] = value
    return JobSpec.model_validate(document)


JOB = dump_for_script(job())


def begin_in(
    root: Path, *, run_id: str | None = "r1", job_text: str = JOB, environment: dict[str, str] | None = None
) -> str:
    return begin(run_root=str(root), name="demo", run_id=run_id, job_text=job_text, environment=environment or LOCAL)


def begun(root: Path) -> AttemptDirectory:
    return AttemptDirectory.from_text(begin_in(root))


def another_process() -> dict[str, str]:
    """An environment of a local job whose predecessor in the same directory has died."""
    return {"HPCDDP_LOCAL_JOB_ID": "999999"}


def test_what_the_script_has_noticed_is_in_the_event_log(tmp_path: Path) -> None:
    said = "environment.setup: source a.sh ended with exit code 1"
    begin(run_root=str(tmp_path), name="demo", run_id="r1", job_text=JOB, environment=LOCAL, warnings=[said])
    events = read_events(tmp_path / "demo" / "r1" / "events.jsonl")
    assert [(event.kind, event.reason) for event in events[1:]] == [("warning", said)]


def test_the_first_attempt_creates_a_private_run(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    assert attempt.path == tmp_path / "demo" / "r1" / "attempts" / "0"
    assert attempt.run.path.stat().st_mode & 0o777 == 0o700
    assert attempt.run.job_file.read_text() == dump_job(job(), environment_values=False)
    assert [event.kind for event in read_events(attempt.run.events)] == ["start"]


def test_each_attempt_has_a_token_of_its_own(tmp_path: Path) -> None:
    first = begun(tmp_path)
    write_json(first.start, {**read_json(first.start), "job_id": "999998"})
    second = AttemptDirectory.from_text(begin_in(tmp_path))
    assert second.number == 1
    assert read_json(first.start)["token"] != read_json(second.start)["token"]


def test_a_second_job_is_refused_while_the_first_lives(tmp_path: Path, golden: GoldenMessages) -> None:
    with script_process() as process:
        begin_in(tmp_path, environment={"HPCDDP_LOCAL_JOB_ID": str(process.pid)})
        with pytest.raises(RunDirectoryError) as caught:
            begin_in(tmp_path, environment=another_process())
    message = golden.message(caught.value, {f"job {process.pid}": "job PID"})
    assert_facts(message, "is taken", f"job {process.pid}", "another run id")


@pytest.mark.parametrize("is_away_s", [300, 3600])
def test_a_second_job_waits_until_slurm_says_whether_the_first_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_away_s: float, golden: GoldenMessages
) -> None:
    slurm, now = FakeSlurm(monkeypatch), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + slurm.waited)
    attempt = begun(tmp_path)
    write_start(attempt, Start(job_id="7", submit_time="then", host="n1", token="t", time=0.0, is_local=False))
    slurm.become("RUNNING", SubmitTime="then")
    slurm.errors = [AWAY] * int(is_away_s / 2)
    why = "is still using it" if is_away_s < PATIENCE_S else "Slurm did not say"
    with pytest.raises(RunDirectoryError) as caught:
        begin_in(tmp_path, environment=another_process())
    assert_facts(golden.message(caught.value), "job 7", why)
    assert len(list(attempt.run.attempts.iterdir())) == 1


def test_a_job_that_a_requeued_job_submits_is_a_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(monkeypatch, Restarts="0")
    inherited = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, run_id=None, environment=inherited))
    assert (attempt.number, slurm.waited) == (0, 0)
    start = read_start(attempt)
    assert start is not None
    assert start.restart_count == 0


def of_another_version(**changes: Any) -> str:
    """The job in a script that another version has rendered."""
    return dump_for_script(job(**changes)).replace(__version__, "0.9.9")


def test_a_script_of_another_version_is_refused_and_leaves_nothing(tmp_path: Path, golden: GoldenMessages) -> None:
    with pytest.raises(OtherDefaultsError) as caught:
        begin_in(tmp_path, job_text=of_another_version())
    message = golden.message(caught.value, {__version__: "HERE"})
    assert_facts(message, "rendered by hpcddp 0.9.9", f"hpcddp {__version__}, which runs it", "render it again")
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_script_of_another_version_begins_a_run_that_has_its_job_file(tmp_path: Path) -> None:
    first = AttemptDirectory.from_text(begin_in(tmp_path, job_text=dump_for_script(job(train__epochs=7))))
    write_json(first.start, {**read_json(first.start), "job_id": "999998"})
    second = AttemptDirectory.from_text(begin_in(tmp_path, job_text=of_another_version()))
    assert second.number == 1
    assert "\n  epochs: 7\n" in second.run.job_file.read_text()


def test_a_job_file_that_others_may_write_does_not_complete_a_script(tmp_path: Path) -> None:
    first = begun(tmp_path)
    first.run.path.chmod(0o777)
    with pytest.raises(RunDirectoryError, match="can be written by others"):
        begin_in(tmp_path, job_text=of_another_version())


@pytest.mark.parametrize("first_line", ["", "hpcddp_version: 3\n", "hpcddp_version: []\n"])
def test_a_job_that_does_not_say_which_version_wrote_it_is_refused(
    tmp_path: Path, first_line: str, golden: GoldenMessages
) -> None:
    rest = JOB.partition("\n")[2]
    with pytest.raises(DamagedJobError) as caught:
        begin_in(tmp_path, job_text=first_line + rest)
    assert_facts(golden.message(caught.value), "hpcddp_version", "render the script again")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("job_text", "fact"),
    [
        ("", "it is empty"),
        (JOB.partition("\n")[0] + "\n", "name is missing"),
        (f"{JOB}train: {{", "line 8 is not valid YAML"),
        (f"{JOB}old_field: 1\n", "old_field is not a field"),
    ],
    ids=["empty", "cut after a line", "cut in a line", "unknown field"],
)
def test_a_damaged_job_is_refused_with_the_advice_to_render_the_script_again(
    tmp_path: Path, job_text: str, fact: str, golden: GoldenMessages
) -> None:
    with pytest.raises(DamagedJobError) as caught:
        begin_in(tmp_path, job_text=job_text)
    message = golden.message(caught.value)
    assert_facts(message, "the job in the script is damaged", fact)
    assert message.endswith("; render the script again")
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_is_not_utf8_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    monkeypatch.setattr("sys.stdin", stdin_of(JOB.encode() + b"#\xff\n"))
    assert main(["begin", "--run-root", str(tmp_path), "--name", "demo", "--run-id", "r1"], {}) == 2
    assert_facts(golden.message(capsys.readouterr().err), "is not UTF-8", "render the script again")
    assert list(tmp_path.iterdir()) == []


def test_a_job_is_utf8_in_any_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = dump_for_script(JobSpec(name="demo", command=("python", "träin.py")))
    monkeypatch.setattr("sys.stdin", stdin_of(command.encode(), encoding="latin-1"))
    assert main(["begin", "--run-root", str(tmp_path), "--name", "demo", "--run-id", "r1"], LOCAL) == 0
    attempt = AttemptDirectory.from_text(capsys.readouterr().out.strip())
    assert "träin.py" in attempt.run.job_file.read_text(encoding="utf-8")


def begun_twice(root: Path, **changes: Any) -> AttemptDirectory:
    """Begin a run, then begin it again with a changed job after the first one's has died."""
    first = AttemptDirectory.from_text(begin_in(root))
    write_json(first.start, {**read_json(first.start), "job_id": "999998"})
    return AttemptDirectory.from_text(begin_in(root, job_text=dump_for_script(job(**changes))))


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"train__seed": 3}, "train.seed is 0 there and 3 here"),
        ({"batch__global_batch_size": 31}, "batch.global_batch_size is 30 there and 31 here"),
        ({"train__optimizer": {"name": "adamw"}}, 'train.optimizer.name is "sgd" there and "adamw" here'),
    ],
)
def test_a_run_never_changes_its_training(
    tmp_path: Path, changes: dict[str, Any], fact: str, golden: GoldenMessages
) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        begun_twice(tmp_path, **changes)
    assert_facts(golden.message(caught.value), fact, "restore the old value")


def test_a_run_goes_on_with_other_resources(tmp_path: Path) -> None:
    changes = {"resources__nodes": 3, "batch__max_per_device_batch_size": 4, "requeue__signal_lead": None}
    attempt = begun_twice(tmp_path, **changes)
    assert attempt.number == 1
    assert attempt.run.job_file.read_text() == dump_job(job(**changes), environment_values=False)


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    write_record(attempt.run.result, Result(status="finished"))
    write_json(attempt.start, {**read_json(attempt.start), "job_id": "999998"})
    assert begin_in(tmp_path) == ""
    assert attempt.run.newest_attempt() == 0


def test_a_failed_result_goes_when_the_run_is_continued(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    write_record(attempt.run.result, Result(status="failed"))
    write_json(attempt.start, {**read_json(attempt.start), "job_id": "999998"})
    begin_in(tmp_path)
    assert read_json(attempt.run.result) is None


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeSlurm, AttemptDirectory, dict[str, str]]:
    """A run that was preempted once and has failed since, and the environment of one more start of its job."""
    slurm = FakeSlurm(monkeypatch)
    environment = {"SLURM_JOB_ID": "7"}
    begin_in(tmp_path, environment=environment)
    slurm.become("RUNNING", Restarts="1")
    environment["SLURM_RESTART_COUNT"] = "1"
    run = RunDirectory(tmp_path / "demo" / "r1")
    append_event(run.events, kind="requeue", time=1.0, attempt=0, cause="preemption")
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, environment=environment))
    append_event(run.events, kind="save", time=2.0, attempt=1, step=5)
    append_event(run.events, kind="failure", time=2.0, attempt=1, reason="an error")
    write_record(run.result, Result(status="failed", reason="an error", final=True))
    slurm.become("RUNNING", Restarts="2")
    return slurm, attempt, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}


def begin_by_script(root: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", stdin_of(JOB.encode()))
    return main(["begin", "--run-root", str(root), "--name", "demo", "--run-id", "r1"], environment)


def test_a_run_that_has_ended_for_good_is_not_started_again_by_slurm_alone(
    ended: tuple[FakeSlurm, AttemptDirectory, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: GoldenMessages,
) -> None:
    slurm, attempt, environment = ended
    assert begin_by_script(tmp_path, environment, monkeypatch) == 130
    message = golden.message(capsys.readouterr().err)
    assert_facts(message, "has failed (an error)", "job 7 again", f"hpcddp submit JOB --resume {attempt.run.path}")
    assert (slurm.is_forbidden, attempt.run.newest_attempt()) == (True, 1)
    assert read_json(attempt.run.result)["status"] == "failed"
    assert read_events(attempt.run.events)[-1].kind == "refusal"


def test_a_mistake_of_hpcddp_in_a_requeued_job_is_not_repeated(
    ended: tuple[FakeSlurm, AttemptDirectory, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(**_: object) -> str:
        raise ValueError("a mistake")

    slurm, _, environment = ended
    monkeypatch.setattr("hpcddp.supervise.begin.begin", begin)
    with pytest.raises(ValueError, match="a mistake"):
        begin_by_script(tmp_path, environment, monkeypatch)
    assert slurm.is_forbidden


RESUMED: tuple[EventKind, ...] = ("resume", "requeue")


@pytest.mark.parametrize("by", [*RESUMED, "hpcddp requeue", "stopped", "never preempted"])
def test_a_run_that_has_ended_is_started_again_where_that_was_meant(
    ended: tuple[FakeSlurm, AttemptDirectory, dict[str, str]], tmp_path: Path, by: str
) -> None:
    _, attempt, environment = ended
    run = attempt.run
    for kind in RESUMED:
        if by == kind:
            append_event(run.events, kind=kind, time=3.0, attempt=1)
    if by == "hpcddp requeue":
        attempt.requeue_request.touch()
        os.utime(attempt.requeue_request, (time.time() + 5, time.time() + 5))
    elif by == "stopped":
        write_record(run.result, Result(status="stopped", reason="an error"))
    elif by == "never preempted":
        run.events.write_text(run.events.read_text().replace("preemption", "node_failure"))
    assert AttemptDirectory.from_text(begin_in(tmp_path, environment=environment)).number == 2


def test_a_finished_run_whose_job_slurm_runs_again_ends_at_once_and_for_good(
    ended: tuple[FakeSlurm, AttemptDirectory, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, attempt, environment = ended
    write_record(attempt.run.result, Result(status="finished", final=True))
    assert begin_by_script(tmp_path, environment, monkeypatch) == 0
    assert (slurm.is_forbidden, attempt.run.newest_attempt()) == (True, 1)


@pytest.mark.parametrize(
    ("status", "is_started"), [("finished", True), ("failed", False), ("stopped", False), (None, False)]
)
def test_a_run_starts_only_after_the_runs_that_must_finish_before_it(
    tmp_path: Path, status: str | None, golden: GoldenMessages, *, is_started: bool
) -> None:
    before = RunDirectory(tmp_path / "demo" / "before")
    before.path.mkdir(parents=True)
    if status is not None:
        write_record(before.result, Result(status=status, reason="an error"))
    environment = {**LOCAL, **Dependency(runs=(str(before.path),)).environment}
    if is_started:
        begin_in(tmp_path, environment=environment)
        return
    with pytest.raises(PredecessorError) as caught:
        begin_in(tmp_path, environment=environment)
    run = RunDirectory(tmp_path / "demo" / "r1")
    resume = f"--resume {run.path} --after {before.path}"
    assert_facts(golden.message(caught.value), "run before", "--after", resume)
    result = read_json(run.result)
    assert (result["status"], result["final"], run.newest_attempt()) == ("stopped", False, None)
    assert result["resume"].endswith(resume)


@pytest.mark.parametrize("damaged", ["result.json", "sweep.json"])
def test_a_run_before_whose_record_is_damaged_keeps_this_one_from_its_start(tmp_path: Path, damaged: str) -> None:
    before = RunDirectory(tmp_path / "demo" / "before")
    before.path.mkdir(parents=True)
    (before.path / damaged).write_text("{")
    environment = {**LOCAL, **Dependency(runs=(str(before.path),)).environment}
    with pytest.raises(PredecessorError, match=f"it is not known whether {before.path}"):
        begin_in(tmp_path, environment=environment)
    assert read_json(tmp_path / "demo" / "r1" / "result.json")["status"] == "stopped"


def test_a_list_of_runs_before_that_is_none_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"HPCDDP_AFTER is '\{', which is no JSON list"):
        begin_in(tmp_path, environment={**LOCAL, "HPCDDP_AFTER": "{"})


def test_a_run_waits_for_every_element_of_a_sweep(tmp_path: Path) -> None:
    sweep = Sweep(sweep_id="s", path=tmp_path / "demo" / "s", elements=({"a": 1}, {"a": 2}), chunks=())
    sweep.path.mkdir(parents=True)
    write_sweep(sweep)
    environment = {**LOCAL, **Dependency(runs=(str(sweep.path),)).environment}
    for index in range(2):
        with pytest.raises(PredecessorError, match=f"run s_{index}, "):
            begin_in(tmp_path, environment=environment)
        sweep.run(index).path.mkdir()
        write_record(sweep.run(index).result, Result(status="finished"))
    begin_in(tmp_path, environment=environment)


def test_a_requeued_job_does_not_ask_for_the_runs_before_it_again(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "toy"}
    begin_in(tmp_path, environment=environment)
    gone = Dependency(runs=(str(tmp_path / "gone"),)).environment
    requeued = begin_in(tmp_path, environment={**environment, **gone, "SLURM_RESTART_COUNT": "1"})
    assert AttemptDirectory.from_text(requeued).number == 1


def test_a_script_for_sbatch_that_is_run_by_hand_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    monkeypatch.setattr("sys.stdin", stdin_of(b""))
    assert main(["begin", "--run-root", str(tmp_path), "--name", "demo"], {}) == 2
    assert_facts(golden.message(capsys.readouterr().err), "run it with sbatch", "hpcddp submit --cluster local")


def test_the_derived_run_id_is_the_clusters_name_and_the_job_id(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "my cluster", "PATH": ""}
    directory = begin_in(tmp_path, run_id=None, environment=environment)
    assert RunDirectory(tmp_path / "demo" / "my-cluster-12").attempt(0).path == Path(directory)


def test_the_batch_log_of_a_script_that_was_submitted_by_hand_is_what_it_prints(tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "hpcddp.supervise", "begin", "--run-root", "runs", "--name", "demo"]
    environment = {**os.environ, "SLURM_JOB_ID": "12", "SLURM_CLUSTER_NAME": "toy", "PATH": ""}
    with (tmp_path / "demo-12.out").open("wb") as printed:
        subprocess.run(words, input=JOB.encode(), stderr=printed, cwd=tmp_path, env=environment, check=True)
    run = RunDirectory(tmp_path / "runs" / "demo" / "toy-12")
    assert run.batch_log.read_text().endswith(beginning(run.attempt(0)))


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


def test_a_start_that_slurm_already_ends_leaves_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    """A slurmctld that was killed just after the start has forgotten it: it still ends the job for the requeue."""
    slurm, environment = FakeSlurm(monkeypatch), {"SLURM_JOB_ID": "7"}
    begin_in(tmp_path, environment=environment)
    slurm.become_requeued()
    requeued = {**environment, "SLURM_RESTART_COUNT": "1"}
    assert begin_by_script(tmp_path, requeued, monkeypatch) == 75
    assert_facts(golden.message(capsys.readouterr().err), "already ends this start", "job 7", "again")
    run = RunDirectory(tmp_path / "demo" / "r1")
    assert (slurm.is_forbidden, run.newest_attempt()) == (False, 0)
    # The same, where the attempt had begun before slurmctld was back: it is started once more with the same count.
    for number in (1, 2):
        append_event(run.events, kind="save", time=float(number), attempt=number - 1, step=number)
        slurm.become("RUNNING", PreemptTime="None")
        assert AttemptDirectory.from_text(begin_in(tmp_path, environment=requeued)).number == number


def test_what_slurm_requeued_by_itself_is_written_down_as_what_it_was(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "12", "PATH": ""}
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, environment=environment))
    append_event(attempt.run.events, kind="stop", time=0.0, attempt=0, cause="preemption")
    begin_in(tmp_path, environment={**environment, "SLURM_RESTART_COUNT": "1"})
    (requeue,) = [event for event in read_events(attempt.run.events) if event.kind == "requeue"]
    assert (requeue.attempt, requeue.cause, requeue.by) == (0, "preemption", "slurm")


def test_a_program_that_requeued_its_job_after_a_preemption_was_preempted(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "12", "PATH": ""}
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, environment=environment))
    write_exit(attempt, ProgramExit(rank=0, host="n1", time=0.0, code=0, notice="terminated", cause="preemption"))
    begin_in(tmp_path, environment={**environment, "SLURM_RESTART_COUNT": "1"})
    (requeue,) = [event for event in read_events(attempt.run.events) if event.kind == "requeue"]
    assert requeue.cause == "preemption"


@pytest.mark.parametrize(
    ("shown", "counted"), [("preemption", "preemption"), ("time_limit", "time_limit"), ("requeued", "requeued")]
)
def test_a_requeue_of_a_script_that_was_killed_has_the_cause_that_rank_0_was_shown(
    tmp_path: Path, shown: str, counted: str
) -> None:
    environment = {"SLURM_JOB_ID": "12", "PATH": ""}
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, environment=environment))
    append_event(attempt.run.events, kind="cause", time=0.0, attempt=0, cause=shown)
    begin_in(tmp_path, environment={**environment, "SLURM_RESTART_COUNT": "1"})
    (requeue,) = [event for event in read_events(attempt.run.events) if event.kind == "requeue"]
    assert requeue.cause == counted


def test_a_requeue_that_is_written_down_already_is_not_written_twice(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "12", "PATH": ""}
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, environment=environment))
    append_event(attempt.run.events, kind="requeue", time=0.0, attempt=0, cause="time_limit")
    begin_in(tmp_path, environment={**environment, "SLURM_RESTART_COUNT": "1"})
    assert [event.kind for event in read_events(attempt.run.events)] == ["start", "requeue", "start"]


def test_a_requeue_of_slurm_is_recorded_at_the_time_of_the_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, environment, now = FakeSlurm(monkeypatch), {"SLURM_JOB_ID": "7"}, time.time()
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, environment=environment))
    requeued = int(now) + 20
    slurm.become("RUNNING", Restarts="1", SubmitTime=slurm_time(requeued))
    monkeypatch.setattr(time, "time", lambda: now + 145)
    begin_in(tmp_path, environment={**environment, "SLURM_RESTART_COUNT": "1"})
    events = {event.kind: event.time for event in read_events(attempt.run.events)}
    assert events == {"start": now + 145, "requeue": requeued}


@pytest.mark.parametrize("killed", [True, False])
def test_a_requeue_says_whether_slurm_killed_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, killed: bool
) -> None:
    slurm, environment = FakeSlurm(monkeypatch), {"SLURM_JOB_ID": "7"}
    job_text = dump_for_script(JobSpec(name="demo", command=("python", "train.py")))
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, job_text=job_text, environment=environment))
    if not killed:
        write_exit(attempt, ProgramExit(rank=0, host="n1", time=0.0, code=-15, notice="terminated"))
    slurm.become("RUNNING", Restarts="1")
    begin_in(tmp_path, job_text=job_text, environment={**environment, "SLURM_RESTART_COUNT": "1"})
    (event,) = (event for event in read_events(attempt.run.events) if event.kind == "requeue")
    assert event.facts.get("killed", False) is killed


@pytest.mark.parametrize("shown_by", ["hpcddp cancel", "scancel", "neither"])
@pytest.mark.parametrize("later_s", [3, 3600])
def test_a_cancelled_job_that_its_program_requeues_stays_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown_by: str, later_s: int, golden: GoldenMessages
) -> None:
    slurm, environment, now = FakeSlurm(monkeypatch), {"SLURM_JOB_ID": "7"}, int(time.time())
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, environment=environment))
    if shown_by == "hpcddp cancel":
        append_event(attempt.run.events, kind="cancel", time=now, attempt=0)
    notice = f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT {slurm_time(now)} ***\n"
    attempt.run.batch_log.write_text(beginning(attempt) + (notice if shown_by == "scancel" else ""))
    slurm.become("RUNNING", Restarts="1", SubmitTime=slurm_time(now + later_s))
    again = {**environment, "SLURM_RESTART_COUNT": "1"}
    if shown_by == "neither" or later_s > 60:
        assert AttemptDirectory.from_text(begin_in(tmp_path, environment=again)).number == 1
        return
    with pytest.raises(CancelledError) as caught:
        begin_in(tmp_path, environment=again)
    assert_facts(golden.message(caught.value), "job 7 was cancelled", "its program requeued it")
    assert caught.value.exit_code == 130
    assert attempt.run.newest_attempt() == 0
    result = read_json(attempt.run.result)
    assert (result["status"], result["exit_code"], result["reason"]) == ("cancelled", 130, "cancelled by its user")


def test_a_preemption_that_is_noticed_like_a_cancel_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, environment, now = FakeSlurm(monkeypatch), {"SLURM_JOB_ID": "7"}, int(time.time())
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, environment=environment))
    notice = f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT {slurm_time(now)} DUE to SIGNAL Terminated ***\n"
    attempt.run.batch_log.write_text(beginning(attempt) + notice)
    append_event(attempt.run.events, kind="requeue", time=now, attempt=0, cause="preemption", by="hpcddp")
    slurm.become("RUNNING", Restarts="1", SubmitTime=slurm_time(now + 3))
    again = begin_in(tmp_path, environment={**environment, "SLURM_RESTART_COUNT": "1"})
    assert AttemptDirectory.from_text(again).number == 1


def slurm_time(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment))


def test_a_run_without_progress_is_not_started_a_third_time_however_it_was_requeued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    environment = {"SLURM_JOB_ID": "12", "PATH": ""}
    for count in ("0", "1"):
        attempt = AttemptDirectory.from_text(
            begin_in(tmp_path, environment={**environment, "SLURM_RESTART_COUNT": count})
        )
    monkeypatch.setattr("sys.stdin", stdin_of(JOB.encode()))
    words = ["begin", "--run-root", str(tmp_path), "--name", "demo", "--run-id", "r1"]
    assert main(words, {**environment, "SLURM_RESTART_COUNT": "2"}) == 93
    why = ("the last 2 attempts", "requeue.max_attempts_without_progress is 2")
    resume = f"hpcddp submit JOB --resume {attempt.run.path}"
    message = golden.message(line_from(capsys.readouterr().err, "run r1 is not started again"))
    assert_facts(message, *why, resume)
    result = read_json(attempt.run.result)
    assert (result["status"], result["exit_code"]) == ("failed", 93)
    assert_facts(golden.message(result["reason"]), *why)
    assert attempt.run.newest_attempt() == 1


def test_a_person_who_resumes_may_start_a_run_without_progress(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "12", "PATH": ""}
    for count in ("0", "1"):
        attempt = AttemptDirectory.from_text(
            begin_in(tmp_path, environment={**environment, "SLURM_RESTART_COUNT": count})
        )
    append_event(attempt.run.events, kind="resume", time=0.0, attempt=1)
    begin_in(tmp_path, environment={"SLURM_JOB_ID": "13", "PATH": ""})
    assert attempt.run.newest_attempt() == 2


def test_more_preemptions_than_are_allowed_end_the_run_at_its_start(tmp_path: Path, golden: GoldenMessages) -> None:
    environment = {"SLURM_JOB_ID": "12", "PATH": ""}
    job_text = dump_for_script(job(requeue__max_preemptions=0))
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, job_text=job_text, environment=environment))
    append_event(attempt.run.events, kind="save", time=0.0, attempt=0, step=4)
    append_event(attempt.run.events, kind="stop", time=0.0, attempt=0, cause="preemption")
    with pytest.raises(BudgetError) as caught:
        begin_in(tmp_path, job_text=job_text, environment={**environment, "SLURM_RESTART_COUNT": "1"})
    resume = f"hpcddp submit JOB --resume {attempt.run.path}"
    assert_facts(golden.message(caught.value), "requeue.max_preemptions is 0", resume)
    assert read_json(attempt.run.result)["saved_step"] == 4


def test_a_job_that_waits_to_run_again_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(job_id="12", restart_count=0, submit_time="then", host="n1", token="t", time=0.0, is_local=False)
    # Slurm renews the submit time at a requeue.
    waiting = {"JobState": "PENDING", "SubmitTime": "later", "Restarts": "1"}
    monkeypatch.setattr(commands, "show_job", lambda _: waiting)
    assert is_alive(start)
    monkeypatch.setattr(commands, "show_job", lambda _: {**waiting, "JobState": "PREEMPTED"})
    assert not is_alive(start)
    # Another life of the cluster has counted to the same id.
    monkeypatch.setattr(commands, "show_job", lambda _: {**waiting, "Restarts": "0"})
    assert not is_alive(start)


def begin_at_once(root: Path, environment: dict[str, str], barrier: Any, answers: Any) -> None:
    """Begin a run when the other process has checked it too, and answer with the attempt or the refusal."""
    waits = [True]

    def refuse_and_wait(run: RunDirectory, spec: JobSpec) -> object:
        found = refuse_another_training(run, spec)
        if waits:
            waits.clear()
            barrier.wait(timeout=60)
        return found

    pytest.MonkeyPatch().setattr(begin_module, "refuse_another_training", refuse_and_wait)
    try:
        answers.put(begin_in(root, environment=environment))
    except RunDirectoryError as error:
        answers.put(error.message)


@pytest.mark.parametrize("earlier_attempts", [0, 1])
def test_of_two_jobs_that_begin_a_run_at_the_same_moment_one_is_refused(tmp_path: Path, earlier_attempts: int) -> None:
    for _ in range(earlier_attempts):
        attempt = begun(tmp_path)
        write_json(attempt.start, {**read_json(attempt.start), "job_id": "999998"})
    processes = multiprocessing.get_context("fork")
    barrier, answers = processes.Barrier(2), processes.Queue()
    with script_process() as one, script_process() as other:
        starting = [
            processes.Process(
                target=begin_at_once, args=(tmp_path, {"HPCDDP_LOCAL_JOB_ID": str(script.pid)}, barrier, answers)
            )
            for script in (one, other)
        ]
        for process in starting:
            process.start()
        begun_path, refusal = sorted((answers.get(timeout=60) for _ in starting), key=lambda text: " is taken" in text)
        for process in starting:
            process.join(60)
    assert begun_path.endswith(f"/attempts/{earlier_attempts}")
    assert "is still using it" in refusal
    run = AttemptDirectory.from_text(begun_path).run
    assert [event.kind for event in read_events(run.events)].count("start") == earlier_attempts + 1
    assert sorted(entry.name for entry in run.attempts.iterdir()) == [
        str(number) for number in range(earlier_attempts + 1)
    ]


def test_a_budget_that_another_job_has_used_meanwhile_is_not_that_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path)
    run = RunDirectory(tmp_path / "demo" / "r1")
    seen = []

    def why_exceeded_meanwhile(_: object, __: object) -> str:
        seen.append(run.newest_attempt())
        # Another job begins the run between two steps of this one.
        run.attempt(1).path.mkdir()
        return "two attempts saved no new step"

    monkeypatch.setattr(begin_module, "why_exceeded", why_exceeded_meanwhile)
    attempt = AttemptDirectory.from_text(begin_in(tmp_path, environment=another_process()))
    assert (attempt.number, seen[0]) == (2, 0)
    assert not run.result.exists()
