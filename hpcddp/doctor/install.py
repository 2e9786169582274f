"""``hpcddp doctor install``: this machine, and with ``--on-nodes`` a short job on several nodes.

The checks of this machine are of its interpreter, torch, Slurm, run root and file system. Each node runs
``python -P -m hpcddp.doctor.install DIRECTORY``. It communicates with the login node through srun's pipes, because the
run root may not be shared. srun gives each line of the login node to all tasks. There is one question, and an answer
before and after it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Final, Literal

from hpcddp.errors import HpcddpError, counted
from hpcddp.jobfile.job import JobSpec
from hpcddp.packages import is_installed, missing_packages
from hpcddp.slurm import commands
from hpcddp.slurm.controller import OLDEST, version_of, visible_differences
from hpcddp.slurm.directives import directives_for
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.rank_env import own_host, own_rank
from hpcddp.task.rendezvous import interface_of, reachable_addresses
from hpcddp.vendors import VENDORS, vendor_here, vendor_of_torch
from hpcddp.version import __version__

Verdict = Literal["ok", "warning", "error"]

_TORCH_TIMEOUT_S: Final = 90.0
# The first import from a network file system takes minutes at worst; the answer is the last line.
_ASK_TORCH: Final = """\
import json, torch
from torch import cuda, version
found = {"torch": str(torch.__version__), "cuda": version.cuda, "hip": version.hip, "nccl": None}
found["gpus"] = cuda.device_count()
try:
    from torch.cuda import nccl
    found["nccl"] = ".".join(map(str, nccl.version())) if version.cuda or version.hip else None
except Exception:
    pass
print(json.dumps(found))
"""
# File systems that belong to one machine (mount(8)).
_LOCAL: Final = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Args:
        verdict: an error keeps runs from working; a warning may.
        remedy: what to do about it; None if there is nothing to do.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str | None = None

    def __str__(self) -> str:
        sentence = f"{self.verdict:<8} {self.name:<12} {self.found}"
        return f"{sentence}; {self.remedy}" if self.remedy else sentence


def examine_machine(run_root: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about this machine.

    Args:
        run_root: the directory of all runs; it need not exist.
        environment: the environment of Slurm's commands.
    """
    yield Finding(
        name="python",
        verdict="ok",
        found=f"Python {platform.python_version()}, {sys.executable}, hpcddp {__version__}",
    )
    if not is_installed("torch"):
        yield Finding(
            name="torch",
            verdict="warning",
            found=missing_packages("a training", ["torch"], sys.executable),
            remedy="a plain command needs no torch here",
        )
    else:
        yield torch_finding(ask_torch(sys.executable))
    yield _slurm(environment)
    yield _run_root(run_root)


def ask_torch(python: str) -> dict[str, Any]:
    """Return what torch says in a process of its own, or ``error``, a text.

    torch says ``torch``, ``cuda``, ``hip`` and ``nccl`` (versions) and ``gpus`` (their number). Beside them stand the
    ``vendor`` of the GPUs that this process may use, or None, and the ``way_out`` if torch sees none of them.
    """
    try:
        done = subprocess.run(
            [python, "-P", "-c", _ASK_TORCH],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_TIMEOUT_S,
            check=False,
        )
        answer = json.loads(_last_line(done.stdout))
    except subprocess.TimeoutExpired:
        return {"error": f"import torch took more than {_TORCH_TIMEOUT_S:.0f} s"}
    except OSError as error:
        return {"error": f"{python} cannot be started: {error.strerror}"}
    except ValueError:
        return {"error": f"import torch failed: {_last_line(done.stderr) or 'it said nothing'}"}
    vendor = vendor_here()
    if vendor is None or ("SLURM_JOB_ID" in os.environ and not any(vendor.hiding(os.environ))):
        # A job that has asked for GPUs has such a variable.
        return {**answer, "vendor": None}
    return {**answer, "vendor": vendor.name, "way_out": vendor.explain_no_gpu(os.environ)}


def _last_line(output: str) -> str:
    """Return the last line that is not blank; empty if there is none."""
    lines = output.strip().splitlines()
    return lines[-1].strip() if lines else ""


def torch_finding(answer: Mapping[str, Any], *, where: str = "") -> Finding:
    """Return the finding about torch and its GPUs.

    Args:
        answer: what ``ask_torch`` returned.
        where: in front of what was found, such as ``n1: ``.
    """
    verdict: Verdict = "error"
    if "error" in answer:
        found = answer["error"]
        remedy: str | None = "install torch again as pytorch.org describes for this machine"
    else:
        vendor = vendor_of_torch(answer)
        found = f"torch {answer['torch']}, built for CPUs only"
        if vendor is not None:
            version = f"{vendor.version_name.upper()} {answer[vendor.version_name]}"
            gpus = counted(answer["gpus"], f"{vendor.name} GPU")
            found = f"torch {answer['torch']}, {version}, {vendor.collectives} {answer['nccl']}, {gpus} here"
        oldest = _oldest_torch()
        if oldest is not None and _release(answer["torch"]) < oldest:
            remedy = f"hpcddp needs {'.'.join(map(str, oldest))} or later"
        elif vendor is None or answer["vendor"] not in {None, vendor.name}:
            verdict = "warning"
            builds = [f"{row.platform} ({row.name})" for row in VENDORS if answer["vendor"] in {None, row.name}]
            remedy = f"for GPUs install pytorch.org's or your site's build for {' or '.join(builds)}"
        elif answer["nccl"] is None:
            found = f"torch {answer['torch']}, built without {vendor.collectives}"
            remedy = "several GPUs need it: install the build of pytorch.org"
        elif answer["vendor"] is not None and not answer["gpus"]:
            verdict = "warning"
            remedy = answer["way_out"]
        else:
            verdict = "ok"
            remedy = None
    return Finding(name="torch", verdict=verdict, found=f"{where}{found}", remedy=remedy)


def _oldest_torch() -> tuple[int, ...] | None:
    """Return the lower bound of torch in the metadata of hpcddp; None where hpcddp is not installed as a package."""
    try:
        requirements = metadata.requires("hpcddp") or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        bound = re.match(r"torch\s*>=\s*([0-9.]+)", requirement)
        if bound is not None:
            return _release(bound[1])
    return None


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor version; a pre-release counts as its release."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", version)[:2])


def _slurm(environment: Mapping[str, str]) -> Finding:
    try:
        version = commands.ask("sinfo", "--version", environment=environment).strip().rpartition(" ")[2]
    except commands.SlurmMissingError:
        return _no_slurm("sinfo was not found")
    except commands.SlurmCommandError as error:
        if commands.NO_CONFIGURATION in error.message:
            return _no_slurm("Slurm's commands find no slurm.conf")
        return Finding(name="slurm", verdict="error", found=error.message, remedy="ask your site")
    if not commands.controller_answers(environment):
        return Finding(
            name="slurm",
            verdict="error",
            found=f"Slurm {version}, whose controller does not answer",
            remedy="try scontrol ping; jobs cannot be submitted until it answers",
        )
    differences = "; ".join([f"Slurm {version}", *visible_differences(version)])
    if version_of(version) < version_of(OLDEST):
        remedy = f"hpcddp needs Slurm {OLDEST} or later"
        return Finding(name="slurm", verdict="warning", found=differences, remedy=remedy)
    return Finding(name="slurm", verdict="ok", found=differences)


def _no_slurm(reason: str) -> Finding:
    return Finding(
        name="slurm",
        verdict="warning",
        found=f"no Slurm here: {reason}",
        remedy="run this on a login node; without Slurm, hpcddp submit --cluster local works",
    )


def _run_root(run_root: Path) -> Finding:
    directory = existing_part(run_root)
    kind = file_system(directory)
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return Finding(
            name="run root",
            verdict="error",
            found=f"{run_root.absolute()} cannot be written ({error.strerror})",
            remedy="write another run_root into hpcddp.yaml or the profile",
        )
    found = f"{run_root.absolute()} is on {kind}"
    if kind in _LOCAL:
        return Finding(
            name="run root",
            verdict="warning",
            found=f"{found}, which one machine usually has for itself",
            remedy="hpcddp doctor install --on-nodes shows whether the nodes see it",
        )
    return Finding(name="run root", verdict="ok", found=found)


def existing_part(path: Path) -> Path:
    """Return the path, or the nearest directory above it that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def file_system(path: Path, table: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that holds a path, such as ``nfs4`` (proc(5), mountinfo)."""
    longest = ""
    kind = "an unknown file system"
    resolved = f"{path.resolve()}/"
    for line in table.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        mount, _, after = line.partition(" - ")
        # Blanks in a path are written as \040.
        mount_point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split()[4])
        # A later line covers an earlier one.
        if resolved.startswith(f"{mount_point.rstrip('/')}/") and len(mount_point) >= len(longest):
            longest = mount_point
            kind = after.split()[0]
    return kind


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
    words = []
    for directive in directives_for(spec, run_id=None):
        if directive.flag in _OTHERS:
            continue
        option = f"--{directive.flag}"
        if directive.value is not None:
            option += f"={directive.value}"
        words.append(option)
    words += ["--ntasks-per-node=1", f"--time={_TIME_LIMIT}", "--job-name=hpcddp-doctor", "--kill-on-bad-exit=1"]
    try:
        directory = Path(tempfile.mkdtemp(prefix=".hpcddp-doctor-", dir=existing_part(run_root)))
    except OSError as error:
        yield Finding(name="nodes", verdict="error", found=f"no job was started: the run root: {error.strerror}")
        return
    words += [python, "-P", "-u", "-m", "hpcddp.doctor.install", str(directory)]
    try:
        nodes, asked_at = _ask_nodes(
            words, directory, count=spec.node_counts[0], environment=environment, wait_s=wait_s
        )
    except HpcddpError as error:
        yield Finding(
            name="nodes",
            verdict="error",
            found=error.message,
            remedy=error.hint or "correct it, or give other resources, such as --set resources.partition=NAME",
        )
    else:
        yield from judge(nodes, run_root, asked_at=asked_at)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _ask_nodes(
    words: Sequence[str], directory: Path, *, count: int, environment: Mapping[str, str], wait_s: float
) -> tuple[list[dict[str, Any]], float]:
    """Start the job, ask its tasks, and end it; return their answers in their order, and when they were asked.

    Raises:
        NodesError: it gave no result.
        SlurmMissingError: srun is not installed here.
    """
    (directory / _LOGIN_FILE).touch()
    with tempfile.TemporaryFile("w+") as errors:
        srun = commands.start_srun(words, environment=environment, errors=errors)
        try:
            nodes = _answers(srun, errors, count, wait_s)
            asked_at = time.time()
            assert srun.stdin is not None  # noqa: S101  a pipe
            with suppress(OSError):
                srun.stdin.write(f"{json.dumps(nodes)}\n")
                srun.stdin.flush()
            for node, answer in zip(nodes, _answers(srun, errors, count, _ANSWER_TIMEOUT_S), strict=True):
                # Whether this machine sees the file that the node has written.
                node.update(answer, is_seen=(directory / node["host"]).exists())
        finally:
            # At SIGTERM srun cancels a job that still waits, and ends one that runs.
            srun.terminate()
            try:
                srun.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                srun.kill()
                srun.wait()
    return nodes, asked_at


def _answers(srun: subprocess.Popen[str], errors: IO[str], count: int, timeout_s: float) -> list[dict[str, Any]]:
    """Return an answer of each task, in their order.

    Args:
        errors: what srun prints besides.

    Raises:
        NodesError: the job has ended, or not all have answered within the time.
    """
    answers: dict[int, dict[str, Any]] = {}
    timer = threading.Timer(timeout_s, srun.terminate)
    timer.start()
    try:
        for line in srun.stdout or ():
            if line.startswith(_MARK):
                answer = json.loads(line.removeprefix(_MARK))
                answers[answer["task"]] = answer
            if len(answers) == count:
                return [answers[task] for task in sorted(answers)]
    finally:
        timer.cancel()
    errors.seek(0)
    last_lines = [line.strip() for line in errors if line.strip()][-3:]
    raise NodesError(
        f"{len(answers)} of {count} nodes have answered within {timeout_s:.0f} s: {'; '.join(last_lines)}",
        hint="if the nodes are busy, add --wait SECONDS; else try srun --nodes=2 hostname",
    )


def judge(nodes: Sequence[Mapping[str, Any]], run_root: Path, *, asked_at: float) -> Iterator[Finding]:
    """Yield the findings about the nodes.

    Args:
        nodes: what each node has answered; ``is_seen``: whether this machine sees its file in the run root.
        run_root: the directory of all runs.
        asked_at: when the nodes were asked for their time, by the clock of this machine.
    """
    hosts = ", ".join(node["host"] for node in nodes)
    yield Finding(name="nodes", verdict="ok", found=f"a job ran on {hosts}")
    yield _versions(nodes)
    yield _shared(nodes, run_root)
    for task, node in enumerate(nodes):
        yield _network(node, nodes[(task + 1) % len(nodes)])
    yield _clocks(nodes, asked_at)
    for node in nodes:
        where = f"{node['host']}: "
        if node["torch"] is not None:
            yield torch_finding(node["torch"], where=where)
        else:
            yield Finding(
                name="torch",
                verdict="warning",
                found=f"{where}torch is not installed",
                remedy="a training needs it: pip install 'hpcddp[train]'; a plain command does not",
            )


def _versions(nodes: Sequence[Mapping[str, Any]]) -> Finding:
    versions = {f"Python {node['python']}, hpcddp {node['hpcddp']}" for node in nodes}
    found = " and ".join(sorted(versions))
    if len(versions) == 1 and nodes[0]["hpcddp"] == __version__:
        return Finding(name="versions", verdict="ok", found=found)
    return Finding(
        name="versions",
        verdict="error",
        found=f"{found}, and hpcddp {__version__} here",
        remedy="install the same versions on all nodes and here",
    )


def _shared(nodes: Sequence[Mapping[str, Any]], run_root: Path) -> Finding:
    where = run_root.absolute()
    for node in nodes:
        host = node["host"]
        sentence = None
        if not node["login_file"]:
            sentence = f"{host} cannot see the file that this machine wrote into {where}"
        elif node["refused"]:
            sentence = f"{host} cannot write in {where}: {node['refused']}"
        elif not node["is_seen"]:
            sentence = f"this machine cannot see the file that {host} wrote into {where}"
        if sentence is not None:
            remedy = "set run_root in hpcddp.yaml or the profile to a directory that all nodes and the login node share"
            return Finding(name="run root", verdict="error", found=sentence, remedy=remedy)
    hosts = ", ".join(node["host"] for node in nodes)
    return Finding(name="run root", verdict="ok", found=f"{hosts} and this machine share {where}")


def _network(node: Mapping[str, Any], peer: Mapping[str, Any]) -> Finding:
    if node["reached"] is None:
        addresses = ", ".join(peer["addresses"]) or "no address"
        return Finding(
            name="network",
            verdict="error",
            found=f"{node['host']} does not reach a free port of {peer['host']} ({addresses})",
            remedy="the ranks of a job connect to any port above 1023: ask your site to open them between nodes",
        )
    through = f" through {node['interface']}" if node["interface"] else ""
    sentence = f"{node['host']} reaches a free port of {peer['host']} at {node['reached']}{through}"
    return Finding(name="network", verdict="ok", found=sentence)


def _clocks(nodes: Sequence[Mapping[str, Any]], asked_at: float) -> Finding:
    # The way of the question, some milliseconds, is part of the difference.
    clocks = {"this machine": asked_at, **{node["host"]: node["clock"] for node in nodes}}
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
