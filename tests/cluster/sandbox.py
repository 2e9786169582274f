"""Handle of the real Slurm that the tests in this folder run on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcddp.sandbox import network, state
from hpcddp.slurm.commands import show_job
from hpcddp.slurm.job import ENDED_STATES
from tests.command_line import hpcddp
from tests.waiting import wait_until

# Each question costs some milliseconds, and several tests wait at once.
_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A Slurm whose nodes are hosts of their own.

    Attributes:
        slurm_conf: its configuration.
        environment: this process's environment with ``SLURM_CONF``.
        nodes: the nodes' names, which are also their host names.
    """

    slurm_conf: Path
    environment: dict[str, str]
    nodes: tuple[str, ...]

    def run(
        self,
        *argv: str | Path,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 180,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that speaks to this Slurm; ``env`` is laid over the environment."""
        words = [str(word) for word in argv]
        environment = {**self.environment, **(env or {})}
        if words[:3] == [sys.executable, "-m", "hpcddp"]:
            done = hpcddp(cwd or Path.cwd(), *words[3:], environment=environment, timeout_s=timeout)
        else:
            done = subprocess.run(
                words,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="surrogateescape",
                timeout=timeout,
                check=False,
            )
        if check:
            assert done.returncode == 0, f"{argv} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done

    def submit(self, *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """Give a script, with sbatch's options before it, to sbatch and return the job id."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env).stdout.strip().partition(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """Return what ``scontrol show job`` says about a job."""
        fields = show_job(job_id, environment=self.environment)
        assert fields is not None, f"Slurm does not know job {job_id}"
        return fields

    def wait(
        self, job_id: str, states: Collection[str] = frozenset({"COMPLETED"}), timeout: float = 240
    ) -> dict[str, str]:
        """Wait until the job is in one of ``states``; a job that has ended in another one fails at once."""
        deadline = time.monotonic() + timeout
        while (fields := self.job(job_id))["JobState"] not in states:
            if _is_preempted_for_ever(fields) and ENDED_STATES.issuperset(states):
                break
            told = f"job {job_id} is {fields['JobState']} and not {' or '.join(states)}\n{self._description(fields)}"
            assert fields["JobState"] not in ENDED_STATES, told
            assert time.monotonic() < deadline, f"after {timeout} s {told}"
            time.sleep(_POLL_S)
        return fields

    def cancel_all(self) -> None:
        """Cancel every job and wait until none is left."""
        user = str(os.geteuid())
        self.run("scancel", f"--user={user}")

        def left() -> str:
            return self.run("squeue", "--noheader", f"--user={user}").stdout

        wait_until(lambda: not left(), lambda: f"the end of all jobs:\n{left()}")

    def on(self, node: str, *argv: str, check: bool = True, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Run a command on a node as an administrator would: with its network, host name and processes."""
        return self.run(*self.enter(node), *argv, check=check, timeout=timeout)

    def inside(self, *argv: str, check: bool = True, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Run a command where slurmctld runs."""
        return self.run(*self.enter_controller(), *argv, check=check, timeout=timeout)

    def enter(self, node: str) -> tuple[str, ...]:
        """Return the words in front of a command that make it run on a node."""
        # The files that keep the namespaces alive are mounted in the daemon manager's mount namespace.
        manager, directory = self._manager(), self.slurm_conf.parent
        inside = Path(f"/proc/{manager}/root") / directory.relative_to("/")
        net, uts = (network.namespace_file(inside, kind, node) for kind in ("net", "uts"))
        return ("nsenter", f"--target={manager}", "--mount", "--pid", f"--net={net}", f"--uts={uts}", "--")

    def enter_controller(self) -> tuple[str, ...]:
        """Return the words in front of a command that make it run where slurmctld runs."""
        return ("nsenter", f"--target={self._manager()}", "--mount", "--pid", "--net", "--uts", "--")

    @property
    def token(self) -> str:
        """What every process of this Slurm carries."""
        return _known(self.slurm_conf.parent).token

    def _manager(self) -> int:
        manager = state.find_manager(_known(self.slurm_conf.parent))
        assert manager is not None
        return manager.pid

    def _description(self, fields: Mapping[str, str]) -> str:
        log = Path(fields.get("StdOut", "/dev/null"))
        words = log.read_text(errors="replace")[-4000:] if log.is_file() else "no log"
        return f"{fields}\n{log}:\n{words}"


def _is_preempted_for_ever(fields: Mapping[str, str]) -> bool:
    """Return whether a job that was once preempted has ended: Slurm 24.05 and later show neither how nor its code."""
    return fields["JobState"] == "PREEMPTED" and fields["Restarts"] != "0"


def _known(directory: Path) -> state.Sandbox:
    sandbox = state.read(directory)
    assert sandbox is not None
    return sandbox
