"""Runs whose directory is moved or copied, and what --resume, cancel and requeue make of them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.jobfile.read import ResolvedJob, load_job
from hpcddp.jobfile.write import dump_for_script
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import read_json
from hpcddp.run.job_file import read_submitted_job
from hpcddp.run.job_records import Start, write_start, write_submission_record
from hpcddp.run.moved import moved_from, refuse_copy
from hpcddp.run.ownership import RunDirectoryError
from hpcddp.run.record import RecordError, write_record
from hpcddp.run.result import Result
from hpcddp.run.sweep import Sweep
from hpcddp.slurm import commands
from hpcddp.submission.resume import request_to_resume, resume
from hpcddp.submission.resume_sweep import resume_sweep
from hpcddp.submission.submit import Submission, prepare, submission_record, write_run
from hpcddp.submission.sweep import submit_sweep
from hpcddp.submission.sweep_element import find_to_resume
from hpcddp.supervise.begin import begin
from tests.command_line import hpcddp
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import make_fake_slurm
from tests.submission.requests import request_of

# It fails until there is a file of this name, and keeps where it has run.
JOB = """
name: again
resources: {tasks_per_node: 1}
environment: {env: {WORD: "a b"}}
command: [sh, -c, 'echo "$WORD" >>"$HPCDDP_RUN_DIR/trail"; test -e ready']
requeue: {max_failures: 0}
"""


def job_of(directory: Path, text: str, *overrides: str) -> ResolvedJob:
    (directory / "job.yaml").write_text(text)
    return load_job(directory / "job.yaml", overrides=overrides)


def failed_run(directory: Path, *overrides: str) -> RunDirectory:
    """Lay down what a run leaves that has failed, and give its command what it wants for the next time."""
    job = job_of(directory, JOB, *overrides)
    with contextlib.chdir(directory):
        request = request_of(job, run_id="r1", cluster="local", python=sys.executable, environment=dict(os.environ))
        run = RunDirectory(request.run.path.absolute())
        run.path.mkdir(parents=True, mode=0o700)
        write_run(run, prepare(request))
        write_submission_record(run, submission_record(request, "999999"))
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    start = Start(job_id="999999", host=socket.gethostname(), time=1.0, is_local=True, run_dir=str(run.path))
    write_start(attempt, start)
    write_record(run.result, Result(status="failed", reason="x"))
    (run.path / "trail").write_text("a b\n")
    (directory / "ready").touch()
    return run


def resume_now(run: RunDirectory) -> Submission:
    return resume(run, request_to_resume(run, environment=dict(os.environ)))


def content_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def assert_goes_on(directory: Path, run: Path) -> None:
    """Resume a run, and see that it goes on where it is."""
    done = hpcddp(directory, "submit", "--resume", run, "--follow", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["run_dir"] == str(run)
    assert (run / "trail").read_text() == "a b\na b\n"
    assert read_json(RunDirectory(run).result)["status"] == "finished"


@pytest.fixture
def failed(tmp_path: Path) -> RunDirectory:
    return failed_run(tmp_path)


def test_a_run_that_was_moved_goes_on_in_its_new_place(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = hpcddp(tmp_path, "submit", "job.yaml", "--cluster", "local", "--follow", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    (tmp_path / "ready").touch()
    failed = RunDirectory(Path(json.loads(done.stdout)["run_dir"]))
    place = tmp_path / "kept 'here'" / "elsewhere" / "renamed"
    place.parent.mkdir(parents=True)
    failed.path.rename(place)
    assert_goes_on(tmp_path, place)
    assert not failed.path.exists()
    assert sorted(path.name for path in (place / "attempts").iterdir()) == ["0", "1"]


def test_a_run_goes_on_after_its_whole_project_was_moved(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    run = failed_run(project)
    moved = project.rename(tmp_path / "new")
    place = moved / run.path.relative_to(project)
    assert_goes_on(tmp_path, place)
    assert not project.exists()


def test_a_run_does_not_go_on_where_the_directory_of_its_code_has_gone(tmp_path: Path, golden: GoldenMessages) -> None:
    project = tmp_path / "project"
    project.mkdir()
    run = failed_run(project, f"run_root={tmp_path / 'runs'}")
    place = run.path.rename(tmp_path / "moved")
    shutil.rmtree(project)
    done = hpcddp(tmp_path, "submit", "--resume", place)
    assert done.returncode == 2
    message = golden.message(done.stderr)
    assert f"{project}, which no longer exists; " in message
    assert message.endswith(f": hpcddp submit JOB --resume {place}\n")


def test_a_moved_run_goes_on_when_the_copy_in_its_old_place_is_moved_away(tmp_path: Path) -> None:
    run = failed_run(tmp_path)
    place = run.path.rename(tmp_path / "moved")
    shutil.copytree(place, run.path)
    done = hpcddp(tmp_path, "submit", "--resume", place)
    assert (done.returncode, done.stderr.endswith("; name that run, or move it away\n")) == (2, True)
    copy = run.path.rename(tmp_path / "copy")
    before = content_of(copy)
    assert_goes_on(tmp_path, place)
    assert content_of(copy) == before


@pytest.mark.long("a run in its place goes on")
def test_a_run_that_was_brought_back_to_its_place_from_a_backup_goes_on(tmp_path: Path) -> None:
    run = failed_run(tmp_path)
    shutil.copytree(run.path, tmp_path / "backup")
    shutil.rmtree(run.path)
    shutil.copytree(tmp_path / "backup", run.path)
    assert_goes_on(tmp_path, run.path)


def test_a_run_that_was_moved_to_another_file_system_is_no_copy(tmp_path: Path) -> None:
    run = failed_run(tmp_path)
    place = RunDirectory(tmp_path / "again" / "r2")
    shutil.copytree(run.path, place.path)
    with pytest.raises(RunDirectoryError, match="is a copy of the run"):
        refuse_copy(place)
    shutil.rmtree(run.path)
    refuse_copy(place)


def test_a_run_that_is_called_by_another_path_goes_on_under_its_own(tmp_path: Path) -> None:
    run = failed_run(tmp_path)
    (tmp_path / "link").symlink_to(run.path)
    done = hpcddp(tmp_path, "submit", "--resume", tmp_path / "link", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.endswith(f"run directory {run.path}\n")


def test_a_copy_is_not_resumed_in_place_of_the_original(
    failed: RunDirectory, tmp_path: Path, golden: GoldenMessages
) -> None:
    copy = tmp_path / "again" / "r2"
    shutil.copytree(failed.path, copy)
    before = content_of(failed.path)
    done = hpcddp(tmp_path, "submit", "--resume", copy, "--follow")
    assert done.returncode == 2
    message = golden.message(done.stderr, {failed.run_id: "RUN"})
    assert f"{copy} is a copy of the run {failed.path}, " in message
    assert message.endswith("; name that run, or move it away\n")
    # Nor with its job file.
    words = ("job.yaml", "--resume", copy, "--set", f"run_root={tmp_path}", "--cluster", "local")
    assert f"{copy} is a copy of the run " in hpcddp(tmp_path, "submit", *words).stderr
    assert content_of(failed.path) == before


def test_a_copy_of_a_whole_project_is_not_resumed_in_place_of_the_original(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    run = failed_run(project)
    before = content_of(run.path)
    shutil.copytree(project, tmp_path / "copy")
    done = hpcddp(tmp_path / "copy", "submit", "--resume", run.run_id)
    assert done.returncode == 2
    assert f"is a copy of the run {run.path}" in done.stderr
    assert content_of(run.path) == before


@pytest.fixture
def living(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run that goes on for minutes."""
    (tmp_path / "job.yaml").write_text(JOB.replace("test -e ready", "touch began; exec sleep 300"))
    done = hpcddp(tmp_path, "submit", "job.yaml", "--cluster", "local", "--json")
    assert done.returncode == 0, done.stderr
    run = RunDirectory(Path(json.loads(done.stdout)["run_dir"]))
    yield run
    done = hpcddp(tmp_path, "cancel", run.path)
    assert "was signalled; its program receives SIGTERM" in done.stdout


@pytest.mark.parametrize("command", ["cancel", "requeue"])
def test_the_job_of_the_original_is_left_alone_by_who_names_a_copy(
    command: str, living: RunDirectory, tmp_path: Path, golden: GoldenMessages
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(living.path, copy)
    done = hpcddp(tmp_path, command, copy)
    assert done.returncode == 2
    message = golden.message(done.stderr, {living.run_id: "RUN"})
    assert f"{copy} is a copy of the run {living.path}, " in message
    assert "; name that run, " in message
    assert Path(f"/proc/{read_json(living.submission)['job_id']}").exists()


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name, value in make_fake_slurm(tmp_path).environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(commands, "show_job", lambda _: {"JobState": "CANCELLED"})
    job = job_of(tmp_path, f"run_root: {tmp_path / 'runs'}\n{JOB}sweep: {{environment.env.WORD: [a, b]}}\n")
    request = request_of(job, run_id="s1", python=sys.executable, environment=dict(os.environ))
    return submit_sweep(request).sweep


def test_an_element_goes_on_after_its_sweep_was_moved(sweep: Sweep, tmp_path: Path) -> None:
    place = sweep.path.parent.rename(tmp_path / "moved")
    run = find_to_resume(str(place / "s1_1"), tmp_path)
    assert resume_now(run).run.path == place / "s1_1"
    script = run.script.read_text()
    assert f"hpcddp.supervise begin --run-root={tmp_path} --name=moved --run-id=s1_1 " in script
    assert f"#SBATCH --output={place}/s1_1/batch.log\n" in script
    assert "export WORD=b\n" in script


def test_a_sweep_goes_on_after_it_was_moved(sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "queue", lambda _: [])
    place = sweep.path.parent.rename(tmp_path / "moved")
    moved = RunDirectory(place / "s1")
    resume_sweep(replace(sweep, path=moved.path), [0, 1], request_to_resume(moved, environment=dict(os.environ)))
    script = moved.script.read_text()
    assert f"hpcddp.supervise begin --run-root={tmp_path} --name=moved --run-id=s1 " in script
    assert f"#SBATCH --output={place}/s1/logs/%A_%a.log\n" in script
    call = shlex.split((tmp_path / "calls").read_text().splitlines()[-1])
    assert {"--array=0-1", f"--output={place}/s1/logs/101_%a.log"} < set(call)
    assert moved_from(moved) is None


def test_an_element_of_a_copied_sweep_is_neither_resumed_nor_cancelled(
    sweep: Sweep, tmp_path: Path, golden: GoldenMessages
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(sweep.path.parent, copy)
    calls = (tmp_path / "calls").read_text()
    with pytest.raises(RunDirectoryError, match=f"{copy}/s1 is a copy of the run {sweep.path}, ") as caught:
        resume_now(find_to_resume(str(copy / "s1_1"), tmp_path))
    golden.message(caught.value)
    done = hpcddp(tmp_path, "cancel", copy / "s1")
    assert done.returncode == 2
    assert f"{copy}/s1 is a copy of the run {sweep.path}, " in golden.message(done.stderr)
    assert (tmp_path / "calls").read_text() == calls


def test_an_element_without_its_sweep_says_what_is_missing(
    sweep: Sweep, tmp_path: Path, golden: GoldenMessages
) -> None:
    place = find_to_resume(str(sweep.run(1).path), tmp_path).path.rename(tmp_path / "alone")
    with pytest.raises(RecordError, match=r"environment\.json cannot be read ") as caught:
        resume_now(find_to_resume(str(place), tmp_path))
    assert golden.message(caught.value).endswith(": hpcddp submit JOB --resume RUN")


def test_a_copied_script_that_is_given_to_sbatch_by_hand_does_not_act_on_the_original(
    failed: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(failed.path, copy)
    before = content_of(failed.path)
    monkeypatch.setattr(commands, "show_job", lambda _: {"JobState": "RUNNING", "Command": f"{copy}/job.sbatch"})

    def by_hand() -> str:
        return begin(
            run_root=str(failed.path.parent.parent),
            name="again",
            run_id=failed.run_id,
            job_text=dump_for_script(read_submitted_job(failed)),
            environment={"SLURM_JOB_ID": "77"},
        )

    with pytest.raises(RunDirectoryError) as caught:
        by_hand()
    message = golden.message(caught.value, {failed.run_id: "RUN"})
    assert message.startswith(f"{copy}/job.sbatch acts on the run directory {failed.path}, ")
    assert message.endswith(f": hpcddp submit --resume {copy}")
    assert content_of(failed.path) == before
    monkeypatch.setattr(commands, "show_job", lambda _: {"JobState": "RUNNING", "Command": str(failed.script)})
    assert by_hand() == str(failed.attempt(1).path)
