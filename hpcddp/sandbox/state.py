"""Records in a sandbox's directory, and the removal of the directory."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcddp.errors import HpcddpError
from hpcddp.processes import Process, boot_id, find
from hpcddp.run.files import read_json, write_bytes, write_json
from hpcddp.sandbox import cgroups

# The first file written and the last one removed: a directory without it is not ours.
_MARKER = "sandbox.json"
_MANAGER = "daemon-manager.json"
_DAEMONS = "daemons.json"


class RemovalError(HpcddpError):
    """A file of the sandbox cannot be removed."""

    kind = "removal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A sandbox, as its directory describes it.

    Attributes:
        directory: where its files are.
        token: identifies its processes, and is part of its names.
        isolated: whether each node is a host of its own.
        interface: this machine's end of the veth pair into it, None if its nodes share this host.
        controller_host: the host name of slurmctld's host.
        nodes: the nodes' names.
        partitions: the partitions' names, the default one first.
        uses_cgroups: whether Slurm makes control groups.
        slurm_root: the root directory of its Slurm, None if it is this machine's.
    """

    directory: Path
    token: str
    isolated: bool
    interface: str | None
    controller_host: str
    nodes: tuple[str, ...]
    partitions: tuple[str, ...]
    uses_cgroups: bool
    slurm_root: Path | None = None

    @property
    def client_commands(self) -> Path:
        """The directory of Slurm's client commands, if its Slurm is in another root directory."""
        return self.directory / "bin"

    @property
    def slurm_conf(self) -> Path:
        """The file that ``SLURM_CONF`` names."""
        return self.directory / "slurm.conf"

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        return {
            "slurm_conf": str(self.slurm_conf),
            "nodes": list(self.nodes),
            "partitions": list(self.partitions),
            "hosts": "namespaces" if self.isolated else "shared",
            "directory": str(self.directory),
            "bin": None if self.slurm_root is None else str(self.client_commands),
        }


def read(directory: Path) -> Sandbox | None:
    """Return the sandbox that ``directory`` holds, running or not; None if it holds none."""
    # The command line imports this module for every command.
    from pydantic import TypeAdapter

    try:
        return TypeAdapter(Sandbox).validate_json((directory / _MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def write(sandbox: Sandbox) -> None:
    """Mark the sandbox's directory as ours."""
    from pydantic import TypeAdapter

    write_bytes(sandbox.directory / _MARKER, TypeAdapter(Sandbox).dump_json(sandbox))


def write_manager(sandbox: Sandbox, manager: Process) -> None:
    """Record the daemon manager of the sandbox."""
    write_json(
        sandbox.directory / _MANAGER,
        {"pid": manager.pid, "start": manager.start, "boot_id": boot_id()},
    )


def find_manager(sandbox: Sandbox) -> Process | None:
    """Return the sandbox's daemon manager, or None if it has ended, never started, or the machine was rebooted."""
    record = read_json(sandbox.directory / _MANAGER)
    if record is None or record["boot_id"] != boot_id():
        return None
    process = find(record["pid"])
    return process if process is not None and process.start == record["start"] else None


def write_daemons(sandbox: Sandbox, daemons: Mapping[str, int]) -> None:
    """Record that every daemon was started, and their process ids as the daemon manager sees them."""
    write_json(sandbox.directory / _DAEMONS, dict(daemons))


def read_daemons(sandbox: Sandbox) -> dict[str, int] | None:
    """Return the daemons' process ids as the daemon manager sees them, or None if not every one was started yet."""
    daemons: dict[str, int] | None = read_json(sandbox.directory / _DAEMONS)
    return daemons


def remove_files(sandbox: Sandbox) -> None:
    """Remove the sandbox's directory and control groups; what is missing is no error.

    Raises:
        RemovalError: something cannot be removed; the directory stays marked as ours.
    """
    if sandbox.uses_cgroups:
        cgroups.remove(sandbox.token)
    with contextlib.suppress(FileNotFoundError):
        for entry in _entries(sandbox.directory):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        left = _entries(sandbox.directory)
        if left:
            raise RemovalError(f"{left[0]} of the sandbox cannot be removed; see what holds it, then run down again")
        (sandbox.directory / _MARKER).unlink(missing_ok=True)
        sandbox.directory.rmdir()


def _entries(directory: Path) -> list[Path]:
    return [entry for entry in directory.iterdir() if entry.name != _MARKER]
