"""The end of a program that Slurm signals together with the task that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# The program kills itself by SIGTERM, like a signal to the whole tree; the task gets SIGTERM a moment later, or never.
TASK = """
import os, signal, threading, sys
from hpcddp.task import program
from hpcddp.stop.listener import LISTENER

LISTENER.install()
if sys.argv[1] != "never":
    threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGTERM)).start()
running = program.Program(["sh", "-c", sys.argv[2]], dict(os.environ), notice=program._Notice(None, 0.0))
code = running.wait()
print(code, running.told)
sys.stdout.flush()
os._exit(0)
"""
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("heard", "body", "told"),
    [
        ("0.3", "kill -TERM $$", f"{-signal.SIGTERM} terminated"),
        ("0.3", "exit 143", "143 terminated"),
        ("1.3", "trap 'exit 0' TERM; sleep 1; kill -TERM $$", "0 terminated"),
        ("never", "trap 'exit 0' TERM; sleep 1; kill -TERM $$", "0 None"),
        ("never", "kill -TERM $$", f"{-signal.SIGTERM} None"),
        ("0.3", "exit 3", "3 None"),
    ],
)
def test_a_program_that_a_shared_signal_ended_was_told_to_end(heard: str, body: str, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TASK, heard, body],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == told, done.stderr
