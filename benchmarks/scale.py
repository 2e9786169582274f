"""Measure what grows with the number of ranks.

    python -m benchmarks.scale [--ranks 8 2048 10240] [--clients 4] [--output FILE]

``submission`` is the time to plan, render and expand the host list of a job of the most ranks, and of the batch of one
of its ranks in an epoch of 1e10 samples. ``file_operations`` counts the system calls that take a path, of a training
with one rank, and of each rank more (needs strace): in the run directory, and for the imports of Python.

``rendezvous`` is that at rank 0, alone and while strangers connect to its port. Processes on this machine speak the
exchange of the ranks (``hpcddp.task.exchange``), each for many of them, with the real listener of rank 0: for each
number of ranks and each kind of stranger the seconds until all ranks have been accepted and have the reply, rank 0's
CPU time and memory, and the time of one rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, TypeVar

from hpcddp.api import request_to_submit
from hpcddp.batch.job import plan_job
from hpcddp.batch.plan import plan_batch
from hpcddp.batch.sampler import GlobalBatches, share_of
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.submission.render import render_script
from hpcddp.task.exchange import ExchangeClient, ExchangeServer
from tests.task.strangers import STRANGERS

_TIMEOUT_S: Final = 300.0
_FLOODING_PROCESSES: Final = 2
# What a rank says of itself has about this size.
_HELLO_BYTES: Final = 300
T = TypeVar("T")
_CONTEXT: Final = multiprocessing.get_context("fork")


def measure(ranks: int, clients: int, stranger: str | None) -> dict[str, Any]:
    """Let ranks meet once.

    Args:
        ranks: W.
        clients: processes that speak for the W - 1 other ranks.
        stranger: the kind of the strangers; None is without any.
    """
    key = secrets.token_bytes(32)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
        port = int(listener.getsockname()[1])
        for _ in range(_FLOODING_PROCESSES if stranger else 0):
            stack.enter_context(_process(STRANGERS[str(stranger)], port, _CONTEXT.Event()))
        answers = []
        server = stack.enter_context(ExchangeServer(listener, key, expected=ranks - 1, rank_of=_rank_of))
        began, cpu_began = time.monotonic(), time.process_time()
        for number in range(clients):
            answer, sender = _CONTEXT.Pipe(duplex=False)
            answers.append(answer)
            stack.enter_context(_process(_be_ranks, port, key, range(1 + number, ranks, clients), sender))
        met = server.gather(deadline=began + _TIMEOUT_S, watch=lambda: None)
        met_s = time.monotonic() - began
        server.send_reply(b'{"port": 20000}')
        told_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_began
        times_s = [time_s for answer in answers for time_s in answer.recv()]
    return {
        "ranks": ranks,
        "strangers": stranger,
        "met": len(met) + 1,
        "met_s": round(met_s, 3),
        "told_s": round(told_s, 3),
        "cpu_of_rank_0_s": round(cpu_s, 3),
        "most_memory_of_rank_0_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rank_median_ms": round(1e3 * statistics.median(times_s), 3),
        "rank_most_ms": round(1e3 * max(times_s), 1),
    }


def _rank_of(hello: bytes) -> int:
    return int(hello.split()[0])


def _be_ranks(port: int, key: bytes, ranks: Sequence[int], sender: Connection) -> None:
    """Meet rank 0 as several ranks, one after the other, and send how long each of them took."""
    times_s, connections = [], []
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    for rank in ranks:
        began = time.monotonic()
        hello = f"{rank} ".encode().ljust(_HELLO_BYTES)
        connections.append(ExchangeClient("127.0.0.1", port, key, hello, deadline=began + _TIMEOUT_S))
        times_s.append(time.monotonic() - began)
    for connection in connections:
        connection.reply(deadline=time.monotonic() + _TIMEOUT_S)
    sender.send(times_s)


@contextmanager
def _process(target: Any, *arguments: Any) -> Iterator[BaseProcess]:  # noqa: ANN401  functions of several types
    process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def submission(ranks: int) -> dict[str, float]:
    """Return the milliseconds that each part of a submission to nodes of 8 GPUs takes, and the batch of a rank."""
    nodes = ranks // 8
    document = {
        "name": "large",
        "resources": {"nodes": nodes, "gpus_per_node": 8},
        "batch": {"global_batch_size": 4 * ranks + 1},
        "train": {"model": "resnet50", "dataset": "imagefolder", "data_dir": "/data"},
    }
    hosts = f"n[{1:05}-{nodes:05}]"
    variables = {
        "SLURM_PROCID": str(ranks - 1), "SLURM_LOCALID": "7", "SLURM_NTASKS": str(ranks),
        "SLURM_NODEID": str(nodes - 1),
        "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": hosts, "SLURM_JOB_NODELIST": hosts, "SLURM_STEP_TASKS_PER_NODE": f"8(x{nodes})",
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0",
    }  # fmt: skip
    times: dict[str, float] = {}

    def timed(name: str, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        value = call()
        times[f"{name}_ms"] = round((time.perf_counter() - began) * 1e3, 2)
        return value

    spec = timed("validate", lambda: JobSpec.model_validate(document))
    timed("plan", lambda: plan_job(spec, samples=1_281_167))
    job = ResolvedJob(spec=spec, origins={})
    timed("script", lambda: render_script(request_to_submit(job, run_id="r1", environment={})))
    timed("host_list", lambda: expand(hosts))
    timed("rank_environment", lambda: RankEnv.from_env(variables))
    plan = plan_batch(global_batch_size=4 * ranks + 1, world_size=ranks, samples=10**10)

    def batch_of_last_rank() -> object:
        batches = GlobalBatches(10**10, 4 * ranks + 1, "keep", "keyed", 0)
        return share_of(plan, batches.indices(0, batches.steps_per_epoch // 2), ranks - 1)

    timed("batch_of_1e10_samples", batch_of_last_rank)
    return times


_COUNTED_JOB: Final = """\
name: count
batch: {global_batch_size: 32}
train:
  model: benchmarks.step:build
  model_args: {name: mlp}
  num_classes: 10
  dataset: benchmarks.step:samples
  dataset_args: {model: mlp}
trackers: {use: []}
"""


def file_operations() -> dict[str, dict[str, int]]:
    """Return the counts of a training with one rank, and of each rank more."""
    one, three = _count_operations(1), _count_operations(3)
    return {"one_rank": one, "each_rank_more": {where: (three[where] - one[where]) // 2 for where in one}}


def _count_operations(ranks: int) -> dict[str, int]:
    """Count the system calls that take a path, over all processes of a training on this machine."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "job.yaml").write_text(_COUNTED_JOB)
        words = [
            "strace",
            "-ff",
            "-e",
            "trace=%file",
            "-o",
            "calls",
            sys.executable,
            "-m",
            "hpcddp",
            "submit",
            "job.yaml",
        ]
        words += ["--cluster", "local", "--quiet", "--set", f"resources.tasks_per_node={ranks}"]
        environment = {**os.environ, "STEPS": "20", "PYTHONPATH": str(Path(__file__).parents[1])}
        # strace ends with the last of the processes.
        subprocess.run(words, cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = [line for path in directory.glob("calls.*") for line in path.read_text(errors="replace").splitlines()]
        in_run = sum(f"{name}/runs/" in line for line in lines)
        return {"run_directory": in_run, "imports": sum(".py" in line or "site-packages" in line for line in lines)}


def main() -> None:
    """Measure, and print the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 2048, 10240])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "submission": {"ranks": max(options.ranks), **submission(max(options.ranks))},
        "file_operations": file_operations() if shutil.which("strace") else None,
        "rendezvous": [
            measure(ranks, min(options.clients, ranks - 1), stranger)
            for ranks in options.ranks
            for stranger in (None, *STRANGERS)
        ],
    }
    text = json.dumps(document, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
