"""``hpcddp doctor install --on-nodes``: a short job on several nodes, and what it shows.

Each node runs ``python -P -m hpcddp.doctor.install.nodes DIRECTORY``. It communicates with the login node through
srun's pipes, because the run root may not be shared. srun gives each line of the login node to all tasks. There is one
question, and an answer before and after it.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from hpcddp.doctor.install.machine import Finding, ask_torch, existing_part, torch_findings
from hpcddp.errors import HpcddpError
from hpcddp.jobfile.job import JobSpec
from hpcddp.packages import is_installed
from hpcddp.slurm import commands
from hpcddp.slurm.directives import directives_for
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.rank_env import own_host, own_rank
from hpcddp.task.rendezvous import interface_of, reachable_addresses
from hpcddp.version import __version__

# Directives of a batch script that srun does not know, or that the job of the examination sets itself.
_OTHERS: Final = frozenset(
    {
        "array", "error", "job-name", "no-requeue", "ntasks-per-node", "open-mode", "output", "requeue", "signal",
        "time",
    }
)  # fmt: skip
# Two minutes of walltime, as sbatch counts it.
_TIME_LIMIT: Final = "2"
# Of one answer of all nodes; the last one imports torch.
_ANSWER_TIMEOUT_S: Final = 115.0
_END_TIMEOUT_S: Final = 10.0
_NOTED_SKEW_S: Final = 1.0
_LARGEST_SKEW_S: Final = 30.0
_CONNECT_TIMEOUT_S: Final = 10.0
# In front of each answer; sites print lines of their own.
_MARK: Final = "hpcddp-doctor: "
# Each node writes a file of its own name.
_LOGIN_FILE: Final = ".login"


class NodesError(HpcddpError):
    """The job on the nodes gave no result."""

    kind = "doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the login node and the nodes have seen; the lists are in the order of the tasks.

    Args:
        hello: host, versions and addresses of each node, and what it saw in the run root.
        answers: the answer of each node to the question.
        sent: the time on the login node when it asked the question.
        seen: the files in the run root that the login node sees, each with the name of a node.
    """

    hello: Sequence[Mapping[str, Any]]
    answers: Sequence[Mapping[str, Any]]
    sent: float
    seen: Sequence[str]


def examine_nodes(
    spec: JobSpec, run_root: Path, *, python: str, environment: Mapping[str, str], wait_s: float
) -> Iterator[Finding]:
    """Run a job on the nodes and yield the findings.

    Args:
        spec: a job whose resources the job takes.
        run_root: the directory of all runs; it need not exist.
        python: the interpreter of the nodes.
        environment: the environment of srun.
        wait_s: seconds to wait for the nodes.
    """
    options = []
    for directive in directives_for(spec, run_id=None):
        if directive.flag in _OTHERS:
            continue
        option = f"--{directive.flag}"
        if directive.value is not None:
            option += f"={directive.value}"
        options.append(option)
    options += ["--ntasks-per-node=1", f"--time={_TIME_LIMIT}", "--job-name=hpcddp-doctor", "--kill-on-bad-exit=1"]
    try:
        directory = Path(tempfile.mkdtemp(prefix=".hpcddp-doctor-", dir=existing_part(run_root)))
    except OSError as error:
        yield Finding(name="nodes", verdict="error", found=f"no job was started: the run root: {error.strerror}")
        return
    try:
        words = [*options, python, "-P", "-u", "-m", "hpcddp.doctor.install.nodes", str(directory)]
        answers = _ask(words, directory, nodes=spec.node_counts[0], environment=environment, wait_s=wait_s)
    except HpcddpError as error:
        yield Finding(
            name="nodes",
            verdict="error",
            found=error.message,
            remedy=error.hint or "correct it, or give other resources, such as --set resources.partition=NAME",
        )
    else:
        yield from judge(answers, run_root)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _SrunPipes:
    """The pipes of srun: questions to all tasks, and the answers of each.

    Args:
        nodes: how many tasks answer.
    """

    def __init__(self, srun: subprocess.Popen[str], nodes: int) -> None:
        self._srun = srun
        self._nodes = nodes
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        streams = ((srun.stdout, None), (srun.stderr, self._errors))
        self._open = len(streams)
        for stream, lines in streams:
            threading.Thread(target=self._read, args=(stream, lines), daemon=True).start()

    def _read(self, stream: IO[str], lines: list[str] | None) -> None:
        for line in stream:
            if lines is None:
                self._lines.put(line)
            else:
                lines.append(line.strip())
        self._lines.put(None)

    def ask(self, question: object) -> None:
        """Send a question to all tasks."""
        stdin = self._srun.stdin
        try:
            if stdin is not None:
                stdin.write(f"{json.dumps(question)}\n")
                stdin.flush()
        except OSError:
            raise NodesError(self._last_output("the job on the nodes has ended")) from None

    def answers(self, timeout_s: float) -> list[Mapping[str, Any]]:
        """Return an answer of each task, in their order.

        Raises:
            NodesError: the job has ended, or not all have answered within the time.
        """
        answers: dict[int, Mapping[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self._nodes:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise NodesError(
                    self._last_output(f"{len(answers)} of {self._nodes} nodes have answered within {timeout_s:.0f} s"),
                    hint="if the nodes are busy, add --wait SECONDS; else try srun --nodes=2 hostname",
                ) from None
            if line is None:
                self._open -= 1
                # Both streams have ended, so that all errors are read.
                if not self._open:
                    raise NodesError(self._last_output("the job on the nodes has ended before its answers"))
            elif line.startswith(_MARK):
                answer = json.loads(line.removeprefix(_MARK))
                answers[answer["task"]] = answer
        return [answers[task] for task in sorted(answers)]

    def _last_output(self, what: str) -> str:
        """Return a sentence with the last output of srun."""
        last_lines = [line for line in self._errors if line][-3:]
        return f"{what}: {'; '.join(last_lines)}" if last_lines else what


def _ask(
    words: Sequence[str], directory: Path, *, nodes: int, environment: Mapping[str, str], wait_s: float
) -> Answers:
    """Start the job, ask its tasks, and end it.

    Raises:
        NodesError: it gave no result.
        SlurmMissingError: srun is not installed here.
    """
    (directory / _LOGIN_FILE).touch()
    srun = commands.start_srun(words, environment=environment)
    try:
        conversation = _SrunPipes(srun, nodes)
        hello = conversation.answers(wait_s)
        sent = time.time()
        conversation.ask(hello)
        answers = conversation.answers(_ANSWER_TIMEOUT_S)
        seen = [file.name for file in directory.iterdir()]
    finally:
        # At SIGTERM srun cancels a job that still waits, and ends one that runs.
        srun.terminate()
        try:
            srun.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            srun.kill()
            srun.wait()
    return Answers(hello=hello, answers=answers, sent=sent, seen=seen)


def judge(answers: Answers, run_root: Path) -> Iterator[Finding]:
    """Yield the findings about the nodes."""
    hosts = [node["host"] for node in answers.hello]
    yield Finding(name="nodes", verdict="ok", found=f"a job ran on {', '.join(hosts)}")
    yield _versions(answers)
    yield _shared(answers, hosts, run_root)
    yield from _network(answers, hosts)
    yield _clocks(answers, hosts)
    for host, node in zip(hosts, answers.answers, strict=True):
        if node["torch"] is not None:
            yield from torch_findings(node["torch"], where=f"{host}: ")
        else:
            yield Finding(
                name="torch",
                verdict="warning",
                found=f"{host}: torch is not installed",
                remedy="a training needs it: pip install 'hpcddp[train]'; a plain command does not",
            )


def _versions(answers: Answers) -> Finding:
    versions = {f"Python {node['python']}, hpcddp {node['hpcddp']}" for node in answers.hello}
    found = " and ".join(sorted(versions))
    if len(versions) == 1 and all(node["hpcddp"] == __version__ for node in answers.hello):
        return Finding(name="versions", verdict="ok", found=found)
    return Finding(
        name="versions",
        verdict="error",
        found=f"{found}, and hpcddp {__version__} here",
        remedy="install the same versions on all nodes and here",
    )


def _shared(answers: Answers, hosts: Sequence[str], run_root: Path) -> Finding:
    where = run_root.absolute()
    remedy = "set run_root in hpcddp.yaml or the profile to a directory that all nodes and the login node share"
    for host, node in zip(hosts, answers.hello, strict=True):
        sentence = None
        if not node["login_file"]:
            sentence = f"{host} cannot see the file that this machine wrote into {where}"
        elif node["refused"]:
            sentence = f"{host} cannot write in {where}: {node['refused']}"
        elif host not in answers.seen:
            sentence = f"this machine cannot see the file that {host} wrote into {where}"
        if sentence is not None:
            return Finding(name="run root", verdict="error", found=sentence, remedy=remedy)
    return Finding(name="run root", verdict="ok", found=f"{', '.join(hosts)} and this machine share {where}")


def _network(answers: Answers, hosts: Sequence[str]) -> Iterator[Finding]:
    for task, node in enumerate(answers.answers):
        peer_task = (task + 1) % len(hosts)
        peer = hosts[peer_task]
        if node["reached"] is None:
            addresses = ", ".join(answers.hello[peer_task]["addresses"]) or "no address"
            yield Finding(
                name="network",
                verdict="error",
                found=f"{hosts[task]} does not reach a free port of {peer} ({addresses})",
                remedy="the ranks of a job connect to any port above 1023: ask your site to open them between nodes",
            )
        else:
            through = f" through {node['interface']}" if node["interface"] else ""
            sentence = f"{hosts[task]} reaches a free port of {peer} at {node['reached']}{through}"
            yield Finding(name="network", verdict="ok", found=sentence)


def _clocks(answers: Answers, hosts: Sequence[str]) -> Finding:
    # The way of the question, some milliseconds, is part of the difference.
    clocks = {"this machine": answers.sent}
    for host, node in zip(hosts, answers.answers, strict=True):
        clocks[host] = node["clock"]
    early = min(clocks, key=clocks.__getitem__)
    late = max(clocks, key=clocks.__getitem__)
    skew = clocks[late] - clocks[early]
    if skew <= _NOTED_SKEW_S:
        return Finding(name="clocks", verdict="ok", found=f"at most {skew:.2f} s apart")
    return Finding(
        name="clocks",
        verdict="error" if skew > _LARGEST_SKEW_S else "warning",
        found=f"the clock of {late} is {skew:.1f} s ahead of that of {early}",
        remedy="the end of a job and the order of logs are wrong by as much: ask your site to synchronize the clocks",
    )


def main(directory: Path) -> int:
    """Answer the login node's question about this node.

    Args:
        directory: a directory in the run root, with a file of the login node.
    """
    task = own_rank(os.environ)
    host = own_host(os.environ)
    server = socket.create_server(("", 0), backlog=64)
    threading.Thread(target=_serve, args=(server, host), daemon=True).start()
    other_hosts = [name for name in expand(os.environ["SLURM_STEP_NODELIST"]) if name != host]
    refused = None
    try:
        (directory / host).touch()
    except OSError as error:
        refused = error.strerror
    _answer(
        task,
        host=host,
        python=platform.python_version(),
        hpcddp=__version__,
        addresses=reachable_addresses([host, socket.gethostname()], other_hosts, single_host=False),
        port=server.getsockname()[1],
        login_file=(directory / _LOGIN_FILE).is_file(),
        refused=refused,
    )
    tasks = json.loads(sys.stdin.readline())
    clock = time.time()
    reached = _reach(tasks[(task + 1) % len(tasks)])
    torch = ask_torch(sys.executable) if is_installed("torch") else None
    _answer(task, clock=clock, torch=torch, **reached)
    # The other node may still connect.
    sys.stdin.readline()
    return 0


def _answer(task: int, **facts: object) -> None:
    sys.stdout.write(f"{_MARK}{json.dumps({'task': task, **facts})}\n")
    sys.stdout.flush()


def _serve(server: socket.socket, host: str) -> None:
    """Send this node's name to each process that connects."""
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(host.encode())


def _reach(peer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the address by which this node reaches another one, and the interface that leads there."""
    for address in peer["addresses"]:
        try:
            with socket.create_connection((address, peer["port"]), timeout=_CONNECT_TIMEOUT_S) as connection:
                connection.settimeout(_CONNECT_TIMEOUT_S)
                if connection.recv(256).decode(errors="replace") == peer["host"]:
                    return {"reached": address, "interface": interface_of(connection.getsockname()[0])}
        except OSError:
            continue
    return {"reached": None, "interface": None}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
