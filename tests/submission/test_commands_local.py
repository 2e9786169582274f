"""A command on this machine: real processes, signals, records."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from hpcddp.cli.submit import print_outcome
from hpcddp.manage.first_error import first_error
from hpcddp.manage.follow import Outcome
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.ownership import processes_left
from hpcddp.run.result import Result
from hpcddp.submission.submit import Submission
from tests.command_line import hpcddp
from tests.messages import GoldenMessages
from tests.submission.local_commands import ended, program, result, submit
from tests.waiting import wait_for_text, wait_until, wait_until_gone


def called(directory: Path, *words: str) -> str:
    """Call a command and return what it prints."""
    done = hpcddp(directory, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def task_in(log: Path) -> int:
    """Return the process id of the task, as the program has printed it."""
    return int(log.read_text().partition("task=")[2].partition(";")[0])


def test_a_command_that_ends_well_finishes_the_run(tmp_path: Path) -> None:
    looks = program(
        tmp_path,
        """
        import os
        with open(f"/proc/{os.getppid()}/maps") as maps:
            print(maps.read())
        print("hello")
        """,
    )
    run = ended(submit(tmp_path, "--tasks-per-node", "2", *looks))
    assert (result(run)["status"], result(run)["world_size"]) == ("finished", 2)
    assert [event.kind for event in read_events(run.events)] == ["start", "train", "finish"]
    # What the task has loaded, which starts without numpy.
    log = run.attempt(0).rank_log(1).read_text()
    assert log.endswith("\nhello\n")
    assert "pydantic_core" in log
    assert "numpy" not in log
    # The job names no tracker.
    assert not run.tensorboard.exists()
    assert not run.trackers.exists()


@pytest.mark.parametrize(
    ("signum", "word"),
    [
        pytest.param("SIGTERM", "terminated", marks=pytest.mark.long("a program that fails while it saves gets one")),
        ("SIGUSR2", "warned"),
        pytest.param("SIGUSR1", None, marks=pytest.mark.long("a program that saves and leaves gets one")),
        ("SIGINT", None),
    ],
)
def test_every_signal_to_a_task_reaches_its_program(tmp_path: Path, signum: str, word: str | None) -> None:
    listens = program(
        tmp_path,
        f"""
        import os, signal, sys, time
        def leave(number, _):
            print(f"heard {{number}}", flush=True)  # in one write: the task writes to the same log
            sys.exit(75)
        signal.signal(signal.{signum}, leave)
        print(f"task={{os.getppid()}};", flush=True)
        time.sleep(60)
        """,
    )
    document = submit(tmp_path, *listens)
    log = RunDirectory(Path(document["run_dir"])).attempt(0).rank_log(0)
    wait_for_text(log, "task=")
    os.kill(task_in(log), signal.Signals[signum])
    run = ended(document)
    assert f"heard {signal.Signals[signum].value}" in log.read_text()
    assert result(run)["status"] == "stopped"
    assert json.loads(run.attempt(0).rank_exit(0).read_text())["told"] == word


def test_a_program_that_saves_and_leaves_after_its_own_signal_has_not_finished(tmp_path: Path) -> None:
    saves = program(
        tmp_path,
        """
        import os, signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
        print(f"task={os.getppid()};", flush=True)
        time.sleep(60)
        """,
    )
    document = submit(tmp_path, *saves)
    log = RunDirectory(Path(document["run_dir"])).attempt(0).rank_log(0)
    wait_for_text(log, "task=")
    time.sleep(1)
    os.kill(task_in(log), signal.SIGUSR1)
    run = ended(document)
    assert result(run)["status"] == "stopped"
    assert json.loads(run.attempt(0).rank_exit(0).read_text())["told"] == "warned"


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("raise OSError('no space for the checkpoint')", "OSError: no space for the checkpoint"),
        # A traceback from before the signal is in each log.
        ("sys.exit(1)", None),
        *(
            pytest.param(ending, None, marks=pytest.mark.long("other exceptions that say nothing"))
            for ending in ("raise KeyboardInterrupt", "raise subprocess.CalledProcessError(1, 'copy')")
        ),
    ],
)
def test_a_program_that_fails_while_it_saves_is_told(tmp_path: Path, ending: str, told: str | None) -> None:
    saves = program(
        tmp_path,
        f"""
        import os, signal, subprocess, sys, time, traceback
        def save(*_):
            {ending}
        try:
            open("absent")
        except OSError:
            traceback.print_exc()
        signal.signal(signal.SIGTERM, save)
        print(f"task={{os.getppid()}};", flush=True)
        time.sleep(60)
        """,
    )
    document = submit(tmp_path, *saves)
    wait_for_text(RunDirectory(Path(document["run_dir"])).attempt(0).rank_log(0), "task=")
    os.kill(int(document["job_id"]), signal.SIGTERM)
    run = ended(document)
    assert result(run)["status"] == "cancelled"
    why = called(tmp_path, "why", document["run_id"])
    for text in (why, run.batch_log.read_text()):
        assert ("failed after the request to stop" in text) == (told is not None)
        assert told is None or f"failed after the request to stop: {told}" in text


def test_a_program_that_does_not_listen_survives_the_warning(tmp_path: Path) -> None:
    deaf = program(
        tmp_path,
        """
        import os, time
        print(f"task={os.getppid()};", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.05)
        """,
    )
    document = submit(tmp_path, *deaf)
    log = RunDirectory(Path(document["run_dir"])).attempt(0).rank_log(0)
    wait_for_text(log, "task=")
    os.kill(task_in(log), signal.SIGUSR2)
    time.sleep(1)
    (tmp_path / "go").touch()
    assert result(ended(document))["status"] == "finished"


@pytest.mark.long("so does the program of a launcher whose task is killed")
def test_a_program_dies_with_its_task(tmp_path: Path) -> None:
    lonely = program(
        tmp_path,
        """
        import os, time
        print(f"task={os.getppid()}; own={os.getpid()};", flush=True)
        time.sleep(60)
        """,
    )
    document = submit(tmp_path, *lonely)
    log = RunDirectory(Path(document["run_dir"])).attempt(0).rank_log(0)
    wait_for_text(log, "own=")
    own = Path(f"/proc/{log.read_text().partition('own=')[2].partition(';')[0]}")
    assert own.exists()
    os.kill(task_in(log), signal.SIGKILL)
    run = ended(document)
    assert result(run)["exit_code"] == 71
    wait_until(lambda: not own.exists() or "State:\tZ" in (own / "status").read_text(), f"the end of {own}", 20)


@pytest.mark.parametrize("how", ["two cancels", "a killed task"])
def test_the_processes_of_a_launcher_end_with_the_attempt(tmp_path: Path, how: str) -> None:
    launcher = program(
        tmp_path,
        """
        import os, signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(f"task={os.getppid()}; own={os.getpid()}; worker={worker.pid};", flush=True)
        worker.wait()
        """,
    )
    document = submit(tmp_path, *launcher)
    log = RunDirectory(Path(document["run_dir"])).attempt(0).rank_log(0)
    wait_for_text(log, "worker=")
    own, worker = (
        Path(f"/proc/{log.read_text().partition(f'{word}=')[2].partition(';')[0]}") for word in ("own", "worker")
    )
    assert worker.exists()
    if how == "a killed task":
        os.kill(task_in(log), signal.SIGKILL)
    else:
        script = int(document["job_id"])
        os.kill(script, signal.SIGTERM)
        time.sleep(3)
        assert worker.exists()

        def insist() -> bool:
            with contextlib.suppress(ProcessLookupError):
                os.kill(script, signal.SIGTERM)
            time.sleep(1)
            return not Path(f"/proc/{script}").exists()

        # The script may have heard of the first one late.
        wait_until(insist, "the end of the script", 180)
    run = ended(document)
    outcome = (result(run)["status"], result(run)["exit_code"])
    assert outcome == (("failed", 71) if how == "a killed task" else ("cancelled", 130))
    for process in (own, worker):
        assert not process.exists() or "State:\tZ" in (process / "status").read_text()


def test_a_resumed_run_ends_what_the_killed_script_of_its_attempt_left(tmp_path: Path) -> None:
    waits = program(
        tmp_path,
        """
        import os, time
        print(f"program={os.getpid()};", flush=True)
        time.sleep(600 if os.environ["HPCDDP_ATTEMPT"] == "0" else 0)
        """,
    )
    document = submit(tmp_path, *waits)
    log = RunDirectory(Path(document["run_dir"])).attempt(0).rank_log(0)
    wait_for_text(log, "program=")
    process = Path(f"/proc/{log.read_text().partition('program=')[2].partition(';')[0]}")
    os.kill(int(document["job_id"]), signal.SIGKILL)
    wait_until_gone(int(document["job_id"]))
    assert process.exists()
    run = ended(submit(tmp_path, "--resume", document["run_id"]))
    assert result(run)["status"] == "finished"
    assert not process.exists() or "State:\tZ" in (process / "status").read_text()


def test_what_a_killed_script_left_is_named_and_can_be_cancelled(tmp_path: Path) -> None:
    saves = program(
        tmp_path,
        """
        import os, signal, sys, time
        def save(*_):
            print("saved", flush=True)
            sys.exit(75)
        signal.signal(signal.SIGTERM, save)
        print(f"program={os.getpid()};", flush=True)
        time.sleep(600)
        """,
    )
    document = submit(tmp_path, *saves)
    run = RunDirectory(Path(document["run_dir"]))
    log = run.attempt(0).rank_log(0)
    wait_for_text(log, "program=")
    left = log.read_text().partition("program=")[2].partition(";")[0]
    os.kill(int(document["job_id"]), signal.SIGKILL)
    wait_until_gone(int(document["job_id"]))
    (tmp_path / "link").symlink_to(run.path)
    for name in (run.path, tmp_path / "link"):
        assert left in json.loads(called(tmp_path, "why", str(name), "--json"))["why"]
    assert left in called(tmp_path, "cancel", str(run.path))
    wait_for_text(log, "saved")
    wait_until_gone(int(left))
    # The task and the controller end a moment later.
    wait_until(lambda: not processes_left(run), "the end of all processes", 60)
    assert "nothing to cancel" in called(tmp_path, "cancel", str(run.path))


def test_a_rank_that_fails_is_named_and_the_others_only_followed(tmp_path: Path) -> None:
    fails = program(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("my own mistake")
        time.sleep(60)
        """,
    )
    run = ended(submit(tmp_path, "--tasks-per-node", "2", *fails))
    assert result(run)["exit_code"] == 70
    assert "rank 1 on " in result(run)["reason"]
    assert result(run)["reason"].endswith("failed first: ValueError: my own mistake")
    assert first_error(run.attempt(0)).secondary.startswith("rank 0 failed as a consequence")
    assert " failed: ValueError: my own mistake" in run.attempt(0).rank_log(1).read_text()


def test_the_same_mistake_on_two_ranks_is_no_consequence_of_one(tmp_path: Path) -> None:
    fails = program(
        tmp_path,
        """
        import os, signal, time
        # It is told to end, because the other one has failed, before it makes the mistake itself.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"ready-{os.environ['RANK']}", "w").close()
        while not (os.path.exists("ready-0") and os.path.exists("ready-1")):
            time.sleep(0.05)
        time.sleep(2 * int(os.environ["RANK"]))
        raise ValueError("no such file")
        """,
    )
    run = ended(submit(tmp_path, "--tasks-per-node", "2", *fails))
    error = first_error(run.attempt(0))
    assert error.secondary == ""
    assert error.others == (f"rank 1 on {socket.gethostname()}: ValueError: no such file",)


@pytest.mark.depends_on("hpcddp/run", "hpcddp/supervise", "hpcddp/task", "tests/submission/test_commands_local.py")
def test_ranks_that_run_different_numbers_of_steps_are_told(tmp_path: Path) -> None:
    uneven = program(
        tmp_path,
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(6 - int(os.environ["RANK"])):
            dist.all_reduce(torch.ones(1))
        """,
    )
    run = ended(submit(tmp_path, "--tasks-per-node", "2", "--set", "requeue.max_failures=3", *uneven))
    assert result(run)["exit_code"] == 70
    reason = result(run)["reason"]
    # On a busy machine torch may abort at the end of a program that leaves its process group open.
    assert re.match(r"rank 1 on \S+ ended( with exit code 0)? while rank 0 on \S+ was still in all_reduce \(", reason)
    assert "different numbers of steps" in reason


def test_a_program_that_is_not_there_is_refused_at_once(tmp_path: Path, golden: GoldenMessages) -> None:
    document = submit(tmp_path, "--", "no-such-program", "x", code=2)
    message = golden.message(document["error"]["message"])
    assert message.startswith("command is no-such-program x, ")
    assert "no program 'no-such-program' is on PATH" in message
    assert not (tmp_path / "runs").exists()


def test_a_script_without_its_interpreter_is_told_with_it(tmp_path: Path, golden: GoldenMessages) -> None:
    (tmp_path / "train.py").touch()
    document = submit(tmp_path, "--", "train.py", "--lr", "1", code=2)
    message = golden.message(document["error"]["message"])
    assert message.startswith("command is train.py --lr 1, ")
    assert message.endswith("; write python train.py --lr 1")


def test_a_batch_that_a_command_cannot_be_told_is_refused_at_once(tmp_path: Path) -> None:
    words = ("--global-batch-size", "33", "--tasks-per-node", "2", "--", "true")
    assert "write 32 or 34" in submit(tmp_path, *words, code=2)["error"]["message"]
    assert not (tmp_path / "runs").exists()


def test_bad_options_are_refused_together_each_by_its_own_name(tmp_path: Path) -> None:
    document = submit(tmp_path, "--nodes", "two", "--time", "5x", "--", "true", code=2)
    files = [problem["file"] for problem in document["error"]["problems"]]
    assert files == ["--nodes", "--time"]


def test_a_program_that_asked_by_file_goes_on_whatever_its_exit_code(tmp_path: Path) -> None:
    asks = program(
        tmp_path,
        """
        import os, pathlib, sys
        pathlib.Path(os.environ["HPCDDP_REQUEUE_FILE"]).touch()
        sys.exit(1)
        """,
    )
    run = ended(submit(tmp_path, *asks))
    assert result(run)["status"] == "stopped"
    assert "the command requested a requeue" in result(run)["reason"]


def test_a_program_that_only_the_task_misses_is_named_without_a_traceback(tmp_path: Path) -> None:
    """What environment.setup does to PATH, nobody knows before."""
    run = ended(submit(tmp_path, "--set", "environment.setup=['true']", "--", "no-such-program", "x"))
    assert result(run)["exit_code"] == 70
    assert "has no program 'no-such-program'" in result(run)["reason"]
    assert "Traceback" not in run.batch_log.read_text()


def test_the_last_lines_of_a_run_that_failed_lead_to_its_error(tmp_path: Path, golden: GoldenMessages) -> None:
    done = hpcddp(tmp_path, "submit", "--cluster", "local", "--follow", "--", sys.executable, "-m", "trian")
    (run,) = (tmp_path / "runs" / "trian").iterdir()
    assert done.returncode == 1
    short_id = run.name.rpartition("-")[2]
    host = f" on {socket.gethostname()} "
    varying = {run.name: "RUN", f" {short_id} ": " ID ", sys.executable: "PYTHON", host: " on HOST "}
    failed, look, resume, story = golden.message(done.stdout, varying).splitlines()
    assert " ended with exit code 1; " in failed
    assert failed.endswith(f": {sys.executable}: No module named trian")
    assert look.endswith(f": hpcddp logs {short_id} --first-error")
    assert resume.endswith(f" resume with: hpcddp submit --resume {run}")
    assert story.endswith(f": {run / 'batch.log'}")


def test_the_seconds_of_the_last_line_say_what_they_count(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = Submission(run=RunDirectory(tmp_path), cluster="local", job=None, dropped=(), epochs=1)  # type: ignore[arg-type]
    for run_result, said in (
        (Result(status="finished", steps=1, wall_s=0.71, world_size=2), "1 step, 0.7 s of training on 2 ranks"),
        (Result(status="finished", wall_s=11.0, attempts=1), "11.0 s on 1 rank"),
        (Result(status="finished", wall_s=57.0, attempts=3, world_size=2), "57.0 s in 3 attempts on 2 ranks"),
    ):
        print_outcome(made, Outcome(status="finished", result=run_result), as_json=False)
        assert capsys.readouterr().out.startswith(f"finished: {said}\n")


def test_whoever_follows_sees_what_rank_0_prints_and_only_of_this_job(tmp_path: Path) -> None:
    words = program(
        tmp_path,
        """
        import os, sys
        print(f"output of rank {os.environ['RANK']} attempt {os.environ['HPCDDP_ATTEMPT']}", end="", flush=True)
        sys.exit(3 if os.environ["HPCDDP_ATTEMPT"] == "0" else 0)
        """,
    )
    document = submit(tmp_path, "--tasks-per-node", "2", "--follow", *words, code=1)
    done = hpcddp(tmp_path, "submit", "--resume", document["run_id"], "--follow")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "output of" in line]
    assert "failed" not in done.stderr
    assert [line.partition("submitit")[0] for line in lines] == ["rank 0 | output of rank 0 attempt 1"]


def test_a_command_gets_the_directory_and_the_id_of_its_run_and_the_attempt(tmp_path: Path) -> None:
    show = ("--", sys.executable, "-c", "import sys; print(sys.argv[1:])", "{run_dir}/ckpt.pt", "{run_id}", "{attempt}")
    run = ended(submit(tmp_path, *show))
    assert str([f"{run.path}/ckpt.pt", run.run_id, "0"]) in run.attempt(0).rank_log(0).read_text()
    # The script of the submission is the one that render prints: it holds the placeholders.
    assert "{run_dir}/ckpt.pt" in run.script.read_text()
    assert "{attempt}" in run.script.read_text()
