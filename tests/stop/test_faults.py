"""Fault injection: only what is armed, and only at its point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hpcddp.stop import faults
from hpcddp.stop.faults import Fault, FaultError, InjectedError
from tests.messages import GoldenMessages


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm(None, rank=0, attempt=0)


def test_every_part_of_a_fault_is_read() -> None:
    assert faults.parse("kill@step:20,rank=1,attempt=0; sleep=0.5@save.rename") == [
        Fault(action="kill", value=None, point="step", step=20, rank=1, attempt=0),
        Fault(action="sleep", value="0.5", point="save.rename"),
    ]


@pytest.mark.parametrize("text", [None, "", " ; "])
def test_nothing_armed_means_nothing_happens(text: str | None) -> None:
    faults.arm(text, rank=0, attempt=0)
    for point in faults.POINTS:
        faults.inject(point, step=1)


@pytest.mark.parametrize("text", ["kill", "kill@step:x", "explode@step", "kill@save.middle", "kill@step,host=1"])
def test_text_that_cannot_be_read_is_refused_with_a_sentence(text: str, golden: GoldenMessages) -> None:
    with pytest.raises(FaultError) as caught:
        faults.arm(text, rank=0, attempt=0)
    message = golden.message(caught.value)
    assert message.startswith(f"HPCDDP_FAULTS has {text!r}")


def test_exception_comes_at_its_step_on_its_rank_in_its_attempt_only() -> None:
    for rank, attempt in ((0, 0), (1, 1)):
        faults.arm("exception@step:3,rank=1,attempt=0", rank=rank, attempt=attempt)
        faults.inject("step", step=3)
    faults.arm("exception@step:3,rank=1,attempt=0", rank=1, attempt=0)
    faults.inject("step", step=2)
    faults.inject("save.begin", step=3)
    with pytest.raises(InjectedError, match="a fault was asked for at step"):
        faults.inject("step", step=3)


def test_without_a_step_it_is_every_step() -> None:
    faults.arm("oserror=ENOSPC@save.file", rank=0, attempt=0)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            faults.inject("save.file", step=step)


@pytest.mark.parametrize(
    ("action", "code"),
    [("kill", -signal.SIGKILL), ("kill=SEGV", -signal.SIGSEGV), ("exit=3", 3), ("exit=0", 0), ("sleep=0", 9)],
)
def test_process_ends_with_the_code_of_the_fault(action: str, code: int) -> None:
    program = (
        "import os, sys; from hpcddp.stop import faults; faults.arm(os.environ[faults.VARIABLE], rank=0, attempt=0); "
        "faults.inject('step', step=1); sys.exit(9)"
    )
    environment = {**os.environ, faults.VARIABLE: f"{action}@step:1"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == code


def test_stopped_process_continues_after_sigcont() -> None:
    program = (
        "import sys; from hpcddp.stop import faults; faults.arm('stop@step', rank=0, attempt=0); faults.inject('step')"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
