"""Launchers that start a world in each task: real torchrun and accelerate, two tasks on this machine."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from hpcddp.jobfile.launchers import Launcher
from hpcddp.run.directory import RunDirectory
from hpcddp.run.failure import read_failures
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.task import world_check
from hpcddp.task.world_check import WorldMonitor
from tests.facts import assert_facts, line_from
from tests.messages import GoldenMessages
from tests.submission.local_commands import ended, result, submit

pytestmark = pytest.mark.depends_on("hpcddp/supervise", "hpcddp/task", "pyproject.toml", "tests/task")
BIN = Path(sys.executable).parent
# A training that ends well in a world of any size.
TRAINS = """
import sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("world of", dist.get_world_size(), flush=True)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
dist.destroy_process_group()
"""
ADVICE = "leave torchrun and its options out"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    (tmp_path / "train.py").write_text(TRAINS)
    return tmp_path


def run(directory: Path, script: str, *, tasks: int = 2) -> RunDirectory:
    (directory / "run.sh").write_text(script)
    return ended(submit(directory, "--tasks-per-node", str(tasks), "--", "bash", "run.sh"), timeout_s=120)


def reason_of(failed: RunDirectory) -> str:
    """Return why a run failed, without the rank that said so first."""
    found = result(failed)
    assert (found["status"], found["exit_code"]) == ("failed", 70), found
    assert {record.kind for record in read_failures(failed.attempt(0)) if not record.secondary} == {"separate_worlds"}
    reason: str = found["reason"]
    return reason.partition(" failed first: ")[2]


def processes_of(run: RunDirectory) -> list[str]:
    mark = f"HPCDDP_RUN_DIR={run.path}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("bash", "-c", "torchrun --rdzv_endpoint=localhost:29500 train.py --lr 1"), "python train.py --lr 1"),
        (("bash", "-c", "accelerate launch --num_processes 2 train.py"), "python train.py"),
    ],
)
def test_a_launcher_of_one_task_is_refused_with_the_line_to_type(
    directory: Path, words: tuple[str, ...], instead: str, golden: GoldenMessages
) -> None:
    document = submit(directory, "--tasks-per-node", "2", "--", *words, code=2)
    assert not (directory / "runs").exists()
    message = golden.message(document["error"]["message"])
    assert_facts(message, "each of the 2 tasks", "a training of its own", "and its options out", f"-- {instead}")
    assert message.endswith(instead)


def test_torchrun_in_a_script_fails_the_run_at_once(directory: Path, golden: GoldenMessages) -> None:
    failed = run(directory, "torchrun --standalone --nproc-per-node=2 train.py 600\n")
    reason = golden.message(reason_of(failed))
    assert_facts(reason, "bash run.sh has started torchrun", "the 2 ranks", ADVICE, "python train.py 600")
    assert processes_of(failed) == []


def test_torchrun_in_a_script_fails_the_run_however_short_its_program_is(
    directory: Path, golden: GoldenMessages
) -> None:
    (directory / "short.sh").write_text("exit 0")
    assert_facts(golden.message(reason_of(run(directory, "torchrun --no-python bash short.sh"))), ADVICE)


def test_torchrun_that_uses_the_address_of_the_run_alone_fails_the_run(directory: Path, golden: GoldenMessages) -> None:
    """Rank 0's torchrun listens where the run's own world would, and the other one finds it there."""
    failed = run(
        directory,
        "exec torchrun --nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT train.py",
    )
    assert_facts(golden.message(reason_of(failed)), ADVICE)


@pytest.mark.long("torchrun in a script is found in the same way")
def test_accelerate_in_a_script_fails_the_run_where_it_starts_a_world(directory: Path, golden: GoldenMessages) -> None:
    failed = run(directory, "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 train.py")
    assert_facts(golden.message(reason_of(failed)), "bash run.sh has started accelerate launch")


def test_a_program_that_starts_torchrun_fails_the_run(directory: Path) -> None:
    (directory / "driver.py").write_text(
        "import subprocess\nsubprocess.run(['torchrun', '--standalone', 'train.py'], check=True)"
    )
    assert "python driver.py has started torchrun" in reason_of(
        ended(submit(directory, "--tasks-per-node", "2", "--", "python", "driver.py"), timeout_s=120)
    )


def finishes(directory: Path, script: str) -> str:
    finished = run(directory, script)
    assert result(finished)["status"] == "finished", finished.batch_log.read_text()
    return "".join(finished.attempt(0).rank_log(rank).read_text() for rank in range(2))


def test_torchrun_in_a_script_that_knows_of_the_other_tasks_is_one_world(directory: Path) -> None:
    said = finishes(
        directory,
        "torchrun --nnodes=$WORLD_SIZE --nproc-per-node=1 --rdzv-backend=c10d "
        "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT train.py",
    )
    assert said.count("world of 2") == 2


@pytest.mark.long("torchrun, above, meets by the same variables")
def test_accelerate_with_one_process_for_each_task_is_one_world(directory: Path) -> None:
    said = finishes(directory, "accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no train.py")
    assert said.count("world of 2") == 2


def test_one_rank_may_start_a_world_of_its_own(directory: Path) -> None:
    said = finishes(directory, "[ $RANK = 1 ] || torchrun --standalone train.py\npython train.py")
    assert (said.count("world of 1"), said.count("world of 2")) == (1, 2)


@pytest.mark.long("test_one_rank_may_start_a_world_of_its_own is half of it")
def test_ranks_that_have_met_may_start_worlds_of_their_own(directory: Path) -> None:
    said = finishes(directory, "python train.py 6 && torchrun --standalone train.py 6")
    assert (said.count("world of 2"), said.count("world of 1")) == (2, 2)


@pytest.mark.long("tests/cluster/test_launchers.py starts all ranks of a host by torchrun")
def test_one_task_may_be_the_whole_world(directory: Path) -> None:
    finished = run(directory, "torchrun --standalone --nproc-per-node=2 train.py", tasks=1)
    assert result(finished)["status"] == "finished"


ALONE = "have opened no process group"


def test_a_program_without_a_process_group_is_noted_by_rank_0(directory: Path, golden: GoldenMessages) -> None:
    said = finishes(directory, "python -c 'import torch, time; time.sleep(2)'\n")
    note = golden.message(line_from(said, "hpcddp: note: "))
    assert_facts(note, "the 2 tasks", ALONE, "MASTER_ADDR:MASTER_PORT", "does the whole work alone")


@pytest.mark.long("a world that meets by the variables of the run is seen in the same way")
def test_a_world_that_meets_at_an_address_of_its_own_is_not_said_to_work_alone(directory: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = finishes(
        directory,
        "exec torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d "
        f"--rdzv-endpoint=127.0.0.1:{port} train.py 2\n",
    )
    assert said.count("world of 2") == 2
    assert ALONE not in said


def test_a_group_that_was_open_between_two_looks_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert world_check._is_used(port)
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
    assert world_check._is_used(port)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert not world_check._is_used(free.getsockname()[1])


@pytest.mark.parametrize(("cpus", "is_noted"), [(1, True), (4, False), (8, False)])
def test_ranks_that_share_the_cpus_of_one_task_are_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cpus: int, *, is_noted: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    rank = RankEnv(rank=0, local_rank=0, world_size=2, local_world_size=1, node_rank=0, nodes=2, source="slurm")
    monitor = WorldMonitor(["bash", "run.sh"], rank, RunDirectory(tmp_path).attempt(0), port=1)
    for _ in range(2):
        monitor._note_cpus(Launcher(name="torchrun", option="--nnodes"), ranks=4)
    said = capsys.readouterr().err
    assert said.count("torchrun has started 4 ranks in a task with 1 of the 8 CPUs") == is_noted
    assert said.count("note: ") == is_noted


@pytest.mark.parametrize("script", ["python train.py 2\n", "sleep 2\n"])
def test_ranks_that_meet_and_programs_without_torch_are_not_noted(directory: Path, script: str) -> None:
    assert ALONE not in finishes(directory, script)
