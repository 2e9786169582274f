from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcddp.processes import Process, find
from hpcddp.sandbox import cleanup, sandbox, state
from tests.messages import GoldenMessages

CONF = Path("/somewhere/sandbox/slurm.conf")
TOKEN = "0123456789abcdef" * 2


@contextmanager
def running(*argv: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(argv, env={**os.environ, **variables}) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_carries_the_token_and_what_descends_from_it_belongs_to_the_sandbox() -> None:
    # The child has neither the token nor anything else in its environment.
    parent = (
        f"import subprocess; subprocess.run(['env', '-i', {sys.executable!r}, '-c', 'import time; time.sleep(60)'])"
    )
    with running(sys.executable, "-c", parent, HPCDDP_SANDBOX=TOKEN) as process:
        while len(found := cleanup.members(TOKEN, CONF)) < 2:
            assert process.poll() is None
        assert process.pid in {one.pid for one in found}
        cleanup.end_all(TOKEN, CONF, manager=process.pid)
        assert cleanup.members(TOKEN, CONF) == frozenset()


def test_a_shell_that_exported_slurm_conf_is_not_the_sandboxs() -> None:
    with running("sleep", "60", SLURM_CONF=str(CONF)):
        assert cleanup.members(TOKEN, CONF) == frozenset()


def test_a_step_daemon_of_the_sandbox_is_known_by_its_slurm_conf(tmp_path: Path) -> None:
    program = tmp_path / "slurmstepd-wlm"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    with running(str(program), "60", SLURM_CONF=str(CONF)) as own, running(str(program), "60", SLURM_CONF="/etc/x"):
        assert [one.pid for one in cleanup.members(TOKEN, CONF)] == [own.pid]


def test_a_later_process_with_the_same_id_is_left_alone() -> None:
    with running("sleep", "60") as process:
        found = find(process.pid)
        assert found is not None
        cleanup.end(Process(pid=found.pid, parent=found.parent, start=found.start - 1))
        assert process.poll() is None
        cleanup.end(found)
        assert process.wait() == -signal.SIGKILL


def test_a_process_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages) -> None:
    monkeypatch.setattr(cleanup, "_TIMEOUT_S", 0.0)
    monkeypatch.setattr(cleanup, "end", lambda _: None)
    with running("sleep", "60", HPCDDP_SANDBOX=TOKEN) as process, pytest.raises(cleanup.StillRunningError) as caught:
        cleanup.end_all(TOKEN, CONF, manager=None)
    message = golden.message(caught.value, {f"process {process.pid} ": "process PID "})
    assert f"process {process.pid} of the sandbox" in message
    assert "0 s after SIGKILL" in message
    assert "hpcddp sandbox down" in message


def test_a_daemon_manager_whose_environment_cannot_be_read_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is in execve(2), /proc shows an empty environment."""
    started = state.Sandbox(
        directory=tmp_path,
        token="t",
        isolated=False,
        interface=None,
        controller_host="n1",
        nodes=("n1",),
        partitions=("low",),
        uses_cgroups=False,
    )
    manager = Process(pid=7, parent=1, start=0)
    looks = iter([None, None, manager])
    monkeypatch.setattr(state, "find_manager", lambda _: next(looks))
    monkeypatch.setattr(cleanup, "members", lambda *_: frozenset())
    assert sandbox._wait_for_manager(started) == 7
