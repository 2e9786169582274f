"""Start the ranks of a comparison as processes, and read their reports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpcddp.batch.split import divide
from hpcddp.doctor.errors import ComparisonError
from hpcddp.slurm.rank_env import RankEnv

Report = Mapping[str, Any]

_POLL_S: Final = 0.05
# How long the others may continue after one rank has failed; they may be about to report the cause.
_GRACE_S: Final = 5.0
_HOST: Final = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Settings of the processes of a comparison.

    Args:
        python: path of the interpreter.
        directory: the working directory, and the first entry of ``sys.path``.
        environment: environment variables of the processes.
        scratch: a directory for this comparison only.
        steps: K, optimizer steps to make.
        timeout_s: timeout for a group of ranks, in seconds.
        nodes: number of nodes in the ranks' environment, with at least one rank on each.
    """

    python: str
    directory: Path
    environment: Mapping[str, str]
    scratch: Path
    steps: int
    timeout_s: float
    nodes: int = 1


def run_ranks(place: Place, name: str, document: str, world_size: int) -> list[Report]:
    """Run ``world_size`` ranks to their end and return their reports; a failed rank reports its ``error``.

    Args:
        place: settings of the processes.
        name: name of this group of ranks, one word.
        document: the resolved job.
        world_size: number of ranks.

    Raises:
        ComparisonError: the ranks took too long, or cannot be started.
    """
    folder = place.scratch / name
    folder.mkdir()
    (folder / "job.yaml").write_text(document, encoding="utf-8")
    processes: list[subprocess.Popen[bytes]] = []
    port = _free_port()
    try:
        with contextlib.ExitStack() as started:
            for env in rank_envs(world_size, min(place.nodes, world_size)):
                process = _start(place, folder, env, port)
                started.callback(_end, process)
                processes.append(process)
            in_time = _wait(processes, place.timeout_s)
    except OSError as error:
        raise ComparisonError(f"the interpreter {place.python} cannot be started ({error})") from error
    if not in_time:
        slow = "one process" if world_size == 1 else f"{world_size} ranks"
        raise ComparisonError(
            f"{slow} took longer than {place.timeout_s:g} s; raise --timeout, or see whether ranks wait for each "
            "other in collectives of the model's own that not all of them enter"
        )
    return [_report(folder, rank, process.returncode) for rank, process in enumerate(processes)]


def rank_envs(world_size: int, nodes: int) -> Iterator[RankEnv]:
    """Yield the environment of each rank: a task of a Slurm job whose tasks are divided evenly over the nodes.

    Args:
        world_size: number of ranks.
        nodes: 1 to ``world_size``.
    """
    tasks_per_node = divide(world_size, nodes)
    places = [(node, local) for node, tasks in enumerate(tasks_per_node) for local in range(tasks)]
    for rank, (node_rank, local_rank) in enumerate(places):
        yield RankEnv(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=tasks_per_node[node_rank],
            node_rank=node_rank,
            nodes=nodes,
            hosts=(_HOST,) * nodes,
            tasks_per_node=tasks_per_node,
            job_id="1",
            source="slurm",
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _start(place: Place, folder: Path, env: RankEnv, port: int) -> subprocess.Popen[bytes]:
    command = [place.python, "-P", "-m", "hpcddp.doctor.ddp.rank", str(folder), str(env.rank), str(env.world_size)]
    command += [str(place.steps), str(place.directory), str(place.timeout_s)]
    # A model or a data set may read its rank from the environment, as in a training.
    variables = {**place.environment, **env.slurm_exports(), **env.exports(_HOST, port)}
    with (folder / f"rank-{env.rank}.log").open("wb") as log:
        # In a new session, so that processes of the user's code are killed with it.
        return subprocess.Popen(
            command,
            cwd=place.directory,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Wait for all ranks, or until shortly after the first failure; return False after a timeout."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            return failed
        time.sleep(_POLL_S)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _report(folder: Path, rank: int, code: int) -> Report:
    path = folder / f"rank-{rank}.json"
    if path.exists():
        report: Report = json.loads(path.read_text(encoding="utf-8"))
        return report
    lines = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = lines[-1] if lines else "it said nothing"
    message = f"rank {rank} ended with code {code} before it could report ({said})"
    # The infinite time puts ranks that were killed because of another rank last.
    return {"rank": rank, "error": {"kind": "ended", "message": message, "time": float("inf")}}
