"""The sandbox that a user requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Hosts(StrEnum):
    """Whether each node has network and host name of its own."""

    NAMESPACES = "namespaces"
    SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The sandbox that a user requests.

    Attributes:
        directory: absolute path of its files: absent, empty, or left by a sandbox that has ended.
        hosts: whether each node is a host of its own, or all share this one.
        nodes: number of nodes.
        cpus_per_node: processors that each claims.
        gpus_per_node: GPUs that each claims.
        overrides: settings of slurm.conf.
        slurm_root: the root directory of another Slurm, without symbolic links; None for this machine's Slurm.
    """

    directory: Path
    hosts: Hosts
    nodes: int
    cpus_per_node: int
    gpus_per_node: int
    overrides: Mapping[str, str] = field(default_factory=dict)
    slurm_root: Path | None = None

    @property
    def isolated(self) -> bool:
        """Whether the nodes are hosts of their own."""
        return self.hosts is Hosts.NAMESPACES

    @property
    def uses_cgroups(self) -> bool:
        """Whether Slurm is to make control groups."""
        return any("cgroup" in value for value in self.overrides.values())


def default_directory(environment: Mapping[str, str]) -> Path:
    """Return the directory of a user's sandbox (XDG Base Directory Specification)."""
    states = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME", "/")) / ".local" / "state"
    return Path(states) / "hpcddp" / "sandbox"


def default_hosts() -> Hosts:
    """Return ``namespaces`` for root, ``shared`` for every other user."""
    return Hosts.NAMESPACES if os.geteuid() == 0 else Hosts.SHARED
