"""Instructions that ``up`` sends to the supervisor, as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self


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
    """The commands and daemons that the supervisor runs, in this order.

    Attributes:
        commands: run one after the other; the first that fails ends the sandbox.
        daemons: started one after the other.
    """

    commands: tuple[Command, ...]
    daemons: tuple[Daemon, ...]

    def as_line(self) -> str:
        """Return the instructions as JSON without a line break."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return the instructions that ``as_line`` wrote."""
        document = json.loads(line)
        return cls(
            commands=tuple(
                Command(argv=tuple(one["argv"]), standard_input=one["standard_input"]) for one in document["commands"]
            ),
            daemons=tuple(_daemon(one) for one in document["daemons"]),
        )


def _daemon(document: dict[str, Any]) -> Daemon:
    socket, address = document["ready_socket"], document["ready_address"]
    return Daemon(
        name=document["name"],
        argv=tuple(document["argv"]),
        output=Path(document["output"]),
        ready_socket=None if socket is None else Path(socket),
        ready_address=None if address is None else (address[0], address[1]),
    )
