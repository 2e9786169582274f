"""Rank, world size, hosts and job of a process, from the variables of srun, of submitit or of torchrun."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Self

from hpcddp.errors import HpcddpError
from hpcddp.slurm.hostlist import HostListError, expand
from hpcddp.stop.reasons import ExitCode

Source = Literal["slurm", "submitit", "torchrun"]

# Digits: enough for any number of Slurm.
_LONGEST_NUMBER = 9
_TASKS = re.compile(r"(?P<tasks>[0-9]{1,9})(?:\(x(?P<nodes>[0-9]{1,9})\))?", re.ASCII)


def own_host(environment: Mapping[str, str]) -> str:
    """Return the name of this host in Slurm, or its host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def own_rank(environment: Mapping[str, str]) -> int:
    """Return the rank for a record, even if the rank environment as a whole is wrong; 0 if no rank is given."""
    names = ("SUBMITIT_LOCAL_GLOBALID", "SLURM_PROCID", "RANK")
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), 0)


def own_job_id(environment: Mapping[str, str]) -> str | None:
    """Return Slurm's id of this job, ``123`` or ``123_4`` for an array element; None outside of a job."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    index = environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environment.get("SLURM_JOB_ID")


class RankEnvError(HpcddpError):
    """The environment does not give the rank of this process, or contradicts itself."""

    kind = "rank_environment"
    exit_code = ExitCode.INFRASTRUCTURE


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """The rank of a process and its place in the job. The numbers are checked against each other.

    Args:
        rank: 0 to world_size - 1.
        local_rank: 0 to local_world_size - 1, on this node.
        world_size: ranks in the job.
        local_world_size: ranks on this node.
        node_rank: 0 to nodes - 1.
        nodes: nodes of the step.
        hosts: the name of each node; empty if the source does not set them.
        tasks_per_node: the number of ranks on each node; empty if the source does not set them.
        consecutive: whether ranks are numbered node by node; true unless another distribution was requested.
        job_id: Slurm's job id (``123``, ``123_4`` for an array element) or submitit's; None without one.
        restart_count: how often the job was requeued.
        source: what started this process.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    nodes: int
    hosts: tuple[str, ...] = ()
    tasks_per_node: tuple[int, ...] = ()
    consecutive: bool = True
    job_id: str | None = None
    restart_count: int = 0
    source: Source

    def __post_init__(self) -> None:
        self._check_below("node rank", self.node_rank, "number of nodes", self.nodes)
        self._check_below("rank", self.rank, "world size", self.world_size)
        self._check_below("local rank", self.local_rank, "number of ranks on this node", self.local_world_size)
        if self.local_world_size > self.world_size - (self.nodes - 1):
            raise RankEnvError(
                f"{self.local_world_size} ranks on this node and at least one on each of the other {self.nodes - 1} "
                f"are more than the world size {self.world_size}"
            )
        if self.hosts and len(self.hosts) != self.nodes:
            raise RankEnvError(f"{len(self.hosts)} host names ({', '.join(self.hosts)}) stand for {self.nodes} nodes")
        if self.tasks_per_node:
            self._check_tasks()

    def _check_below(self, name: str, value: int, limit_name: str, limit: int) -> None:
        if value >= limit:
            raise RankEnvError(f"the {name} is {value}, which must be below the {limit_name}, {limit}")

    def _check_tasks(self) -> None:
        if len(self.tasks_per_node) != self.nodes or sum(self.tasks_per_node) != self.world_size:
            raise RankEnvError(
                f"the tasks per node {self.tasks_per_node} are not {self.world_size} tasks on {self.nodes} nodes"
            )
        first = sum(self.tasks_per_node[: self.node_rank])
        if self.consecutive and self.rank != first + self.local_rank:
            raise RankEnvError(
                f"rank {self.rank} is local rank {self.local_rank} of node {self.node_rank}, "
                f"but the first rank of that node is {first}"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Read the environment of a task.

        The innermost source takes precedence: torchrun, then submitit's local executor, then srun.

        Raises:
            RankEnvError: no source is recognised, or a variable is missing, is not a number, or contradicts another.
        """
        if "TORCHELASTIC_RUN_ID" in env:
            return cls._from_torchrun(_Variables(env))
        if "SUBMITIT_LOCAL_GLOBALID" in env:
            return cls._from_submitit(_Variables(env))
        if "SLURM_STEP_NUM_TASKS" in env:
            return cls._from_slurm(_Variables(env))
        if "SLURM_JOB_ID" in env:
            raise RankEnvError(
                "this process runs inside Slurm job "
                f"{env['SLURM_JOB_ID']} but srun did not start it (SLURM_STEP_NUM_TASKS is not set); start it with srun"
            )
        raise RankEnvError(
            "nothing in the environment says which rank this process is; start it with srun, torchrun, or hpcddp submit"
        )

    @classmethod
    def _from_slurm(cls, variables: _Variables) -> Self:
        nodes = variables.count("SLURM_STEP_NUM_NODES")
        node_rank = variables.number("SLURM_NODEID")
        tasks = variables.tasks_per_node("SLURM_STEP_TASKS_PER_NODE", nodes)
        distribution, _, _ = variables.text("SLURM_DISTRIBUTION", "block").partition(":")
        return cls(
            rank=variables.number("SLURM_PROCID"),
            local_rank=variables.number("SLURM_LOCALID"),
            world_size=variables.count("SLURM_STEP_NUM_TASKS"),
            local_world_size=tasks[node_rank] if node_rank < nodes else 0,
            node_rank=node_rank,
            nodes=nodes,
            hosts=variables.hosts("SLURM_STEP_NODELIST"),
            tasks_per_node=tasks,
            consecutive=max(tasks) == 1 or distribution in {"block", ""},
            job_id=own_job_id(variables.env),
            restart_count=variables.number("SLURM_RESTART_COUNT", 0),
            source="slurm",
        )

    @classmethod
    def _from_submitit(cls, variables: _Variables) -> Self:
        nodes = variables.count("SUBMITIT_LOCAL_JOB_NUM_NODES")
        if nodes != 1:
            raise RankEnvError(f"SUBMITIT_LOCAL_JOB_NUM_NODES is {nodes}, but submitit's local executor has one node")
        tasks = variables.count("SUBMITIT_LOCAL_NTASKS")
        return cls(
            rank=variables.number("SUBMITIT_LOCAL_GLOBALID"),
            local_rank=variables.number("SUBMITIT_LOCAL_LOCALID"),
            world_size=tasks,
            local_world_size=tasks,
            node_rank=variables.number("SUBMITIT_LOCAL_NODEID"),
            nodes=nodes,
            tasks_per_node=(tasks,),
            job_id=variables.text("SUBMITIT_LOCAL_JOB_ID"),
            source="submitit",
        )

    @classmethod
    def _from_torchrun(cls, variables: _Variables) -> Self:
        nodes = variables.count("GROUP_WORLD_SIZE")
        return cls(
            rank=variables.number("RANK"),
            local_rank=variables.number("LOCAL_RANK"),
            world_size=variables.count("WORLD_SIZE"),
            local_world_size=variables.count("LOCAL_WORLD_SIZE"),
            node_rank=variables.number("GROUP_RANK"),
            nodes=nodes,
            job_id=own_job_id(variables.env),
            restart_count=variables.number("TORCHELASTIC_RESTART_COUNT", 0),
            source="torchrun",
        )

    def host_of(self, rank: int) -> str | None:
        """Return the name of the host that ``rank`` runs on; None if the environment does not give it."""
        if not self.hosts:
            return None
        if rank == self.rank:
            return self.hosts[self.node_rank]
        if rank == 0:
            return self.hosts[0]
        if not (self.consecutive and self.tasks_per_node):
            return None
        # On each node, the ranks below this number are on it or on a node before it.
        ends = accumulate(self.tasks_per_node)
        for host, end in zip(self.hosts, ends, strict=True):
            if rank < end:
                return host
        return None

    def exports(self, master_addr: str, master_port: int) -> dict[str, str]:
        """Return the variables of PyTorch's env:// rendezvous.

        Args:
            master_addr: rank 0's host, as this rank reaches it.
            master_port: the port that rank 0 listens on.
        """
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
        }

    def slurm_exports(self) -> dict[str, str]:
        """Return the variables that srun sets for this rank (srun(1), OUTPUT ENVIRONMENT VARIABLES).

        ``from_env`` returns an equal value for them. The job id, host names and tasks per node must be known.
        """
        tasks_per_node = ",".join(map(str, self.tasks_per_node))
        return {
            "SLURM_JOB_ID": str(self.job_id),
            "SLURM_PROCID": str(self.rank),
            "SLURM_LOCALID": str(self.local_rank),
            "SLURM_NODEID": str(self.node_rank),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(self.world_size)),
            **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), str(self.nodes)),
            "SLURM_NTASKS_PER_NODE": str(max(self.tasks_per_node)),
            **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), tasks_per_node),
            **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), ",".join(self.hosts)),
        }


class _Variables:
    """Reads single variables; an error names the variable."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env

    def text(self, name: str, default: str | None = None) -> str:
        value = self.env.get(name, default)
        if value is None:
            raise RankEnvError(
                f"{name} is not set although the variables around it are; what starts the ranks should set it"
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        text = self.text(name, None if default is None else str(default))
        if not (text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER):
            raise RankEnvError(f"{name} is {text!r}, which is no number of 0 or more")
        return int(text)

    def count(self, name: str) -> int:
        number = self.number(name)
        if number == 0:
            raise RankEnvError(f"{name} is 0, and there is at least one")
        return number

    def hosts(self, name: str) -> tuple[str, ...]:
        try:
            return tuple(expand(self.text(name)))
        except HostListError as error:
            raise RankEnvError(f"{name}: {error.message}") from None

    def tasks_per_node(self, name: str, nodes: int) -> tuple[int, ...]:
        """Read ``2(x3),1``: two tasks on each of three nodes, one on the fourth (srun(1), OUTPUT ENVIRONMENT)."""
        text = self.text(name)
        items = [_TASKS.fullmatch(item) for item in text.split(",")]
        groups = [(int(item["tasks"]), int(item["nodes"] or 1)) for item in items if item is not None]
        if None in items or sum(count for _, count in groups) != nodes:
            raise RankEnvError(f"{name} is {text!r}, which does not give one number of tasks to each of {nodes} nodes")
        return tuple(tasks for tasks, count in groups for _ in range(count))
