"""Commands and daemons of a sandbox: what they are, and how the command line and the daemon manager start them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcddp.errors import HpcddpError
from hpcddp.sandbox.cleanup import TOKEN_VARIABLE

# Daemons are in sbin, which an ordinary user's PATH lacks on Debian.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMAND_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that ends by itself.

    Attributes:
        argv: the command line.
        standard_input: what it reads.
    """

    argv: tuple[str, ...]
    standard_input: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A program that keeps running.

    Attributes:
        name: ``munged``, ``slurmctld`` or a node's name.
        argv: the command line; the program stays in the foreground.
        output: the file that its standard output and error go to.
        ready_socket: the socket that exists once it is ready, if the next daemon must wait for it.
        ready_address: the address that accepts connections once it is ready, likewise.
    """

    name: str
    argv: tuple[str, ...]
    output: Path
    ready_socket: Path | None = None
    ready_address: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """The commands and daemons that the daemon manager runs, in this order.

    Attributes:
        commands: run one after the other; the first that fails ends the sandbox.
        daemons: started one after the other.
    """

    commands: tuple[Command, ...]
    daemons: tuple[Daemon, ...]

    def as_line(self) -> str:
        """Return the instructions as JSON without a line break."""
        # The command line imports this module for every command.
        from pydantic import TypeAdapter

        return TypeAdapter(Instructions).dump_json(self).decode()

    @staticmethod
    def from_line(line: str) -> Instructions:
        """Return the instructions that ``as_line`` wrote."""
        from pydantic import TypeAdapter

        return TypeAdapter(Instructions).validate_json(line)


class ProcessError(HpcddpError):
    """A command or a daemon of the sandbox failed."""

    kind = "sandbox"


def daemon_environment(token: str) -> dict[str, str]:
    """Return a daemon's environment: nothing of the caller's, and the token of the sandbox."""
    return {"PATH": PATH, "LANG": "C.UTF-8", TOKEN_VARIABLE: token}


def missing_programs(programs: Sequence[str]) -> list[str]:
    """Return those of ``programs`` that are not installed."""
    path = os.pathsep.join((os.environ.get("PATH", ""), PATH))
    return [program for program in programs if shutil.which(program, path=path) is None]


def run(command: Command, environment: Mapping[str, str]) -> str:
    """Run a command to its end.

    Returns:
        What it printed.

    Raises:
        ProcessError: it failed, or did not end; the message quotes its output.
    """
    words = " ".join(command.argv)
    try:
        done = subprocess.run(
            command.argv,
            input=command.standard_input,
            env=dict(environment),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProcessError(f"`{words}` did not end within {COMMAND_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split()) or "it printed nothing"
        raise ProcessError(f"`{words}` failed with {done.returncode}: {said}", returncode=done.returncode)
    return done.stdout


def start_detached(
    argv: Sequence[str], output: Path, environment: Mapping[str, str], *, standard_input: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a program in its own session; its standard output and error are appended to ``output``."""
    with output.open("ab") as stream:
        return subprocess.Popen(
            argv,
            stdin=standard_input,
            stdout=stream,
            stderr=stream,
            env=dict(environment),
            cwd="/",
            start_new_session=True,
        )
