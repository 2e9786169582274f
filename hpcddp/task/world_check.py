"""Detect that the programs of several tasks train in separate worlds instead of the world of the run.

A launcher such as torchrun can be hidden at submission, in a shell script or in a program. Each task looks at the
processes that its program has started, and records that one of them is a launcher whose world has no other task in it.
The run fails if rank 0 and another rank have recorded one. A launcher on one rank only is allowed, and so is any
launcher if the ranks of the program have met at the address of the run.

If a program uses PyTorch and its ranks do not meet there, rank 0 prints a note.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hpcddp.errors import UserError, counted, write_message
from hpcddp.jobfile.launchers import Launcher, launcher_of
from hpcddp.processes import children_of, command_line, environment_of
from hpcddp.run.directory import AttemptDirectory
from hpcddp.slurm.rank_env import RankEnv

_PROC: Final = Path("/proc")
# A look costs milliseconds: first there is one at each poll, later the pause is a tenth of the program's run time.
_PAUSE_FRACTION: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0
# Some scripts prepare data before they open a process group.
_NOTE_AFTER_S: Final = 120.0
# proc(5), /proc/net/tcp: a connection that nobody has answered (include/net/tcp_states.h).
_TCP_SYN_SENT: Final = "02"


class SeparateWorldsError(UserError):
    """Several tasks of a run have started a world each."""

    kind = "separate_worlds"


class WorldMonitor:
    """Looks for a launcher among the processes of one rank's program, and for the process group of rank 0's.

    Args:
        command: the program and its arguments.
        port: MASTER_PORT of the run.
    """

    def __init__(self, command: Sequence[str], env: RankEnv, attempt: AttemptDirectory, *, port: int) -> None:
        self._command = command
        self._env = env
        self._attempt = attempt
        self._port = port
        self._began = time.monotonic()
        self._look_at = self._began
        self._run_has_met = False
        self._uses_torch = False
        self._has_noted = False
        self._has_noted_cpus = False
        self._separate_launcher: tuple[int, Launcher] | None = None

    def look(self, pid: int) -> None:
        """Look at the processes, end a launcher that makes the run fail, and print the note when it is time.

        Args:
            pid: the program's process id; it has not been waited for.

        Raises:
            SeparateWorldsError: this rank and other ranks have started worlds.
        """
        if self._env.world_size == 1:
            return
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + min(_LONGEST_PAUSE_S, _PAUSE_FRACTION * (now - self._began))
            self._look_at_processes(pid)
        if now - self._began >= _NOTE_AFTER_S:
            self.note_separate_ranks()
        if self._separate_launcher is not None:
            self._check_and_end_launcher(self._separate_launcher[0])

    def _look_at_processes(self, pid: int) -> None:
        """Look whether the run has met, and for a launcher with a world of its own, which is recorded once."""
        if self._env.rank == 0 and not self._run_has_met:
            self._run_has_met = _is_used(self._port)
            self._uses_torch = self._uses_torch or _uses_torch(pid)
        if self._separate_launcher is not None:
            return
        self._separate_launcher = self._find_separate_launcher(pid)
        if self._separate_launcher is not None:
            self._attempt.rank_world(self._env.rank).touch(mode=0o600)

    def _check_and_end_launcher(self, launcher_pid: int) -> None:
        """Compare the records of the ranks; if the run fails, end this rank's launcher before the error goes on."""
        try:
            self.check()
        except SeparateWorldsError:
            # To the launcher itself: a shell that started it does not pass signals on. It may have ended by now.
            with contextlib.suppress(ProcessLookupError):
                if launcher_of(command_line(launcher_pid), {}) is not None:
                    os.kill(launcher_pid, signal.SIGTERM)
            raise

    def note_separate_ranks(self) -> None:
        """Print once that the ranks of a program with PyTorch have not met; on rank 0."""
        if self._run_has_met or self._has_noted or not self._uses_torch:
            return
        self._run_has_met = _is_used(self._port)
        if self._run_has_met:
            return
        self._has_noted = True
        write_message(
            f"note: the {self._env.world_size} tasks of this program have opened no process group at "
            "MASTER_ADDR:MASTER_PORT, so each of them does the whole work alone, unless they share it in another way; "
            "a DDP script calls torch.distributed.init_process_group() (docs/any-script.md)"
        )

    def _note_cpus(self, launcher: Launcher, *, ranks: int) -> None:
        """Print once that the ranks of a launcher share the CPUs of one task, where the node has more; on rank 0."""
        cpus = len(os.sched_getaffinity(0))
        on_node = os.cpu_count() or 1
        if self._env.rank or self._has_noted_cpus or cpus >= min(ranks, on_node):
            return
        self._has_noted_cpus = True
        write_message(
            f"note: {launcher.name} has started {counted(ranks, 'rank')} in a task with {cpus} of the {on_node} CPUs "
            "of this node; write --cpus-per-task with their number, or the launcher itself as the command "
            "(-- torchrun train.py), which gets all of them"
        )

    def check(self) -> None:
        """Compare the records of the ranks.

        Raises:
            SeparateWorldsError: this rank and other ranks have started worlds.
        """
        if self._separate_launcher is None:
            return
        _, launcher = self._separate_launcher
        records = {path.name for path in self._attempt.path.glob("world-rank-*")}
        if len(records) == 1 or self._attempt.rank_world(0).name not in records:
            return
        advice = launcher.advice
        if launcher.program:
            advice = f"{advice}: {shlex.join(launcher.program)}"
        raise SeparateWorldsError(
            f"{shlex.join(self._command[:2])} has started {launcher.name} in several tasks, and each of them trains "
            f"alone, not as one of the {self._env.world_size} ranks of the run; {advice}"
        )

    def _find_separate_launcher(self, program: int) -> tuple[int, Launcher] | None:
        """Return the process id of a launcher below a program whose world has no other task in it; None without one."""
        waiting = [program]
        while waiting:
            pid = waiting.pop()
            words = command_line(pid)
            children = children_of(pid)
            launcher = launcher_of(words, environment_of(pid))
            if launcher is None:
                waiting += children
                continue
            workers = [environment_of(child) for child in children]
            if launcher.is_alone or any(map(_is_worker_of_one, workers)):
                # A launcher that has the run's port among its arguments listens there itself.
                has_port_of_run = any(str(self._port) in word for word in words)
                if has_port_of_run or not self._run_has_met:
                    return pid, launcher
            elif any(map(_is_worker_of_many, workers)):
                # Its world meets at an address of its own.
                self._run_has_met = True
                self._note_cpus(launcher, ranks=len(workers))
        return None


def _uses_torch(program: int) -> bool:
    """Return whether a program or a process that it has started has loaded PyTorch."""
    waiting = [program]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            if b"libtorch" in (_PROC / str(pid) / "maps").read_bytes():
                return True
        waiting += children_of(pid)
    return False


def _is_worker_of_one(environment: dict[str, str]) -> bool:
    """Return whether a process belongs to a world of torchrun that has a single launcher."""
    return "TORCHELASTIC_RUN_ID" in environment and environment.get("GROUP_WORLD_SIZE") == "1"


def _is_worker_of_many(environment: dict[str, str]) -> bool:
    """Return whether a process belongs to a world that several launchers of torchrun share."""
    return "TORCHELASTIC_RUN_ID" in environment and environment.get("GROUP_WORLD_SIZE", "1") != "1"


def _is_used(port: int) -> bool:
    """Return whether a process of this host listens on a port, or has had a connection to it in the last minute.

    The kernel remembers a connection that was closed for a minute: a short program may have met between two looks.
    """
    end = f":{port:04X}"
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = (_PROC / "net" / table).read_text(encoding="ascii").splitlines()[1:]
            for _, local, remote, state, *_ in map(str.split, lines):
                if state != _TCP_SYN_SENT and end in {local[-len(end) :], remote[-len(end) :]}:
                    return True
    return False
