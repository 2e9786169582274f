"""Validate the sandbox that a user requests, before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.run.files import user_name
from hpcddp.sandbox import cgroups
from hpcddp.sandbox import root as roots
from hpcddp.sandbox.network import MOST_NODES
from hpcddp.sandbox.request import Request

_PACKAGES: Mapping[str, str] = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
}
_ISOLATION_ONLY = frozenset({"ip"})

# The longest path in the directory is a step's socket, spool/n123/n123_4294967295.4294967294, and a socket's path
# has at most 107 bytes (unix(7)).
_LONGEST_DIRECTORY = 70
# Characters that neither slurm.conf nor a node's name pattern gives a meaning to.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9/._+-]*")
_MOST_PER_NODE = 1024


def check_request(request: Request, *, missing_programs: Callable[[Sequence[str]], list[str]]) -> None:
    """Reject a request that cannot be carried out.

    Raises:
        UserError: for the first error; says what to do instead.
    """
    if request.isolated and os.geteuid() != 0:
        raise UserError("--hosts is namespaces, and only root can make networks; use --hosts shared")
    _check_numbers(request)
    _check_directory(request.directory)
    if request.uses_cgroups and not request.isolated:
        raise UserError(
            "--hosts is shared, and nodes on one host would share their control groups; "
            "leave the cgroup plugins out, or use --hosts namespaces as root"
        )
    if request.uses_cgroups and not cgroups.is_version_1():
        raise UserError(
            "--conf names a cgroup plugin, and this machine has control groups of version 2, for which the sandbox "
            "cannot make room; leave the cgroup plugins out"
        )
    if user_name() == str(os.geteuid()):
        raise UserError(
            f"user id {os.geteuid()} has no name on this machine, and Slurm's daemons need one; add it to /etc/passwd"
        )
    if request.slurm_root is not None:
        _check_slurm_root(request, request.slurm_root)
    programs = _needed_programs(request)
    missing = missing_programs(programs)
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        pronoun = "it" if len(missing) == 1 else "them"
        raise UserError(
            f"{' and '.join(missing)} {verb} not installed, and a sandbox needs {pronoun}; run as root: "
            f"apt-get install --no-install-recommends {' '.join(_PACKAGES[name] for name in _PACKAGES)}"
        )


def _needed_programs(request: Request) -> list[str]:
    """Return the programs of this machine that the sandbox needs."""
    if request.slurm_root is not None:
        return list(_ISOLATION_ONLY)
    return [name for name in _PACKAGES if request.isolated or name not in _ISOLATION_ONLY]


def _check_slurm_root(request: Request, slurm_root: Path) -> None:
    if not request.isolated:
        raise UserError(
            "--slurm is given and --hosts is shared, and only nodes with hosts of their own can have another root "
            "directory; use --hosts namespaces as root, or leave --slurm out"
        )
    roots.check(slurm_root)
    if not roots.is_shared(request.directory):
        raise UserError(
            f"--slurm is given, and the sandbox's directory {request.directory} is in a system directory, which is "
            "another one in that root; give another one with --dir"
        )


def _check_numbers(request: Request) -> None:
    limits = {
        "--nodes": (request.nodes, 1, MOST_NODES),
        "--cpus-per-node": (request.cpus_per_node, 1, _MOST_PER_NODE),
        "--gpus-per-node": (request.gpus_per_node, 0, _MOST_PER_NODE),
    }
    for option, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise UserError(f"{option} is {value}, and it must be from {least} to {most}; write for example {option} 4")


def _check_directory(directory: Path) -> None:
    if not _PLAIN_PATH.fullmatch(str(directory)):
        raise UserError(
            f"the sandbox's directory is {str(directory)!r}, and slurm.conf takes only letters, digits and ._+-/; "
            "give another one with --dir"
        )
    if len(str(directory)) > _LONGEST_DIRECTORY:
        raise UserError(
            f"the sandbox's directory {directory} has {len(str(directory))} characters, and with more than "
            f"{_LONGEST_DIRECTORY} the paths of its sockets get too long; give a shorter one with --dir"
        )
