"""Give hpcddp random job files, run directories and arguments, and count the defects that they show.

usage: python -m benchmarks.fuzz [--job-files 5000] [--runs 2000] [--arguments 2000] [--seed 0] [--output FILE]

A case is one directory with a job file, a run root and a run. Each case runs in a child process of an ordinary user, in
which all commands that fit it are called one after the other. Slurm's commands are programs that print random answers.
A defect is: a traceback, an unforeseen error, a command that takes over 5 s, a control character in the output, a
document of ``--json`` that is not JSON, an unknown exit code, and a change of a file outside the run. The same seed and
number give the same case. Left out are commands that start processes (``sandbox``, ``doctor``) or do not end
(``--follow``, ``--watch``).
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import hashlib
import importlib
import io
import json
import os
import pkgutil
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import typer

import hpcddp
from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.jobfile.job import field_paths
from hpcddp.manage import control
from hpcddp.run.checkpoints import FileRecord, Manifest
from hpcddp.run.directory import RunDirectory
from hpcddp.stop.reasons import ExitCode
from hpcddp.supervise import __main__ as supervisor

LONGEST_S: Final = 5
_NOBODY: Final = 65534
_OUTPUT_BYTES: Final = 8 << 20
_MEMORY: Final = 4 << 30
_DESCRIPTORS: Final = 80
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MISTAKE: Final = "That is a mistake of hpcddp"
_UNFORESEEN: Final = "Run it again with --debug to see where."


def _warm_up() -> None:
    """Import what the commands import, and fill their caches: the slow part, which each child would do again.

    The folder of the interpreter may also be closed to an ordinary user.
    """
    for module in pkgutil.walk_packages(hpcddp.__path__, "hpcddp."):
        if (
            not module.name.startswith(("hpcddp.train", "hpcddp.doctor", "hpcddp.sandbox"))
            and "__main__" not in module.name
        ):
            importlib.import_module(module.name)
    for name in ("_strptime", "encodings.ascii", "encodings.latin_1", "encodings.utf_8_sig"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        job = Path(directory, "job.yaml")
        job.write_text(_JOB)
        for words in (
            ("plan", "--help"),
            ("plan", str(job)),
            ("render", str(job), "-o", f"{job}.sh"),
            ("submit", "--dry-run", str(job)),
        ):
            boundary.run(app, words)
    gc.freeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One command of a case.

    Args:
        words: the arguments of ``hpcddp``, or of ``python -m hpcddp.supervise`` after its name.
        may_write: whether it may change the run, and add others under the run root.
    """

    words: tuple[str, ...]
    may_write: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A directory, and the commands that run in it.

    Args:
        calls: the commands.
        changes: what was done to the directory, a line each.
    """

    calls: tuple[Call, ...]
    changes: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """What the cases have shown.

    Args:
        cases: how many there were.
        calls: how many commands they ran.
        defects: the kind, the number of the case and what happened.
        slowest_s: the longest time that a command has taken.
        exit_codes: how often a command ended with which.
    """

    cases: int = 0
    calls: int = 0
    defects: list[dict[str, Any]] = field(default_factory=list)
    slowest_s: float = 0.0
    exit_codes: Counter[int] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """Return the document that is written."""
        return {
            "cases": self.cases,
            "calls": self.calls,
            "defects": self.defects,
            "defects_by_kind": dict(Counter(defect["kind"] for defect in self.defects)),
            "slowest_s": round(self.slowest_s, 3),
            "exit_codes": {str(code): count for code, count in sorted(self.exit_codes.items())},
        }


def fuzz(make: Callable[[random.Random, Path], Case], *, count: int, seed: int, first: int = 0) -> Tally:
    """Run cases, and return what they have shown.

    Args:
        make: writes the directory of a case, whose path it gets, and returns its commands.
        count: how many cases.
        seed: of the random numbers.
        first: the number of the first case.
    """
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="hpcddp-fuzz-") as above:
        Path(above).chmod(0o755)
        for number in range(first, first + count):
            directory = Path(above, str(number))
            directory.mkdir()
            generator = random.Random(f"{make.__name__} {seed} {number}")
            case = make(generator, directory)
            for kind, call, what in _defects(case, directory, tally):
                defect = {"kind": kind, "case": number, "call": repr(call.words), "what": what, "of": case.changes}
                tally.defects.append(defect)
                print(json.dumps(defect), file=sys.stderr, flush=True)
            tally.cases += 1
            _remove(directory)
    return tally


def _remove(directory: Path) -> None:
    for path, _, _ in os.walk(directory):
        Path(path).chmod(0o700)
    shutil.rmtree(directory)


def _defects(case: Case, directory: Path, tally: Tally) -> Iterator[tuple[str, Call, str]]:
    """Run the commands of a case, and yield what is wrong."""
    if os.geteuid() == 0:
        _give_away(directory)
    left = list(case.calls)
    while left:
        guarded, whole = _guarded(directory), _state(directory / "here")
        ended = _run(left, directory)
        for call, end in zip(left, ended, strict=False):
            tally.calls += 1
            tally.slowest_s = max(tally.slowest_s, end.seconds)
            tally.exit_codes[end.code] += 1
            yield from ((kind, call, what) for kind, what in _wrong(call, end))
        may_write = any(call.may_write for call in left[: len(ended)])
        if _guarded(directory) != guarded or (not may_write and _state(directory / "here") != whole):
            yield "write", left[len(ended) - 1], "a file outside the run has changed"
        left = left[len(ended) :]


def _guarded(directory: Path) -> dict[str, tuple[int, ...]]:
    return _state(directory / "home") | _state(directory / "guard")


def _give_away(directory: Path) -> None:
    for path, folders, files in os.walk(directory):
        for name in ("", *folders, *files):
            os.chown(Path(path, name), _NOBODY, _NOBODY, follow_symlinks=False)


def _state(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return what tells whether something below a directory has changed."""
    found: dict[str, tuple[int, ...]] = {}
    for path, folders, files in os.walk(directory):
        for name in (*folders, *files):
            status = os.lstat(Path(path, name))
            found[f"{path}/{name}"] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    code: int
    output: bytes
    errors: bytes
    seconds: float


def _run(calls: Sequence[Call], directory: Path) -> list[_Ended]:
    """Run commands in one child, up to the next one that changes the run, or the first one that ends the child."""
    ended: list[_Ended] = []
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _be_the_child(calls, directory, (output.fileno(), errors.fileno(), writer))
        os.close(writer)
        with os.fdopen(reader) as reports:
            marks = [json.loads(line) for line in reports]
        _, status = os.waitpid(child, 0)
        place = (0, 0)
        for mark in marks:
            said = _part(output, place[0], mark["output"]), _part(errors, place[1], mark["errors"])
            ended.append(_Ended(code=mark["code"], output=said[0], errors=said[1], seconds=mark["seconds"]))
            place = mark["output"], mark["errors"]
        if (code := os.waitstatus_to_exitcode(status)) != 0:
            said = _part(output, place[0]), _part(errors, place[1])
            ended.append(_Ended(code=code, output=said[0], errors=said[1], seconds=0))
    return ended


def _part(stream: IO[bytes], begin: int, end: int | None = None) -> bytes:
    stream.seek(begin)
    return stream.read(_OUTPUT_BYTES if end is None else end - begin)


def _be_the_child(calls: Sequence[Call], directory: Path, descriptors: tuple[int, int, int]) -> None:
    """Run commands as an ordinary user, and report each; does not return."""
    code = 98
    try:
        _become_ordinary(directory, *descriptors[:2])
        for place, call in enumerate(calls):
            if place and call.may_write:
                break
            began = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
            ended = _call(call.words)
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stdout.flush()
            sys.stderr.flush()
            mark = {"code": ended, "seconds": time.perf_counter() - began, "output": os.fstat(1).st_size}
            os.write(descriptors[2], (json.dumps({**mark, "errors": os.fstat(2).st_size}) + "\n").encode())
        code = 0
    except BaseException as error:  # noqa: BLE001  a traceback is what is looked for
        os.write(2, f"{_MISTAKE}: {traceback.format_exc()} {error!r}".encode(errors="replace")[-2000:])
    finally:
        os._exit(code)


def _become_ordinary(directory: Path, output: int, errors: int) -> None:
    os.chdir(directory / "here")
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, errors)):
        os.dup2(descriptor, number)
    limits = {
        resource.RLIMIT_AS: _MEMORY,
        resource.RLIMIT_NOFILE: _DESCRIPTORS,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    os.environ.clear()
    os.environ.update(_environment(directory))
    sys.stdin = os.fdopen(0)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", errors="backslashreplace") for number in (1, 2))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _let_time_pass()


def _let_time_pass() -> None:
    """Let a wait for a task or for Slurm take no time."""
    waited = 0.0
    monotonic = time.monotonic

    def sleep(seconds: float) -> None:
        nonlocal waited
        waited += seconds

    for module, name, function in (
        (time, "sleep", sleep),
        (time, "monotonic", lambda: monotonic() + waited),
        (control, "requeue", functools.partial(control.requeue, sleep=sleep)),
    ):
        setattr(module, name, function)


def _call(words: Sequence[str]) -> int:
    if words[0] not in {"begin", "end"}:
        return boundary.run(app, words)
    os.environ.update(SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1", HPCDDP_ATTEMPT_DIR=words[1])
    sys.stdin = io.TextIOWrapper(io.BytesIO(_JOB.encode()))
    return supervisor.main((words[0], *words[2:]), os.environ)


def _environment(directory: Path) -> dict[str, str]:
    return {
        "PATH": f"{directory / 'bin'}:/usr/bin:/bin",
        "HOME": str(directory / "home"),
        "XDG_CONFIG_HOME": str(directory / "home" / "config"),
        # Every submission writes into the index.
        "XDG_STATE_HOME": str(directory / "state"),
        "SLURM_CONF": str(directory / "guard" / "slurm.conf"),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
    }


def _wrong(call: Call, ended: _Ended) -> Iterator[tuple[str, str]]:
    errors = ended.errors.decode(errors="replace")
    said = ended.output.decode(errors="replace")
    last = (errors or said)[-600:]
    known = {0, 1, 2, 130, *(ExitCode if call.words[0] in {"begin", "end"} else ())}
    if ended.code == -signal.SIGALRM:
        yield "hang", last
    elif len(ended.output) >= _OUTPUT_BYTES:
        # So large an output is right for a large log, and ends here.
        return
    elif ended.code < 0:
        yield "killed", last
    elif _MISTAKE in errors or _MISTAKE in said:
        yield "traceback", last
    elif (_UNFORESEEN in errors or _UNFORESEEN in said) and "cannot be used: Permission denied" not in errors + said:
        yield "unforeseen", last
    elif ended.code not in known:
        yield "exit code", f"{ended.code}: {last}"
    # A script is printed as it is submitted, and the batch script reads the path that ``begin`` prints.
    if _CONTROL.search(errors) or (call.words[0] not in {"render", "begin"} and _CONTROL.search(said)):
        yield "control character", last
    if "--json" in call.words and not {"--", "--help", "-h"} & set(call.words):
        try:
            json.loads(said)
        except ValueError:
            yield "json", last


_VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e308, -0.0, "", "x", "7", "7_1", "-1", "²",
    "٣", "a b", "a\nb", "\x1b[31mred\x1b[0m", "\x9b31m", "\x1b]0;title\x07", "\u202eab", "é", "x" * 5000, "\ud800",
    "../../x", "/dev/zero", "$(touch x)", "{{ 1 }}", "%j", [], [[]], [1, "a", None], {}, {"": 1}, {"a": {"b": [1]}},
    "running", "finished", "slurm", "local", "stopped", "cancelled", "1e5", "2h", "1:00:00", "0..4", "64G",
)  # fmt: skip
_RAW: Final[tuple[bytes, ...]] = (
    b"", b"\n", b"null", b"7", b"[7]", b"{}", b'{"\xff": 1}', b"[" * 50_000, b"1" * 5_000, b"\x00" * 100,
    b'{"format": 1000}', b"\xef\xbb\xbf{}", b'{"step": NaN}', b'{"time": 1e999}', b'{"step": ' + b"9" * 5_000 + b"}",
    b'{"a": ' * 900 + b"1" + b"}" * 900,
)  # fmt: skip


def _value(generator: random.Random) -> Any:  # noqa: ANN401
    # A copy: a case changes what it is given, and must not change the cases after it.
    return copy.deepcopy(generator.choice(_VALUES))


_NOW: Final = 1795262400.0
_JOB: Final = """\
name: demo
resources: {nodes: 2, tasks_per_node: 1, time_limit: 10}
batch: {global_batch_size: 8}
train: {model: resnet18, dataset: digits}
"""
_QUEUE: Final = "7|{state}|1|2026-11-21T12:00:00|N/A|0:40|10:00|2|n[1-2]|None|"
_SLURM: Final = """\
#!/bin/sh
case "${{0##*/}} $1" in
  squeue*) echo '{queue}' ;;
  sbatch*) echo 8 ;;
  "scontrol show") echo "JobId=$3 JobState={state} Restarts=1 Requeue=1 PreemptTime=None Reason=None" ;;
esac
"""
_STATES: Final = ("PENDING", "RUNNING", "COMPLETING", "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "NEW_STATE", "")


def _prepare(generator: random.Random, directory: Path) -> None:
    """Write the folders of a case: ``here`` to work in, ``home``, ``bin`` with Slurm, and ``guard``."""
    for name in ("here", "home", "bin", "guard"):
        (directory / name).mkdir()
    for name in ("slurm.conf", "precious"):
        (directory / "guard" / name).write_text('{"precious": true}\n')
    state = generator.choice(_STATES)
    script = _SLURM.format(queue=_QUEUE.format(state=state), state=state)
    for name in ("squeue", "sbatch", "scontrol", "scancel"):
        (directory / "bin" / name).write_text(script)
        (directory / "bin" / name).chmod(0o755)
    (directory / "here" / "job.yaml").write_text(_JOB)


def run_directories(generator: random.Random, directory: Path) -> Case:
    """Write a run, damage up to three of its files, and return every command that reads or changes a run."""
    _prepare(generator, directory)
    run = _write_run(generator, directory / "here" / "runs")
    changes = tuple(_damage(generator, run.path, directory) for _ in range(generator.randint(1, 3)))
    named, attempt = str(run.path), str(run.attempt(0).path)
    reading = (
        ("status",), ("status", named), ("status", "--all", "--json"), ("status", named, "--json"), ("why", named),
        ("why", named, "--json"), ("logs", named), ("logs", named, "--batch", "-n", "3"), ("checkpoints", named),
        ("logs", named, "--json", "--batch"), ("logs", named, "--first-error"), ("checkpoints", named, "--json"),
        ("report", named, "--json"), ("status", named, "--sort", "val_accuracy"), ("stacks", named),
        ("shell", named, "--", "true"), ("status", "last"), ("status", "--state", "failed", "--since", "7d"),
    )  # fmt: skip
    acting = [
        ("cancel", named), ("requeue", named), ("submit", "--resume", named), ("submit", "job.yaml", "--resume", named),
        ("end", attempt, "--code=1"), ("begin", attempt, "--run-root=runs", "--name=demo", f"--run-id={run.run_id}"),
    ]  # fmt: skip
    generator.shuffle(acting)
    calls = [Call(words=words) for words in reading] + [Call(words=words, may_write=True) for words in acting]
    return Case(calls=tuple(calls), changes=changes)


def _write_run(generator: random.Random, root: Path) -> RunDirectory:
    """Write a run with every record that a run may have; some are left out."""
    run_id = generator.choice(("20261121-1200-ab12", "r1_3", "x y", "\x1b[31mred", "\udcff", "-n", "a'b"))
    run = RunDirectory(root / "demo" / run_id)
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    run.path.chmod(0o700)
    run.submitit.mkdir()
    of_attempt: dict[Path, object] = {
        attempt.start: {"job_id": "7", "host": "n1", "time": _NOW + 10, "is_local": False, "restart_count": 1},
        attempt.ranks: {"ranks": [{"host": "n1"}, {"host": "n2"}]},
        attempt.decision: {"attempt": 0, "step": 4, "reason": "terminated", "cause": "preemption", "saved": True,
                           "save_s": 0.1, "time": _NOW + 30},
        attempt.rank_error(1): {"rank": 1, "host": "n2", "time": _NOW + 20, "kind": "ValueError", "message": "no",
                                "traceback": "", "exit_code": 70, "secondary": False},
        attempt.rank_exit(0): {"rank": 0, "host": "n1", "time": _NOW + 30, "code": 1, "told": None},
        attempt.requeue_request: {"time": _NOW, "by": "me"},
        attempt.rendezvous: {"host": "n1", "addresses": ["127.0.0.1"], "port": 1},
    }  # fmt: skip
    of_run: dict[Path, object] = {
        run.submission: {"cluster": generator.choice(("slurm", "slurm", "local")), "job_id": "7",
                         "directory": str(root), "python": "python3", "time": _NOW, "host": socket.gethostname(),
                         "run_dir": str(run.path)},
        run.plan: {"total_steps": 100, "steps_per_epoch": 10},
        run.result: {"status": "failed", "reason": "rank 1 failed", "exit_code": 70, "saved_step": 4},
        run.source: {"submissions": [{"time": _NOW, "directory": str(root), "python": "python3", "commit": "0" * 40}]},
        run.tracker("wandb"): {"run_id": "w", "step": 4, "evaluated_step": 4},
        run.path / "sweep.json": {"sweep_id": run_id, "elements": [{"train.seed": 0}, {"train.seed": 1}],
                                  "chunks": [{"job_id": "7", "first": 0, "count": 2}]},
    }  # fmt: skip
    rare = {run.result, run.path / "sweep.json", attempt.decision, attempt.rank_error(1)}
    for path, document in (of_run | of_attempt).items():
        if generator.random() < (0.3 if path in rare else 0.9):
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"format": 1, **document}))  # type: ignore[dict-item]
    run.job_file.write_text(_JOB)
    run.script.write_text(f"#!/bin/bash\nhpcddp.supervise begin --run-root={root} --name=demo --run-id={run_id!a}\n")
    _write_lines(run.events, [
        {"event": kind, "time": _NOW + 10 * place, "attempt": 0, "step": place, "format": 1, "reason": "why"}
        for place, kind in enumerate(("start", "train", "save", "signal", "stop", "requeue", "failure"))
    ][: generator.randint(0, 7)])  # fmt: skip
    _write_lines(run.metrics, [
        *({"step": step, "loss": 1.0, "time": _NOW + step} for step in range(1, 9)),
        {"step": 8, "val_accuracy": 0.5, "eval_s": 0.1},
    ])  # fmt: skip
    for rank in range(2):
        attempt.rank_log(rank).write_text("hello\nworld\n")
        attempt.rank_log(rank).with_suffix(".times").write_text(f"6 {_NOW + 11}\n12 {_NOW + 12}\n")
    run.batch_log.write_text(f"hpcddp: attempt 0 of run {run_id!a} begins\nsrun: error: n2: task 1: Killed\n")
    checkpoint = run.checkpoints / "step-000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.pt").write_bytes(b"1234")
    files = {"state.pt": FileRecord(size=4, sha256=hashlib.sha256(b"1234").hexdigest())}
    manifest = Manifest(step=4, attempt=0, time=_NOW, contract={}, progress={}, information={}, files=files)
    (checkpoint / "manifest.json").write_text(manifest.to_text())
    (run.checkpoints / "latest").write_text("step-000004\n")
    return run


def _write_lines(path: Path, documents: Sequence[object]) -> None:
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents))


def _damage(generator: random.Random, run: Path, directory: Path) -> str:
    """Damage one file of a run, or add one, and return what was done."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:
        return "nothing"
    path = generator.choice(files)
    if path.suffix in {".json", ".jsonl"} and generator.random() < 0.6:  # noqa: PLR2004
        return f"{path.name}: {_damage_content(generator, path)}"
    way = generator.choice([*_WAYS, "extra"])
    with suppress(OSError):
        if way == "extra":
            _add_names(generator, path.parent)
        else:
            _WAYS[way](path, directory)
    return f"{path.name}: {way}"


def _damage_content(generator: random.Random, path: Path) -> str:
    """Change one value in a JSON file, or in one line of several; a file that is damaged already stays as it is."""
    if path.stat().st_size > _OUTPUT_BYTES:
        return "nothing"
    try:
        lines = path.read_text().splitlines() or ["{}"]
        place = generator.randrange(len(lines))
        document = json.loads(lines[place])
    except (OSError, ValueError, RecursionError):
        return "nothing"
    if not isinstance(document, dict):
        return "nothing"
    key = generator.choice([*document, "format", "facts", "new"])
    if generator.random() < 0.25:  # noqa: PLR2004
        document.pop(key, None)
    else:
        document[key] = _value(generator)
    lines[place] = json.dumps(document)
    path.write_text("\n".join(lines) + generator.choice(("\n", "")))
    return f"{key} = {document.get(key)!r}"[:200]


def _add_names(generator: random.Random, folder: Path) -> None:
    name = generator.choice((
        "rank-x.log", "rank-.log", "rank--1.log", "rank-٣.log", "error-rank-x.json", "exit-rank-x.json", "٣", "²",
        "007", "1", "9999999999999999999999", "step-x", "step-000009", "step-9999999999999999999999", "\x1b[31m.log",
        "\udcff",
    ))  # fmt: skip
    if generator.random() < 0.5:  # noqa: PLR2004
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(generator.choice(_RAW))


def _replace(make: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    def replace(path: Path, directory: Path) -> None:
        path.unlink()
        make(path, directory)

    return replace


def _open_socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


_WAYS: Final[Mapping[str, Callable[[Path, Path], object]]] = {
    "missing": lambda path, _: path.unlink(),
    "truncated": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "raw": lambda path, _: path.write_bytes(random.Random(path.name).choice(_RAW)),
    "control": lambda path, _: path.write_bytes(
        b"\x1b[31mred\x1b]0;title\x07 \x9b31m \xc2\x9b31m \xe2\x80\xae\r\n\x00\n"
    ),
    "line": lambda path, _: path.write_bytes(b"x" * 300_000),
    "sparse": lambda path, _: os.truncate(path, 1 << 36),
    "pipe": _replace(lambda path, _: os.mkfifo(path)),
    "socket": _replace(_open_socket),
    "directory": _replace(lambda path, _: path.mkdir()),
    "closed": lambda path, _: path.chmod(0),
    "closed folder": lambda path, _: path.parent.chmod(0),
    "zero": _replace(lambda path, _: path.symlink_to("/dev/zero")),
    "link": _replace(lambda path, directory: path.symlink_to(directory / "guard" / "precious")),
    "loop": _replace(lambda path, _: path.symlink_to(path.name)),
    "dangling": _replace(lambda path, directory: path.symlink_to(directory / "guard" / "new")),
}


def job_files(generator: random.Random, directory: Path) -> Case:
    """Write a job file with random fields and values, or with random text, and return every command that reads one."""
    _prepare(generator, directory)
    document: dict[str, Any] = {
        "name": "demo",
        "resources": {"time_limit": 10},
        "batch": {"global_batch_size": 8},
        "train": {"model": "resnet18", "dataset": "digits"},
    }
    paths = [path for path, _ in field_paths()]
    for _ in range(generator.choice((0, 1, 1, 2, 3, 8))):
        _assign(generator, document, generator.choice(paths))
    content = json.dumps(document, ensure_ascii=False).encode(errors="surrogatepass")
    if generator.random() < 0.3:  # noqa: PLR2004
        place = generator.randrange(len(content))
        piece = generator.choice((b"", b"\t", b"\n", b": ", b"- ", b"&a ", b"*a", b"<<: ", b"!x ", b"%", b"{", b"\xff",
                                  b"\x1b", b"'", b"# ", b"---\n", b"x" * 100_000, b"[" * 3_000, b"a: " * 3_000,
                                  b"9" * 5_000, b"\n- a" * 20_000, b"\nb: 1" * 20_000))  # fmt: skip
        content = content[:place] + piece + content[place + generator.randint(0, 3) :]
    (directory / "here" / "job.yaml").write_bytes(content)
    calls = (("plan", "job.yaml"), ("plan", "job.yaml", "--json"), ("render", "job.yaml"),
             ("submit", "job.yaml", "--dry-run", "--json"))  # fmt: skip
    return Case(calls=tuple(Call(words=words) for words in calls), changes=(repr(content[:300]),))


def _assign(generator: random.Random, document: dict[str, Any], path: Sequence[str]) -> None:
    for name in path[:-1]:
        below = document.get(name)
        if below is None:
            below = document[name] = {}
        document = below if isinstance(below, dict) else {}
    name = path[-1] if generator.random() < 0.9 else f"{path[-1]}{_value(generator)}"  # noqa: PLR2004
    document[name] = {str(_value(generator)): _value(generator)} if generator.random() < 0.2 else _value(generator)  # noqa: PLR2004


# They start daemons or ranks, write profiles, or do not end.
_LEFT_OUT: Final = frozenset({"sandbox", "doctor", "init"})
_ENDLESS: Final = frozenset({"--follow", "-f", "--watch", "-w", "--install-completion"})


def arguments(generator: random.Random, directory: Path) -> Case:
    """Return random arguments of random commands, beside a run that is whole."""
    _prepare(generator, directory)
    run = _write_run(generator, directory / "here" / "runs")
    texts = (run.run_id, str(run.path), "job.yaml", "runs", "", ".", "/", "/dev/zero", "/dev/full", "\udcff\udcfe",
             "\x1b[31m", "x" * 5_000, "a" * 300, "nothing", "20", "--", "-", "train.seed=0..4", "name=\x1b",
             "train.seed=0..999999999999", "batch.global_batch_size=" + "9" * 5_000, "a.b.c=[[[", "=", "true",
             )  # fmt: skip
    command = generator.choice(sorted(_COMMANDS))
    words = [command]
    for _ in range(generator.randint(0, 5)):
        if generator.random() < 0.5:  # noqa: PLR2004
            words.append(generator.choice(_COMMANDS[command]))
        else:
            words.append(generator.choice(texts) if generator.random() < 0.7 else str(_value(generator)))  # noqa: PLR2004
    if command == "submit":
        words.insert(1, "--dry-run")
    return Case(calls=(Call(words=tuple(words), may_write=command in {"cancel", "requeue", "render", "report"}),))


def _options() -> dict[str, list[str]]:
    group = typer.main.get_command(app)
    options = {
        name: sorted({text for parameter in command.params for text in parameter.opts if text.startswith("-")})
        for name, command in group.commands.items()  # type: ignore[attr-defined]
        if name not in _LEFT_OUT
    }
    return {name: [text for text in texts if text not in _ENDLESS] + ["--help"] for name, texts in options.items()}


_COMMANDS: Final = _options()


def main() -> int:
    """Run the cases that the arguments ask for, and print what they have shown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job-files", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--arguments", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    counts = {job_files: options.job_files, run_directories: options.runs, arguments: options.arguments}
    _warm_up()
    found = {}
    for make, count in counts.items():
        began = time.monotonic()
        tally = fuzz(make, count=count, seed=options.seed, first=options.first)
        found[make.__name__] = {**tally.as_json(), "seconds": round(time.monotonic() - began, 1)}
        print(
            make.__name__, {key: value for key, value in found[make.__name__].items() if key != "defects"}, flush=True
        )
    if options.output is not None:
        options.output.write_text(json.dumps({"seed": options.seed, **found}, indent=2) + "\n")
    return 1 if any(kind["defects"] for kind in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
