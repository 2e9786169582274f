"""Which launcher a command starts, and how many of them would share a world."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.launchers import World, find_launcher, launcher_command_of, launcher_of
from tests.facts import assert_facts
from tests.messages import GoldenMessages

ALONE = ("each of the 4 tasks", "a training of its own")


def obstacle(words: list[str], *, nodes: int = 2, **environment: str) -> str | None:
    launcher = find_launcher(words, environment)
    return None if launcher is None else launcher.obstacle(tasks=4, nodes=nodes)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["torchrun", "a.py", "--nnodes=4"], "python a.py --nnodes=4"),
        (["/venv/bin/torchrun", "--nproc_per_node", "2", "a.py", "--lr", "1"], "python a.py --lr 1"),
        (["torchrun", "--nnodes=1", "a.py"], "python a.py"),
        (["torchrun", "--nnodes", "1:1", "-m", "pkg.a", "-x"], "python -m pkg.a -x"),
        (["torchrun", "--nnode=1", "a.py"], "python a.py"),
        (["torchrun", "--standalone", "--nnodes=4", "--no-python", "./a.sh"], "./a.sh"),
        (["torchrun", "--rdzv_endpoint=localhost:29500", "--rdzv-backend", "c10d", "a.py"], "python a.py"),
        (["torchrun", "--rdzv-endpoint", "n1:29500", "a.py"], "python a.py"),
        (["python3.11", "-u", "-m", "torch.distributed.run", "a.py"], "python3.11 -u a.py"),
        (["/v/python", "-m", "torch.distributed.launch", "--use_env", "a.py"], "/v/python a.py"),
        (["python", "/venv/bin/torchrun", "a.py"], "python a.py"),
        (["env", "A=b", "-u", "C", "torchrun", "a.py"], None),
        (["env", "-u", "C", "A=b", "torchrun", "a.py"], "env -u C A=b python a.py"),
        (["uv", "run", "torchrun", "a.py"], "uv run python a.py"),
        (["uv", "run", "--no-sync", "--with", "x", "--python=3.11", "torchrun", "a.py"],
         "uv run --no-sync --with x --python=3.11 python a.py"),
        (["uv", "run", "-m", "torch.distributed.run", "a.py"], "uv run python a.py"),
        (["bash", "-c", "torchrun --nnodes=1 'a b.py'"], "python 'a b.py'"),
        (["/bin/bash", "-euo", "pipefail", "-c", "exec torchrun a.py"], "python a.py"),
        (["sh", "-c", "env A=b uv run torchrun a.py"], "env A=b uv run python a.py"),
        (["accelerate", "launch", "--mixed_precision", "bf16", "a.py", "--lr", "1"], "python a.py --lr 1"),
        (["accelerate", "launch", "--num_processes=2", "--num_machines", "1", "a.py"], "python a.py"),
        (["accelerate-launch", "a.py"], "python a.py"),
        (["python", "-m", "accelerate.commands.launch", "--multi_gpu", "a.py"], "python a.py"),
    ],
)  # fmt: skip
def test_a_launcher_that_is_a_world_by_itself_is_found_with_the_command_to_write_instead(
    words: list[str], instead: str | None, golden: GoldenMessages
) -> None:
    if instead is None:
        # env(1) takes no options behind a variable.
        assert find_launcher(words, {}) is None
        return
    assert_facts(golden.message(obstacle(words)), *ALONE)
    launcher = find_launcher(words, {})
    assert launcher is not None
    assert shlex.join(launcher.program) == instead


@pytest.mark.parametrize(
    "text",
    [
        "cd sub && torchrun --nnodes=1 a.py",
        "A=b torchrun a.py --lr $LR",
        "export A=b\n# a comment\ntorchrun \\\n  --nnodes=1 \\\n  a.py > log 2>&1",
        "torchrun a.py; echo done",
    ],
)
def test_a_launcher_among_other_commands_of_a_shell_is_seen(text: str, golden: GoldenMessages) -> None:
    assert_facts(golden.message(obstacle(["bash", "-c", text])), *ALONE)
    launcher = find_launcher(["bash", "-c", text], {})
    assert launcher is not None
    assert launcher.program == ()
    assert_facts(golden.message(launcher.advice), "leave torchrun and its options out")


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "--nnodes=4", "a.py"],
        ["torchrun", "--nnodes", "1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500", "a.py"],
        ["torchrun", "--nnodes=2:8", "a.py"],
        ["bash", "-c", "torchrun --nnodes=$SLURM_NTASKS --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT a.py"],
        ["bash", "-c", "torchrun --nproc-per-node=$(nvidia-smi -L | wc -l) --nnodes=4 a.py"],
        ["bash", "-c", "if [ $SLURM_PROCID = 0 ]; then torchrun --standalone check.py; fi; python a.py"],
        ["bash", "-c", "export PET_NNODES=4; torchrun a.py"],
        ["bash", "-c", "python a.py 'it is torchrun"],
        ["bash", "run.sh", "torchrun"],
        ["env", "PET_NNODES=4", "torchrun", "a.py"],
        ["torchrun", "--an-option-of-tomorrow", "x", "--nnodes=4", "a.py"],
        ["torchrun"],
        ["uv", "run", "--an-option-of-tomorrow", "x", "torchrun", "a.py"],
        ["uv", "pip", "install", "torchrun"],
        ["accelerate", "launch", "--config_file", "four.yaml", "a.py"],
        ["accelerate", "launch", "--num_machines=4", "--machine_rank=0", "a.py"],
        ["accelerate", "launch", "--num_processes", "1", "--mixed_precision=bf16", "a.py"],
        ["accelerate", "config"],
        ["python", "a.py", "torchrun"],
        ["python", "-m", "pkg.torchrun"],
        ["python", "-c", "torchrun"],
        ["python", "-W", "ignore", "a.py"],
        ["python"],
        ["echo", "torchrun", "a.py"],
        [],
    ],
)  # fmt: skip
def test_launchers_that_can_share_one_world_are_not_refused(words: list[str]) -> None:
    assert obstacle(words) is None


def test_launchers_for_another_number_of_nodes_than_tasks_are_found(golden: GoldenMessages) -> None:
    words = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "a.py"]
    assert_facts(golden.message(obstacle(words)), "--nnodes is 2", "4 tasks", "one torchrun")
    words = ["torchrun", "--nnodes=6:8", "a.py"]
    assert_facts(golden.message(obstacle(words)), "--nnodes is 6:8", "4 tasks", "one torchrun")
    words = ["accelerate", "launch", "--num_machines", "2", "a.py"]
    assert_facts(golden.message(obstacle(words)), "--num_machines is 2", "4 tasks", "one accelerate launch")


@pytest.mark.parametrize("host", ["localhost:29500", "127.0.0.1", "[::1]:29500", "0.0.0.0:29500", ":29500"])
def test_launchers_on_several_hosts_do_not_meet_at_localhost(host: str, golden: GoldenMessages) -> None:
    words = ["torchrun", "--nnodes=4", f"--rdzv-endpoint={host}", "a.py"]
    assert_facts(golden.message(obstacle(words)), f"{host} means another host", "the 2 nodes")
    assert obstacle(words, nodes=1) is None


def test_a_variable_of_torchrun_is_the_default_of_its_option(golden: GoldenMessages) -> None:
    assert obstacle(["torchrun", "a.py"], PET_NNODES="4") is None
    assert_facts(golden.message(obstacle(["torchrun", "--nnodes=1", "a.py"], PET_NNODES="4")), *ALONE)


WORLD = World(
    nodes=2, node_rank=1, ranks_per_node=4, address="10.0.0.1", port=29000, name="r-0", environment={"HOME": "/none"}
)
TORCHRUN = (
    "--nnodes=2 --nproc-per-node=4 --rdzv-backend=static --rdzv-id=r-0 --node-rank=1 --master-addr=10.0.0.1 "
    "--master-port=29000"
)
ACCELERATE = (
    "--num_machines=2 --num_processes=8 --machine_rank=1 --main_process_ip=10.0.0.1 --main_process_port=29000 "
    "--deepspeed_multinode_launcher=standard"
)


def filled_in(words: str, world: World = WORLD) -> str:
    command = launcher_command_of(tuple(shlex.split(words)))
    assert command is not None
    assert command.meeting_option is None
    return shlex.join(command.in_world(world))


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ("torchrun a.py --nnodes 9", f"torchrun {TORCHRUN} a.py --nnodes 9"),
        ("torchrun --nproc-per-node=gpu -- a.py", f"torchrun --nproc-per-node=gpu {TORCHRUN} a.py"),
        ("/v/torchrun --max-restarts 3 -m pkg.a -x", f"/v/torchrun --max-restarts 3 -m {TORCHRUN} pkg.a -x"),
        ("python3 -u -m torch.distributed.run a.py", f"python3 -u -m torch.distributed.run {TORCHRUN} a.py"),
        ("env A=b uv run torchrun a.py", f"env A=b uv run torchrun {TORCHRUN} a.py"),
        ("accelerate launch a.py --cpu", f"accelerate launch {ACCELERATE} --multi_gpu a.py --cpu"),
        ("accelerate launch --use_fsdp -m pkg.a", f"accelerate launch {ACCELERATE} --use_fsdp -m pkg.a"),
    ],
)
def test_the_options_that_join_the_launchers_of_all_nodes_are_filled_in(words: str, started: str) -> None:
    assert filled_in(words) == started


@pytest.mark.parametrize(
    ("kind", "is_own"), [("NO", False), ("MULTI_GPU", False), ("FSDP", True), ("DEEPSPEED", True), (None, False)]
)
def test_the_kind_of_training_in_a_configuration_of_accelerate_stays(
    tmp_path: Path, kind: str | None, *, is_own: bool
) -> None:
    text = "mixed_precision: bf16\n" + (f"distributed_type: {kind}\n" if kind else "")
    (tmp_path / "one.yaml").write_text(text)
    options = "" if is_own else " --multi_gpu"
    words = f"--config_file {tmp_path}/one.yaml a.py"
    assert filled_in(f"accelerate launch {words}") == f"accelerate launch {ACCELERATE}{options} {words}"
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(text)
    at_home = replace(WORLD, environment={"HF_HOME": str(tmp_path)})
    assert filled_in("accelerate launch a.py", at_home) == f"accelerate launch {ACCELERATE}{options} a.py"


def test_a_configuration_that_is_a_pipe_is_left_to_accelerate(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    words = f"--config_file {tmp_path}/pipe.yaml a.py"
    assert filled_in(f"accelerate launch {words}") == f"accelerate launch {ACCELERATE} --multi_gpu {words}"


def job_of(words: str, **resources: int) -> JobSpec:
    return JobSpec.model_validate({"name": "a", "resources": resources, "command": tuple(shlex.split(words))})


@pytest.mark.parametrize(
    ("words", "resources", "ranks"),
    [
        ("torchrun a.py", {"nodes": 2, "gpus_per_node": 4}, 4),
        ("torchrun --nproc-per-node 4 a.py", {}, 4),
        ("torchrun --nproc-per-node auto a.py", {"gpus_per_node": 4}, 4),
        ("torchrun --nnodes 2 a.py", {"nodes": 2, "tasks_per_node": 3}, 3),
        ("accelerate launch --num_processes 8 a.py", {"nodes": 2}, 4),
        ("accelerate launch a.py", {"tasks_per_node": 3}, 3),
    ],
)
def test_a_launcher_is_one_task_on_each_node_with_the_cpus_of_its_ranks(
    words: str, resources: dict[str, int], ranks: int
) -> None:
    job = job_of(words, cpus_per_task=5, **resources)
    assert job.launcher_command is not None
    assert (job.ranks_per_node, job.world_size) == (ranks, ranks * job.nodes)
    assert (job.tasks_per_node, job.tasks, job.cpus_per_task) == (1, job.nodes, 5 * ranks)


@pytest.mark.parametrize(
    "words",
    [
        "torchrun --standalone --nproc-per-node 2 a.py",
        "torchrun --nnodes 1:2 a.py",
        "torchrun --nnodes 4 a.py",
        "torchrun --rdzv-backend=c10d --rdzv-endpoint=n1:29500 --nnodes=2 a.py",
        "torchrun --nnodes=2 --node_rank=0 a.py",
        "torchrun --an-option-of-tomorrow x a.py",
        f"torchrun --nnodes {'9' * 5000} a.py",
        "accelerate launch --num_processes 1 a.py",
        "accelerate launch --machine_rank 0 a.py",
        "accelerate launch --cpu a.py",
        "bash -c 'torchrun a.py'",
        "bash torchrun",
        "python a.py",
    ],
)
def test_every_task_is_a_rank_where_the_command_starts_a_world_in_its_own_way(words: str) -> None:
    job = job_of(words, nodes=2, tasks_per_node=2)
    assert job.launcher_command is None
    assert (job.tasks, job.world_size) == (4, 4)


def test_a_single_rank_needs_no_launcher_unless_the_job_names_it() -> None:
    assert job_of("torchrun a.py").launcher_command is None
    named = JobSpec.model_validate({"name": "a", "launcher": "torchrun", "command": ("torchrun", "a.py")})
    assert named.launcher_command is not None


def test_a_shell_is_no_launcher_itself() -> None:
    assert launcher_of(["bash", "-c", "torchrun a.py"], {}) is None
    assert launcher_of(["/v/python", "/v/bin/accelerate", "launch", "a.py"], {}) is not None
