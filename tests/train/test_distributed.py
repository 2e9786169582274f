"""The trace of the newest collectives, and the end of a process group."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpcddp.run.collectives import read_collectives, write_trace
from hpcddp.run.directory import RunDirectory
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.train.distributed import DeviceError, choose_device, collective_trace
from tests.forked_python import run_python
from tests.messages import GoldenMessages


@pytest.mark.usefixtures("group")
def test_the_recorder_of_gloo_is_read(tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(3))
    trace = collective_trace()
    assert trace is not None
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    write_trace(attempt, 0, trace)
    last = read_collectives(attempt)[0][-1]
    assert (last.group, last.call) == ("0 (default_pg)", "all_reduce Float[3]")


@pytest.mark.parametrize(
    ("versions", "variables", "facts"),
    [
        ({"cuda": "13.0", "hip": None}, {}, "nvidia-smi shows"),
        ({"cuda": None, "hip": "7.2.26015"}, {"ROCR_VISIBLE_DEVICES": "4,5"}, "rocm-smi (or amd-smi) shows"),
        (
            {"cuda": None, "hip": "7.2.26015"},
            {"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5"},
            "ROCR_VISIBLE_DEVICES=4,5 and CUDA_VISIBLE_DEVICES=4,5 hide GPUs",
        ),
        ({"cuda": None, "hip": None}, {}, "its torch is built for CPUs only"),
    ],
    ids=["nvidia", "amd", "amd-two-variables", "cpu"],
)
def test_a_rank_without_a_gpu_says_what_hides_it(
    versions: dict[str, str | None],
    variables: dict[str, str],
    facts: str,
    monkeypatch: pytest.MonkeyPatch,
    golden: GoldenMessages,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, version in versions.items():
        monkeypatch.setattr(torch.version, name, version)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    env = RankEnv(rank=3, local_rank=3, world_size=4, local_world_size=4, node_rank=0, nodes=1, source="slurm")
    with pytest.raises(DeviceError) as refused:
        choose_device(env, "cuda")
    host = socket.gethostname()
    message = golden.message(refused.value, {f" on {host} ": " on HOST "})
    assert message.startswith(f"rank 3 on {host} sees no GPU, but the job asks for GPUs; ")
    assert facts in message


def test_without_a_group_there_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert collective_trace() is None


def test_a_process_group_that_cannot_be_closed_ends_the_process_with_all_of_its_output() -> None:
    code = (
        "import time\n"
        "from datetime import timedelta\n"
        "from hpcddp.train.distributed import _exit_after\n"
        "print('the last line')\n"
        "with _exit_after(timedelta(seconds=0.1)):\n"
        "    time.sleep(600)\n"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "the last line\n")
