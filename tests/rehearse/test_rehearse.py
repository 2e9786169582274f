"""``hpcddp rehearse`` on a program that takes seconds: every fault, each verdict, and nothing that stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.processes import environment_of, own_processes
from hpcddp.rehearse.trial import MARK
from hpcddp.run.find import index_directory
from tests.command_line import hpcddp
from tests.messages import GoldenMessages
from tests.waiting import wait_until

PROGRAM = Path(__file__).parent / "light_program.py"
# What a fault is made of has tests of its own.
pytestmark = pytest.mark.depends_on("hpcddp/rehearse", "tests/rehearse")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    shutil.copy(PROGRAM, directory / "program.py")
    return directory


def rehearse(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    options, _, command = " ".join(words).partition("--- ")
    program = ("--", sys.executable, "program.py", *command.split())
    return hpcddp(project, "rehearse", "--tasks-per-node", "2", *options.split(), *program)


def processes_below(directory: Path) -> list[int]:
    """Return the processes of rehearsals in a directory; other tests may rehearse at the same time."""
    roots = ((process.pid, environment_of(process.pid).get(MARK, "")) for process in own_processes())
    return [pid for pid, root in roots if root.startswith(f"{directory}/")]


def test_a_right_program_comes_back_from_every_fault_and_leaves_nothing(project: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    words = ("rehearse", "--tasks-per-node", "2", "--json", "--", sys.executable, "program.py")
    done = hpcddp(project, *words, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)["rehearsals"][0]
    verdicts = {fault["fault"]: fault["verdict"] for fault in report["faults"]}
    assert verdicts == {
        "preemption": "equal",
        "time-limit": "equal",
        "kill": "equal",
        "damaged-checkpoint": "equal",
        "world-size": "came back",
        "cancel": "equal",
    }
    faults = {fault["fault"]: fault for fault in report["faults"]}
    # Saved at the signal; after a kill or a damage the newest periodic state is older.
    assert faults["preemption"]["steps_repeated"] == faults["cancel"]["steps_repeated"] == 0
    assert 0 < faults["damaged-checkpoint"]["steps_repeated"] <= 16
    assert faults["damaged-checkpoint"]["damaged_file"].startswith("state-")
    assert faults["cancel"]["ended_as"] == "cancelled"
    assert all(fault["restart_s"] > 0 for fault in report["faults"])
    assert not processes_below(scratch)
    assert list(scratch.iterdir()) == []
    assert sorted(path.name for path in project.iterdir()) == ["program.py"]
    index = index_directory()
    assert index is not None
    assert list(index.glob("*.json")) == []


def test_a_program_that_starts_over_is_found_and_its_runs_can_be_kept(project: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = rehearse(project, f"--fault preemption --keep {kept} --- forgets")
    assert done.returncode == 1, done.stderr
    assert "starts over" in done.stdout
    assert sorted(path.name for path in kept.iterdir()) == ["preemption", "undisturbed"]
    assert kept.stat().st_mode & 0o777 == 0o700
    done = rehearse(project, f"--keep {kept}")
    assert done.returncode == 2
    assert "--keep is" in done.stderr


def test_a_program_that_goes_on_differently_is_found_with_its_first_step(project: Path) -> None:
    done = rehearse(project, "--fault kill --json --- drifts")
    assert done.returncode == 1, done.stderr
    (fault,) = json.loads(done.stdout)["rehearsals"][0]["faults"]
    # The first step after the newest state; there is one after each 8 steps.
    assert (fault["verdict"], fault["first_metric"]["name"]) == ("differs", "loss")
    assert fault["first_metric"]["step"] % 8 == 1


def test_a_program_that_no_two_starts_repeat_is_found(project: Path) -> None:
    done = rehearse(project, "--fault preemption --json --- random")
    assert done.returncode == 1, done.stderr
    (fault,) = json.loads(done.stdout)["rehearsals"][0]["faults"]
    assert fault["first_metric"]["step"] == 1


def test_a_program_that_fails_without_a_fault_is_bad_input_with_its_last_words(
    project: Path, golden: GoldenMessages
) -> None:
    (project / "data.bin").write_bytes(b"0")
    done = hpcddp(project, "rehearse", "--", sys.executable, "program.py", "fails")
    assert done.returncode == 2
    assert "this program always fails" in done.stderr
    assert "data.bin" in done.stderr
    message = done.stderr.partition("hpcddp: ")[2]
    golden.message(message, {sys.executable: "PYTHON", os.uname().nodename: "HOST"})


def test_a_job_that_does_not_end_is_ended(project: Path, tmp_path: Path) -> None:
    done = rehearse(project, f"--timeout 3 --keep {tmp_path / 'kept'} --- waits")
    assert done.returncode == 2
    assert "has not ended after 3 s" in done.stderr
    assert "--timeout" in done.stderr
    assert not processes_below(tmp_path)


def test_whoever_ends_a_rehearsal_ends_all_that_it_started(project: Path, tmp_path: Path) -> None:
    # test_interrupts.py has each signal.
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = [sys.executable, "-m", "hpcddp", "rehearse", "--", sys.executable, "program.py", "waits"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(words, cwd=project, env=environment, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: processes_below(scratch), "the processes of the rehearsal")
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert process.returncode == 143
    assert not processes_below(scratch)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("keeps", [False, True])
def test_a_rehearsal_that_is_killed_leaves_nothing_that_it_has_not_promised_to_keep(
    project: Path, tmp_path: Path, *, keeps: bool
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    kept = ("--keep", str(scratch / "kept")) if keeps else ()
    words = [sys.executable, "-m", "hpcddp", "rehearse", *kept, "--", sys.executable, "program.py", "waits"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(words, cwd=project, env=environment, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: processes_below(scratch), "the processes of the rehearsal")
        process.kill()
    wait_until(lambda: not processes_below(scratch), "their end")
    left = ["kept"] if keeps else []
    wait_until(lambda: [path.name for path in scratch.iterdir()] == left, "the end of the clean-up")


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (("rehearse",), "no JOB is given"),
        (("rehearse", "--fault", "flood", "--", "true"), "preemption, time-limit"),
        (("rehearse", "--sandbox", "--cluster", "slurm", "--", "true"), "leave one of them out"),
        (("rehearse", "--link", "nowhere", "--", "true"), "name a file or directory that exists"),
        (("rehearse", "--link", "/", "--", "true"), "absolute path"),
        (("rehearse", "--cluster", "slurm", "--", "true"), "--cluster local"),
        (("rehearse", "--sweep", "lr=1,2", "--", "true"), "--sweep is an option of hpcddp submit; leave it out"),
    ],
)
def test_bad_words_are_one_sentence_with_the_way_out(project: Path, words: tuple[str, ...], way_out: str) -> None:
    done = hpcddp(project, *words)
    assert done.returncode == 2
    assert way_out in done.stderr
    assert "Traceback" not in done.stderr
