"""Failure records of a user's program."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.task.program_failure import program_failure

OF_A_SHELL = "which a shell returns for a program that was killed"
COMMAND = ("python", "train.py", "--lr", "0.1")
BOOM = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: boom\n'
EXPORTED = "Cannot export environment variables as MASTER_ADDR is already set"
EXPORT = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nRuntimeError: {EXPORTED}\n'
LOST = 'Traceback (most recent call last):\n  File "train.py"\nRuntimeError: [gloo] Connection closed by peer [::1]:7\n'
ECC = "CUDA error: uncorrectable ECC error encountered\n"
# What ROCr prints before it aborts the process (runtime.cpp).
HW_EXCEPTION = "HW Exception by GPU node-4 (Agent handle: 0x55dc6e221990) reason :{}\n"
MEMORY_FAULT = "Memory access fault by GPU node-2 (Agent handle: 0x58935a90) on address 0x7fbe6a804000. Reason: {}.\n"
TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 20123, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


def log(directory: Path, text: str) -> Path:
    path = directory / "rank-0.log"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("code", "text", "kind", "message", "exit_code"),
    [
        (1, BOOM, "ValueError", "boom", 70),
        (3, "just this\n\n", "exit", "python train.py ended with exit code 3; its last line: just this", 70),
        (3, "", "exit", "python train.py ended with exit code 3", 70),
        # What torch warns of, and lines that are drawn, tell nothing.
        (
            3,
            "no licence\n[W1126 03:15:09.04 socket.cpp:207] The hostname cannot be retrieved\n  +------\n",
            "exit",
            "python train.py ended with exit code 3; its last line: no licence",
            70,
        ),
        (-6, BOOM, "ValueError", "boom", 70),
        (1, EXPORT, "RuntimeError", f"{EXPORTED}; write TorchDistributedEnvironment().export(overwrite=True)", 70),
        (
            1,
            BOOM.replace("ValueError: boom", "KeyError: 'HPCDDP_RANK_BATCH_SIZE'"),
            "KeyError",
            "'HPCDDP_RANK_BATCH_SIZE'; this job does not set the variable: add --global-batch-size N",
            70,
        ),
        (-15, BOOM, "killed", "python train.py was killed by SIGTERM", 70),
        (-6, "", "killed", "python train.py was killed by SIGABRT", 70),
        (-6, ECC, "killed", "python train.py was killed by SIGABRT", 71),
        # Of a health check, and of a kernel that reads where it must not.
        (-6, "Uncorrectable ECC errors: 0\n", "killed", "python train.py was killed by SIGABRT", 70),
        (-6, "NVRM: Xid (PCI:0000:3b:00): 31, pid=7\n", "killed", "python train.py was killed by SIGABRT", 70),
        (-6, HW_EXCEPTION.format("ECC"), "killed", "python train.py was killed by SIGABRT", 71),
        # A kernel that runs for too long, or writes where it must not, hangs a GPU as well.
        (-6, HW_EXCEPTION.format("GPU Hang"), "killed", "python train.py was killed by SIGABRT", 70),
        (-6, MEMORY_FAULT.format("SRAM ECC failure"), "killed", "python train.py was killed by SIGABRT", 71),
        (-6, MEMORY_FAULT.format("Page not present"), "killed", "python train.py was killed by SIGABRT", 70),
        (1, BOOM.replace("boom", "NVML: GPU is lost"), "ValueError", "NVML: GPU is lost", 71),
        (-11, "", "killed", "python train.py was killed by SIGSEGV", 70),
        # A real-time signal has no name.
        (-40, "", "killed", "python train.py was killed by signal 40", 70),
        # A shell returns it for what it ran, and a program may return it itself.
        (139, "", "killed", f"python train.py ended with exit code 139, {OF_A_SHELL} by SIGSEGV", 70),
        (130, "", "killed", f"python train.py ended with exit code 130, {OF_A_SHELL} by SIGINT", 70),
        (-9, "", "killed", "python train.py was killed by SIGKILL, most often because it ran out of memory", 71),
    ],
)
def test_a_program_that_fails_by_itself_is_a_failure_of_the_user(
    tmp_path: Path, code: int, text: str, kind: str, message: str, exit_code: int
) -> None:
    record = program_failure(COMMAND, code, log(tmp_path, text), stop_requested=False, another_rank_failed_first=False)
    assert record is not None
    assert (record.kind, record.message, record.exit_code, record.secondary) == (kind, message, exit_code, False)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-m", "trian", "--lr", "1"], "python -m trian"),
        (["python", "-u", "-X", "dev", "train.py"], "python -u -X dev"),
        (["bash", "-c", "cd data\nexit 3"], "bash -c 'cd data exit 3'"),
        (["bash", "-c", "true " * 30], f"bash -c '{'true ' * 10}t ..."),
        (["./a.out", "3", "4"], "./a.out 3"),
        (["true"], "true"),
    ],
)
def test_the_program_that_failed_is_named(tmp_path: Path, command: list[str], name: str) -> None:
    record = program_failure(command, 3, tmp_path / "none", stop_requested=False, another_rank_failed_first=False)
    assert record is not None
    assert record.message == f"{name} ended with exit code 3"


@pytest.mark.parametrize(("code", "told"), [(0, False), (75, False), (0, True), (1, True), (-15, True), (143, True)])
def test_an_end_as_it_was_told_is_no_failure(tmp_path: Path, code: int, *, told: bool) -> None:
    assert (
        program_failure(COMMAND, code, log(tmp_path, BOOM), stop_requested=told, another_rank_failed_first=False)
        is None
    )


@pytest.mark.parametrize(
    ("code", "text", "told"),
    [(1, LOST, False), (1, LOST, True), (-15, "", True), (-9, "", True), (143, "", True)],
)
def test_a_program_that_lost_a_peer_or_was_ended_with_the_others_is_secondary(
    tmp_path: Path, code: int, text: str, *, told: bool
) -> None:
    record = program_failure(COMMAND, code, log(tmp_path, text), stop_requested=told, another_rank_failed_first=True)
    assert record is not None
    assert (record.secondary, record.exit_code) == (True, 71)


def test_an_exception_of_a_handler_after_another_rank_failed_is_secondary(tmp_path: Path) -> None:
    record = program_failure(
        COMMAND, 1, log(tmp_path, BOOM), stop_requested=True, sigterm_forwarded=True, another_rank_failed_first=True
    )
    assert record is not None
    assert (record.secondary, record.exit_code) == (True, 71)


def test_a_first_failure_is_not_secondary_although_the_others_were_told_to_end(tmp_path: Path) -> None:
    """A peer may notice a crash before the task of the crashed program does, and be the first to say so."""
    record = program_failure(COMMAND, 1, log(tmp_path, BOOM), stop_requested=True, another_rank_failed_first=True)
    assert record is not None
    assert not record.secondary


@pytest.mark.parametrize(
    ("text", "secondary"),
    [
        (f"{BOOM}{{signal}}", False),
        (f"{{signal}}{BOOM}", True),
        (f"{BOOM}{{signal}}{BOOM.replace('boom', 'in the handler')}", True),
        (f"{LOST}{{signal}}", True),
    ],
    ids=["failed", "told", "failed in its handler", "lost a peer"],
)
def test_an_error_that_a_program_had_before_it_was_told_to_end_is_its_own(
    tmp_path: Path, text: str, *, secondary: bool
) -> None:
    written = log(tmp_path, text.format(signal="hpcddp: 02:23:52 SIGTERM: it is passed on to the program\n"))
    record = program_failure(
        COMMAND, 1, written, stop_requested=True, sigterm_forwarded=True, another_rank_failed_first=True
    )
    assert record is not None
    assert record.secondary == secondary


@pytest.mark.parametrize(("port", "exit_code"), [(20123, 71), (2012, 70)])
def test_a_port_of_the_run_that_another_process_took_is_no_failure_of_the_user(
    tmp_path: Path, port: int, exit_code: int
) -> None:
    text = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n{TAKEN}\n'
    record = program_failure(
        COMMAND, 1, log(tmp_path, text), stop_requested=False, another_rank_failed_first=False, master_port=port
    )
    assert record is not None
    assert (record.kind, record.exit_code, record.secondary) == ("DistNetworkError", exit_code, False)


NOT_LOADED = (
    'Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "fc.weight". \n\n'
    "\tsize mismatch for conv.weight: copying a param with shape torch.Size([3]) from checkpoint"
)
FAILED = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
NOISE = "[rank0]:[W1126 03:15:09.04 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called\n"


def with_prefix(text: str) -> str:
    """Return a text as torch's hook for exceptions writes it."""
    return "\n".join(line and f"[rank0]: {line}" for line in text.split("\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_prefix(f"{FAILED}RuntimeError: {NOT_LOADED}\n") + NOISE, NOT_LOADED),
        (f"{FAILED}RuntimeError: first\n\tsecond\nthird\n\nnothing of it\n", "first\n\tsecond\nthird"),
        (f"{FAILED}RuntimeError: first\nsecond\n{NOISE}", "first\nsecond"),
        (f"{FAILED}RuntimeError: first\nsecond\nhpcddp: 02:23:52 the end\n", "first\nsecond"),
        (f"{FAILED}RuntimeError: first\nbash: line 1: 77 Aborted (core dumped)\n", "first"),
    ],
    ids=["torch's prefix", "a blank line", "a warning", "hpcddp", "a shell"],
)
def test_a_message_of_several_lines_is_recorded_whole(tmp_path: Path, text: str, message: str) -> None:
    record = program_failure(COMMAND, 1, log(tmp_path, text), stop_requested=False, another_rank_failed_first=False)
    assert record is not None
    assert (record.kind, record.message) == ("RuntimeError", message)
    assert record.traceback == f"{FAILED}RuntimeError: {message}"


SPAWNED = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal"
CALLED = "subprocess.CalledProcessError: Command '['python', 'x.py']' died with <Signals.SIGKILL: 9>."


@pytest.mark.parametrize(
    ("error", "message", "exit_code"),
    [
        (f"{SPAWNED} SIGKILL", "was killed by SIGKILL, most often because it ran out of memory", 71),
        (CALLED, "was killed by SIGKILL, most often because it ran out of memory", 71),
        (f"{SPAWNED} SIGSEGV", "was killed by SIGSEGV", 70),
    ],
)
def test_a_process_of_the_program_that_a_signal_killed_is_told(
    tmp_path: Path, error: str, message: str, exit_code: int
) -> None:
    text = f"W1126 03:15:09.041000 77 torch/multiprocessing/spawn.py:169] Terminating process 78\n{FAILED}{error}\n"
    record = program_failure(COMMAND, 1, log(tmp_path, text), stop_requested=False, another_rank_failed_first=False)
    assert record is not None
    assert record.message == f"a process that python train.py started {message}"
    assert (record.kind, record.exit_code, record.secondary) == ("killed", exit_code, False)


LAUNCHED = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 7, in <module>
[rank0]: Traceback (most recent call last):
[rank1]:     raise ValueError("boom")
[rank1]: ValueError: boom
[rank0]:   File "train.py", line 4, in <module>
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:148.
W1122 19:17:36 1916 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 3361 closing signal SIGTERM
"""
SUMMARY = """\
Traceback (most recent call last):
  File "/v/bin/torchrun", line 6, in <module>
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_19:17:36
  host      : localhost
  rank      : 9 (local_rank: 0)
  exitcode  : -15 (pid: 3361)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 3361
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_19:17:36
  host      : localhost
  rank      : RANK (local_rank: 1)
  exitcode  : CODE (pid: 3364) 
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""  # noqa: W291  torchrun writes the blanks at the ends of its lines
BEFORE_THE_WORLD = 'Traceback (most recent call last):\n  File "train.py"\nImportError: no module\n'


@pytest.mark.parametrize(
    ("text", "rank", "code", "who", "kind", "message", "exit_code"),
    [
        (LAUNCHED, 1, 1, "rank 1", "ValueError", "boom", 70),
        # The launcher has noticed first that another rank lost its peer.
        (LAUNCHED, 0, 1, "rank 1", "ValueError", "boom", 70),
        (LAUNCHED, 3, -9, "rank 3", "killed", "was killed by SIGKILL, most often because it ran out of memory", 71),
        (BEFORE_THE_WORLD, 2, 1, "rank 2", "ImportError", "no module", 70),
        ("", 2, 3, "rank 2", "exit", "ended with exit code 3", 70),
        ("", 2, 75, "rank 2", "exit", "create $HPCDDP_REQUEUE_FILE and end with 0", 70),
    ],
)
def test_the_failure_of_a_launcher_is_that_of_the_rank_that_failed_first(
    tmp_path: Path, text: str, rank: int, code: int, who: str, kind: str, message: str, exit_code: int
) -> None:
    printed = log(tmp_path, text + SUMMARY.replace("RANK", str(rank)).replace("CODE", str(code)))
    record = program_failure(COMMAND, 1, printed, stop_requested=False, another_rank_failed_first=False)
    assert record is not None
    assert (record.who, record.kind, record.exit_code, record.secondary) == (who, kind, exit_code, False)
    assert message in record.message
    assert record.place.startswith(who)
    assert "ChildFailedError" not in record.traceback


def test_ranks_of_a_launcher_that_only_lost_a_peer_on_another_node_are_secondary(tmp_path: Path) -> None:
    lost = "".join(line for line in LAUNCHED.splitlines(keepends=True) if line.startswith("[rank0]"))
    printed = log(tmp_path, lost + SUMMARY.replace("RANK", "0").replace("CODE", "1"))
    record = program_failure(COMMAND, 1, printed, stop_requested=False, another_rank_failed_first=False)
    assert record is not None
    assert (record.secondary, record.exit_code) == (True, 71)


def test_a_server_that_the_program_itself_could_not_reach_is_no_lost_peer(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "ConnectionRefusedError: [Errno 111] Connection refused\n"
    )
    failure = program_failure(
        ["python", "train.py"], 1, tmp_path / "log", stop_requested=False, another_rank_failed_first=False
    )
    assert failure is not None
    assert (failure.secondary, failure.exit_code) == (False, 70)


def test_a_program_that_was_ended_while_it_exited_is_named_by_its_own_error(tmp_path: Path) -> None:
    record = program_failure(
        COMMAND,
        -15,
        log(tmp_path, BOOM),
        stop_requested=True,
        another_rank_failed_first=True,
        sigterm_forwarded=True,
    )
    assert record is not None
    assert (record.kind, record.message, record.secondary) == ("ValueError", "boom", True)
