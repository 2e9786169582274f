"""``hpcddp.Stopper`` in a process of its own; with several ranks it is tested by the example of a loop of one's own."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

import hpcddp
from hpcddp.train.distributed import NoGroupError
from hpcddp.train.stopper import Stopper, StopperError
from tests.forked_python import run_python
from tests.messages import GoldenMessages
from tests.slurm.programs import program

BEGIN = """
import atexit, os, signal, sys, time
import hpcddp
from hpcddp.train.stopper import Stopper
atexit.register(print, "never printed")
stopper = Stopper()
"""


def run(program: str, **environment: str) -> tuple[int, list[str], str]:
    done = run_python(BEGIN + program, env={**os.environ, **environment})
    return done.returncode, done.stdout.split(), done.stderr


def test_a_signal_stops_the_loop_and_the_process_ends_with_75(tmp_path: Path) -> None:
    wish = tmp_path / "requeue"
    code, said, errors = run(
        """
print(stopper.should_stop(), stopper.reason)
os.kill(os.getpid(), signal.SIGUSR2)
while not stopper.should_stop():
    time.sleep(0.01)
print(stopper.should_stop(), stopper.reason)
stopper.exit()
""",
        HPCDDP_REQUEUE_FILE=str(wish),
    )
    assert (code, said) == (75, ["False", "none", "True", "warned"]), errors
    assert wish.exists()


def test_the_loop_itself_may_ask_for_a_stop() -> None:
    code, said, errors = run("stopper.request()\nprint(stopper.should_stop(), stopper.reason)\nstopper.exit()")
    assert (code, said) == (75, ["True", "requested"]), errors


def test_the_jobs_end_stops_the_loop_by_the_clock() -> None:
    soon, now = str(int(time.time()) + 5), str(int(time.time()))
    program = "print(stopper.should_stop(), stopper.reason)\nstopper.exit()"
    assert run(program, SLURM_JOB_END_TIME=soon, SLURM_JOB_START_TIME=now)[:2] == (75, ["True", "deadline"])
    later = str(int(time.time()) + 86400)
    assert run(program, SLURM_JOB_END_TIME=later, SLURM_JOB_START_TIME=now)[:2] == (75, ["False", "none"])


def scontrol(folder: Path, end: float) -> dict[str, str]:
    """Return the environment of job 5, which ends at ``end`` by what scontrol says after a second."""
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end))
    answer = f"JobState=RUNNING PreemptTime=None TimeLimit=00:20:00 EndTime={text}"
    path = program(folder, "scontrol", f"sleep 1; echo '{answer}'")["PATH"]
    return {"PATH": path, "SLURM_JOB_ID": "5", "SLURM_JOB_START_TIME": str(int(time.time()))}


WATCHED = """
began = time.monotonic()
while not stopper.should_stop() and time.monotonic() - began < 8:
    time.sleep(0.01)
print(stopper.reason)
stopper.exit()
"""


def test_an_end_that_slurm_has_moved_does_not_stop_the_loop(tmp_path: Path) -> None:
    job = scontrol(tmp_path, time.time() + 1200)
    assert run(WATCHED, SLURM_JOB_END_TIME=str(int(time.time())), **job)[:2] == (75, ["none"])


def test_an_end_that_slurm_has_brought_forward_stops_the_loop(tmp_path: Path) -> None:
    job = scontrol(tmp_path, time.time() + 5)
    assert run(WATCHED, SLURM_JOB_END_TIME=str(int(time.time()) + 1200), **job)[:2] == (75, ["deadline"])


def test_it_is_part_of_the_public_api() -> None:
    assert hpcddp.Stopper is Stopper


def test_it_is_refused_outside_the_main_thread(golden: GoldenMessages) -> None:
    errors: list[StopperError] = []

    def make() -> None:
        try:
            Stopper()
        except StopperError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    message = golden.message(errors[0])
    assert "hpcddp.Stopper is made in another thread" in message
    assert "make it in the main thread" in message


def test_several_processes_without_a_group_are_refused() -> None:
    code, _, errors = run("stopper.should_stop()", WORLD_SIZE="2")
    assert code == 1
    assert NoGroupError.__name__ in errors
    assert "call torch.distributed.init_process_group first" in errors


@pytest.mark.parametrize("end", ["", "unknown", "-1"])
def test_an_end_that_is_no_time_is_none(end: str) -> None:
    assert run("print(stopper.should_stop())\nstopper.exit()", SLURM_JOB_END_TIME=end)[1] == ["False"]
