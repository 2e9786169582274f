"""A sweep on this machine: real processes that wait for their turns, and what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.jobfile.overrides import sweep_overrides
from hpcddp.jobfile.read import load_job
from hpcddp.manage.overview import overview_of
from hpcddp.run.code import read_sources
from hpcddp.run.directory import RunDirectory
from hpcddp.run.ownership import processes_left
from hpcddp.run.sweep import Sweep, read_sweep
from hpcddp.slurm.job import State
from hpcddp.submission import sweep as submission
from hpcddp.submission.request import SubmissionError, SubmitRequest
from hpcddp.submission.resume import request_to_resume, resume_locked
from hpcddp.submission.resume_sweep import resume_sweep
from hpcddp.submission.submit import Submission, submit_script
from hpcddp.submission.sweep import submit_sweep
from tests.command_line import hpcddp
from tests.messages import GoldenMessages
from tests.submission.requests import request_of
from tests.waiting import wait_until, wait_until_gone

ROOT = Path(__file__).parents[2]
# Writes down its beginning and its end; waits for a file of its own, or of all, before the end.
PROGRAM = """
import os, sys, time
from pathlib import Path

def write(what):
    with open("log", "a") as log:
        log.write(f"{what} {sys.argv[1]} {os.environ['HPCDDP_SWEEP_INDEX']}\\n")

write("begin")
while not (Path("go").exists() or Path(f"go-{sys.argv[1]}").exists()):
    time.sleep(0.05)
write("end")
"""
_TIMEOUT_S = 120.0
NO_REPOSITORY = "the directory of submission is not in a git repository"


@dataclass(frozen=True)
class LocalSweep:
    """A directory in which sweeps are submitted, and their log."""

    directory: Path

    def hpcddp(self, *words: str, code: int = 0) -> str:
        done = hpcddp(self.directory, *words, environment={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    def submit(self, count: int, *words: str) -> Sweep:
        axis = f"seed=0..{count - 1}"
        command = ("--", sys.executable, "program.py", "{seed}")
        printed = self.hpcddp(
            "submit", "--cluster", "local", "--name", "mine", "--sweep", axis, "--json", *words, *command
        )
        sweep = read_sweep(Path(json.loads(printed)["sweep_dir"]))
        assert sweep is not None
        return sweep

    def log(self) -> list[tuple[str, int]]:
        path = self.directory / "log"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        assert all(seed == index for _, seed, index in lines)
        return [(what, int(seed)) for what, seed, _ in lines]

    def wait_for_begun(self, count: int) -> list[int]:
        """Wait until so many programs have begun, and return which."""

        def begun() -> list[int]:
            found = [seed for what, seed in self.log() if what == "begin"]
            return found if len(found) >= count else []

        wait_until(begun, f"{count} programs", _TIMEOUT_S)
        return begun()

    def go(self, name: str = "go") -> None:
        (self.directory / name).touch()


def states(sweep: Sweep) -> list[str]:
    (line,) = overview_of([sweep], ask=list, now=0.0).lines
    return [str(element.state) for element in getattr(line, "elements", ())]


def process_of(sweep: Sweep, index: int) -> int:
    return int(json.loads(sweep.run(index).submission.read_text())["job_id"])


def wait_for_end(sweep: Sweep) -> None:
    for index in range(len(sweep.elements)):
        wait_until_gone(process_of(sweep, index), _TIMEOUT_S)


def most_at_once(log: list[tuple[str, int]]) -> int:
    running, most = 0, 0
    for what, _ in log:
        running += 1 if what == "begin" else -1
        most = max(most, running)
    return most


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalSweep]:
    (tmp_path / "program.py").write_text(PROGRAM)
    made = LocalSweep(tmp_path)
    yield made
    # Ends what a failed test has left.
    made.go()
    for path in tmp_path.glob("runs/*/*/sweep.json"):
        sweep = read_sweep(path.parent)
        if sweep is not None:
            made.hpcddp("cancel", str(sweep.path))
            wait_for_end(sweep)


def test_the_elements_run_one_after_another_each_as_a_run_of_its_own(local: LocalSweep) -> None:
    sweep = local.submit(2)
    (first,) = local.wait_for_begun(1)
    assert states(sweep)[1 - first] == "pending"
    assert "it waits for its turn" in local.hpcddp("why", sweep.run_id(1 - first))
    assert "1 pending" in local.hpcddp("why", sweep.sweep_id)
    local.go()
    wait_for_end(sweep)
    assert most_at_once(local.log()) == 1
    assert sorted(local.log()) == [(what, seed) for what in ("begin", "end") for seed in range(2)]
    assert states(sweep) == ["finished"] * 2
    for index in range(2):
        document = json.loads(sweep.run(index).submission.read_text())
        assert (document["cluster"], document["sweep"], document["index"]) == ("local", sweep.sweep_id, index)
        assert f'"{index}"' in sweep.run(index).job_file.read_text()
    assert all(path.stat().st_mode & 0o077 == 0 for path in sweep.path.parent.glob("*"))
    (source,) = read_sources(sweep.run(1))
    assert (source.directory, source.git_unknown) == (str(local.directory), NO_REPOSITORY)


def test_as_many_run_at_once_as_max_parallel_says(local: LocalSweep) -> None:
    sweep = local.submit(3, "--max-parallel", "2")
    begun = local.wait_for_begun(2)
    assert sorted(states(sweep)).count("pending") == 1
    local.go(f"go-{begun[1]}")
    # The turn that is free first is taken, whichever it is.
    local.wait_for_begun(3)
    local.go()
    wait_for_end(sweep)
    assert most_at_once(local.log()) == 2
    assert states(sweep) == ["finished"] * 3


def test_a_cancelled_sweep_starts_nothing_more_and_can_be_resumed(local: LocalSweep, golden: GoldenMessages) -> None:
    sweep = local.submit(2)
    local.wait_for_begun(1)
    local.hpcddp("cancel", sweep.sweep_id)
    wait_for_end(sweep)
    assert states(sweep) == ["cancelled"] * 2
    assert len(local.log()) == 1
    local.go()
    resumed = local.hpcddp("submit", "--resume", sweep.sweep_id)
    assert resumed.startswith("2 elements continue; 0 finished, 0 alive\n")
    wait_for_end(sweep)
    assert states(sweep) == ["finished"] * 2
    assert most_at_once(local.log()[1:]) == 1
    message = local.hpcddp("submit", "--resume", sweep.sweep_id, code=2)
    assert "no run to resume: 2 finished, 0 alive" in golden.message(message, {sweep.sweep_id: "SWEEP"})


def test_an_interrupted_resumption_resumes_all_elements_and_says_so(
    local: LocalSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = local.submit(2)
    local.wait_for_begun(1)
    local.hpcddp("cancel", sweep.sweep_id)
    wait_for_end(sweep)
    processes = [process_of(sweep, index) for index in range(2)]

    def resume_element(run: RunDirectory, request: SubmitRequest, **arguments: Any) -> Submission:
        resumed = resume_locked(run, request, **arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return resumed

    monkeypatch.setattr("hpcddp.submission.resume_sweep.resume_locked", resume_element)
    with pytest.raises(KeyboardInterrupt, match="was submitted all the same; to end it: hpcddp cancel "):
        resume_sweep(sweep, [0, 1], request_to_resume(sweep.directory, environment=os.environ))
    assert not {process_of(sweep, index) for index in range(2)} & set(processes)


def test_a_cancelled_element_gives_its_place_to_the_others(local: LocalSweep) -> None:
    sweep = local.submit(3)
    (first,) = local.wait_for_begun(1)
    waiting = next(index for index in range(3) if index != first)
    assert "is cancelled before its turn" in local.hpcddp("cancel", sweep.run_id(waiting))
    local.go()
    wait_for_end(sweep)
    assert [state for index, state in enumerate(states(sweep)) if index != waiting] == ["finished"] * 2
    assert states(sweep)[waiting] == "cancelled"
    assert ("begin", waiting) not in local.log()
    assert local.hpcddp("submit", "--resume", sweep.run_id(waiting)).startswith("run id")
    wait_for_end(sweep)
    assert states(sweep) == ["finished"] * 3


def test_a_killed_element_frees_its_turn_whether_it_ran_or_waited(local: LocalSweep) -> None:
    sweep = local.submit(3)
    (first,) = local.wait_for_begun(1)
    waiting = next(index for index in range(3) if index != first)
    os.kill(process_of(sweep, waiting), signal.SIGKILL)
    # The session of an element is a group of its own.
    os.killpg(process_of(sweep, first), signal.SIGKILL)
    local.wait_for_begun(2)
    local.go()
    wait_for_end(sweep)
    others = [state for index, state in enumerate(states(sweep)) if index not in {first, waiting}]
    assert (states(sweep)[first], states(sweep)[waiting], others) == ("lost", "lost", ["finished"])
    resumed = json.loads(local.hpcddp("submit", "--resume", sweep.sweep_id, "--json"))
    assert [one["run_id"] for one in resumed["elements"]] == sorted([sweep.run_id(first), sweep.run_id(waiting)])
    assert (resumed["cluster"], resumed["finished"], resumed["alive"]) == ("local", 1, 0)
    wait_for_end(sweep)
    assert states(sweep) == ["finished"] * 3


def test_a_cancelled_sweep_leaves_no_process_of_a_killed_script(local: LocalSweep) -> None:
    sweep = local.submit(2)
    (first,) = local.wait_for_begun(1)
    os.kill(process_of(sweep, first), signal.SIGKILL)
    wait_until_gone(process_of(sweep, first), _TIMEOUT_S)
    assert processes_left(sweep.run(first)) != []
    message = local.hpcddp("cancel", sweep.sweep_id)
    assert "SIGTERM was sent " in message
    assert "killed batch script" in message
    wait_until(lambda: not processes_left(sweep.run(first)), "the end of all processes", _TIMEOUT_S)
    assert local.log() == [("begin", first)]


def test_the_preview_is_the_script_of_the_first_element(local: LocalSweep) -> None:
    words = ("submit", "--cluster", "local", "--name", "mine", "--sweep", "seed=7,8", "--dry-run")
    script = local.hpcddp(*words, "--", sys.executable, "program.py", "{seed}")
    assert '"7"' in script
    assert "SLURM_ARRAY_TASK_ID" not in script
    assert not (local.directory / "runs").exists()


def test_a_dry_run_names_each_run_with_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("")
    words = [
        "submit",
        "--cluster",
        "local",
        "--name",
        "mine",
        "--sweep",
        "lr=1e-3,x",
        "--sweep",
        "seed=0..14",
        "--dry-run",
    ]
    assert boundary.run(app, [*words, "--", sys.executable, "program.py", "{lr}", "{seed}"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("dry run: would go to local, 30 runs, ")
    assert (lines[1], lines[16]) == ("run 0: lr=1e-3 seed=0", "run 15: lr=x seed=0")
    assert lines[20:] == ["run 19: lr=x seed=4", "and 10 more"]


def swept(count: int) -> Any:
    options = sweep_overrides([f"environment.env.A=1..{count}"], None, None)
    job = load_job(None, overrides=[f"command=[{sys.executable}, -c, pass]", "name=mine"], options=options)
    return request_of(job, run_id="s1", cluster="local", python=sys.executable, environment=dict(os.environ))


def test_a_sweep_of_too_many_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SubmissionError) as caught:
        submit_sweep(swept(257))
    message = golden.message(caught.value)
    assert message.startswith("the sweep has 257 elements, ")
    assert "at most 256 are allowed; split it " in message
    assert not (tmp_path / "runs").exists()


def test_a_submission_that_fails_leaves_no_process_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[Any] = []

    def twice(*arguments: Any) -> Any:
        if len(started) == 2:
            raise OSError(28, "No space left on device")
        started.append(submit_script(*arguments))
        return started[-1]

    monkeypatch.setattr(submission, "submit_script", twice)
    with pytest.raises(OSError, match="No space left"):
        submit_sweep(swept(3))
    assert [one.job._process.wait(timeout=_TIMEOUT_S) for one in started] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "runs").exists()


def test_the_end_of_a_process_does_not_hide_why_a_submission_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[Any] = []

    def ends_at_once(*arguments: Any) -> Any:
        if started:
            started[0].job._process.kill()
            started[0].job._process.wait(timeout=_TIMEOUT_S)
            raise OSError(28, "No space left on device")
        started.append(submit_script(*arguments))
        return started[0]

    monkeypatch.setattr(submission, "submit_script", ends_at_once)
    with pytest.raises(OSError, match="No space left"):
        submit_sweep(swept(2))
    assert not (tmp_path / "runs").exists()


def test_an_element_that_waits_on_another_machine_is_not_lost(local: LocalSweep) -> None:
    sweep = local.submit(2)
    local.wait_for_begun(1)
    for index in range(2):
        path = sweep.run(index).submission
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "another-machine"}))
    assert State.UNKNOWN in states(sweep)
    for index in range(2):
        path = sweep.run(index).submission
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": os.uname().nodename}))
