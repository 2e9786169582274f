"""Faults of the Slurm under test: daemons that end, nodes that are lost, network links that are cut."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcddp.processes import children_of, find
from hpcddp.sandbox import state
from hpcddp.sandbox.programs import daemon_environment
from tests.cluster.sandbox import Sandbox
from tests.cluster.tracked_run import TrackedRun
from tests.waiting import wait_until

_POLL_S = 0.2
_LONGEST_END_S = 60


@contextlib.contextmanager
def link_cut(sandbox: Sandbox, node: str) -> Iterator[None]:
    """Take a node's network link down, and bring it up again."""
    sandbox.on(node, "ip", "link", "set", "eth0", "down")
    try:
        yield
    finally:
        sandbox.on(node, "ip", "link", "set", "eth0", "up")


@contextlib.contextmanager
def without_slurmd(sandbox: Sandbox, node: str) -> Iterator[None]:
    """Kill a node's slurmd, and start it again."""
    with _without(sandbox, node, on=node):
        yield


@contextlib.contextmanager
def without_controller(sandbox: Sandbox, *, signal: str = "TERM") -> Iterator[None]:
    """End slurmctld, and start it again.

    Args:
        sandbox: its Slurm.
        signal: ``TERM`` lets it save its state. With ``KILL`` it forgets what happened in its last seconds: requeues,
            and jobs, whose ids it uses again.
    """
    with _without(sandbox, "slurmctld", on=None, ending=signal):
        yield


@contextlib.contextmanager
def _without(
    sandbox: Sandbox, daemon: str, *, on: str | None, ending: str = "KILL", more: Sequence[str] = ()
) -> Iterator[None]:
    pid = daemon_pid(sandbox, daemon)
    words = sandbox.inside("cat", f"/proc/{pid}/cmdline").stdout.rstrip("\0").split("\0")
    sandbox.inside("kill", f"-{ending}", str(pid))
    ended = ("kill", "-0", str(pid))
    wait_until(lambda: sandbox.inside(*ended, check=False).returncode != 0, f"the end of {daemon}", _LONGEST_END_S)
    try:
        yield
    finally:
        # Without -D it leaves the foreground, and this process, by itself.
        start = [word for word in words if word != "-D"]
        enter = sandbox.enter_controller() if on is None else sandbox.enter(on)
        subprocess.run((*enter, *start, *more), env=daemon_environment(sandbox.token), check=True, timeout=30, cwd="/")


def kill_after_requeue(*tracked_runs: TrackedRun, after_s: float = 0, away_s: float = 2) -> None:
    """Kill slurmctld when it has requeued runs that stop, before it has saved that, and start it again."""
    for tracked in tracked_runs:
        tracked.wait_until((tracked.attempt.path / "decision.json").exists, "the decision to stop")
    first = tracked_runs[0]
    sandbox = first.sandbox
    # After a change it saves its state at once, but not again within the next six seconds.
    sandbox.submit("--hold", "--output=/dev/null", "--wrap=true")
    first.wait_until(lambda: all(sandbox.job(one.job_id)["Restarts"] == "1" for one in tracked_runs), "the requeue")
    time.sleep(after_s)
    with without_controller(sandbox, signal="KILL"):
        time.sleep(away_s)


def kill_step_daemon(rank_pid: int) -> None:
    """Kill the slurmstepd that a rank is a child of."""
    rank = find(rank_pid)
    assert rank is not None
    name = Path(f"/proc/{rank.parent}/comm").read_text()
    assert name.startswith("slurmstepd"), name
    os.kill(rank.parent, signal.SIGKILL)


def kill_step_on_host(rank_pid: int) -> None:
    """Kill the slurmstepd that a rank is a child of, and all that it has started: nobody there says a word."""
    rank = find(rank_pid)
    assert rank is not None
    name = Path(f"/proc/{rank.parent}/comm").read_text()
    assert name.startswith("slurmstepd"), name
    # It must not report the end of its tasks.
    os.kill(rank.parent, signal.SIGSTOP)
    family = [rank.parent, *_descendants(rank.parent)]
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    children = children_of(pid)
    return [*children, *(descendant for child in children for descendant in _descendants(child))]


def start_anew(sandbox: Sandbox, node: str) -> None:
    """Let a node look as if its machine had been started anew: its slurmd is killed, and begins with a boot of now."""
    with _without(sandbox, node, on=node, more=("-b",)):
        pass


def daemon_pid(sandbox: Sandbox, daemon: str) -> int:
    """Return a daemon's process id, as the daemon manager sees it; after a restart, the one that the daemon wrote."""
    directory = sandbox.slurm_conf.parent
    written = directory / "run" / f"{daemon}.pid"
    if written.exists():
        return int(written.read_text())
    known = state.read(directory)
    assert known is not None
    daemons = state.read_daemons(known)
    assert daemons is not None
    return daemons[daemon]


def wait_for_node(sandbox: Sandbox, node: str, *, timeout_s: float = 90) -> None:
    """Wait until a node takes jobs again; a node that Slurm has drained is resumed."""

    def is_back() -> bool:
        if "drain" in (shown := _state_of(sandbox, node)):
            sandbox.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        # A star means that it does not answer.
        return shown in {"idle", "mixed", "allocated", "completing"}

    wait_until(is_back, lambda: f"{node} is {_state_of(sandbox, node)}", timeout_s)


def _state_of(sandbox: Sandbox, node: str) -> str:
    done = sandbox.run("sinfo", "--noheader", f"--nodes={node}", "--partition=high", "--format=%T")
    return done.stdout.strip()
