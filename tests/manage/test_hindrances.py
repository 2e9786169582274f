"""Ranks on the wrong CPUs, and sockets between the nodes, are told by why and report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path

import pytest

from hpcddp import vendors
from hpcddp.jobfile.read import load_job
from hpcddp.manage.hindrances import hindrances
from hpcddp.manage.overview import entry_of, overview_of
from hpcddp.manage.report import reports_of
from hpcddp.manage.report_page import page
from hpcddp.manage.run_files import read_run_files
from hpcddp.manage.status import RunStatus, statuses
from hpcddp.manage.why import explain
from hpcddp.run.job_records import Binding, Rank, write_ranks
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.task.binding import binding_of
from tests.facts import assert_facts
from tests.machines import DGX_A100, DGX_H100, GH200, LUMI, Machine, write_file
from tests.manage.runs import NOON, FakeRun, make
from tests.messages import GoldenMessages

# The CPUs of each rank where the first core beside each cache is the system's, as on Frontier and LUMI.
WITHOUT_FIRST_CORES = [f"{8 * rank + 1}-{8 * rank + 7}" for rank in range(8)]
# As LUMI's documentation places them.
NEAR_ON_LUMI = ["49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47"]


@pytest.fixture
def made(tmp_path: Path) -> FakeRun:
    return make(tmp_path / "runs").submitted().started()


BindRanks = Callable[..., list[Binding | None]]


@pytest.fixture
def bind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BindRanks:
    """Return a function that returns what the ranks of a node record when srun has bound them to CPUs."""
    monkeypatch.setattr(vendors, "ROOT", tmp_path / "root")

    def bind_ranks(
        cpus_of_ranks: Sequence[str],
        *,
        cpus_per_task: int = 7,
        gpus: int | None = None,
        command: str = "python train.py",
        **environment: str,
    ) -> list[Binding | None]:
        job = tmp_path / "job.yaml"
        gpus = len(cpus_of_ranks) if gpus is None else gpus
        job.write_text(
            f"name: a\nresources: {{tasks_per_node: {gpus or len(cpus_of_ranks)}, gpus_per_node: {gpus}, "
            f"cpus_per_task: {cpus_per_task}}}\ncommand: [{', '.join(command.split())}]\n"
        )
        spec = load_job(job).spec
        bindings = []
        for rank, cpus in enumerate(cpus_of_ranks):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpus=cpus: set(map(int, expand(f"[{cpus}]"))))
            count = len(cpus_of_ranks)
            env = RankEnv(
                rank=rank,
                local_rank=rank,
                world_size=count,
                local_world_size=count,
                node_rank=0,
                nodes=1,
                source="slurm",
            )
            bindings.append(binding_of(spec, env, environment))
        return bindings

    return bind_ranks


def status(made: FakeRun) -> RunStatus:
    return statuses([read_run_files(made.run)], ask=list, now=NOON + 100).runs[0]


def told(made: FakeRun, *nodes: Sequence[Binding | None], launcher: str | None = None) -> list[str]:
    """Return what is told of ranks on the nodes n1, n2, ..."""
    ranks = []
    for number, bindings in enumerate(nodes, start=1):
        ranks += [Rank(host=f"n{number}", launcher=launcher, binding=bound) for bound in bindings]
    write_ranks(made.attempt(), ranks)
    return list(hindrances(status(made)))


@pytest.mark.parametrize(
    ("machine", "right"),
    [
        pytest.param(DGX_H100, [f"{14 * rank}-{14 * rank + 13}" for rank in range(8)], id="DGX H100"),
        pytest.param(DGX_H100, ["0-55"] * 4 + ["56-111"] * 4, id="DGX H100 by NUMA nodes"),
        pytest.param(DGX_A100, [DGX_A100.numa_nodes[node] for node in (3, 3, 1, 1, 7, 7, 5, 5)], id="DGX A100"),
        pytest.param(LUMI, NEAR_ON_LUMI, id="LUMI"),
        pytest.param(GH200, GH200.numa_nodes, id="GH200"),
        pytest.param(DGX_H100, ["0-223"] * 8, id="no binding"),
        pytest.param(LUMI, ["1-63"] * 8, id="all CPUs of the job"),
    ],
)
def test_nothing_is_told_of_ranks_beside_their_gpus(
    made: FakeRun, tmp_path: Path, bind: BindRanks, machine: Machine, right: Sequence[str]
) -> None:
    machine.write(tmp_path / "root")
    assert told(made, bind(right)) == []


@pytest.mark.parametrize(
    ("machine", "wrong", "far", "right"),
    [
        # As Slurm distributes tasks over sockets by default.
        pytest.param(
            DGX_H100, ["0-6", "56-62", "7-13", "63-69", "14-20", "70-76", "21-27", "77-83"], 4,
            ["0-27"] * 4 + ["56-83"] * 4, id="DGX H100",
        ),
        pytest.param(
            DGX_A100, DGX_A100.numa_nodes, 8, [DGX_A100.numa_nodes[node] for node in (3, 3, 1, 1, 7, 7, 5, 5)],
            id="DGX A100",
        ),
        pytest.param(
            LUMI, WITHOUT_FIRST_CORES, 6,
            [f"{first}-{first + 6},{first + 8}-{first + 14}" for first in (49, 49, 17, 17, 1, 1, 33, 33)], id="LUMI",
        ),
        pytest.param(
            GH200, ["0-71", "144-215", "72-143", "216-287"], 2, ["0-71", "72-143", "144-215", "216-287"], id="GH200"
        ),
    ],
)  # fmt: skip
def test_ranks_on_another_numa_node_than_their_gpus_are_told_with_the_flag_that_places_them(
    made: FakeRun,
    tmp_path: Path,
    bind: BindRanks,
    machine: Machine,
    wrong: Sequence[str],
    far: int,
    right: Sequence[str],
) -> None:
    """srun takes only CPUs that the step has, and a map of NUMA nodes only where it has all CPUs of a node."""
    machine.write(tmp_path / "root")
    bindings = bind(wrong)
    (sentence,) = told(made, bindings)
    assert_facts(sentence, f"{far} of {len(wrong)} ranks", "n1", "resources.exclusive")
    masks = ",".join(hex(sum(1 << int(cpu) for cpu in expand(f"[{cpus}]"))) for cpus in right)
    assert sentence.endswith(f'resources.srun: {{cpu-bind: "mask_cpu:{masks}"}}')
    assert told(made, bindings, bindings, bindings) == [sentence]
    assert told(made, bind(right)) == []


def test_a_job_without_a_cpu_beside_each_gpu_has_to_ask_for_more(
    made: FakeRun, tmp_path: Path, bind: BindRanks, golden: GoldenMessages
) -> None:
    DGX_A100.write(tmp_path / "root")
    (sentence,) = told(made, bind([f"{rank}" for rank in range(8)], cpus_per_task=1))
    assert golden.message(sentence).endswith("; raise resources.cpus_per_task, until the job has CPUs beside each GPU")


def test_ranks_that_share_too_few_cpus_are_told(made: FakeRun, tmp_path: Path, bind: BindRanks) -> None:
    LUMI.write(tmp_path / "root")
    (sentence,) = told(made, bind(NEAR_ON_LUMI), bind(["1"] * 8))
    assert_facts(sentence, "all ranks on n2", "CPUs (1),", "56", "resources.srun: {cpu-bind: cores}")
    assert told(made, bind(["1-56"] * 8)) == []


def test_a_launcher_that_has_too_few_cpus_for_its_ranks_is_told(made: FakeRun, tmp_path: Path, bind: BindRanks) -> None:
    """A task that starts torchrun has the CPUs of all its ranks; where they would be far from a GPU is not known."""
    LUMI.write(tmp_path / "root")
    (sentence,) = told(made, bind(["0"], gpus=8, command="torchrun train.py"), launcher="torchrun")
    assert_facts(sentence, "CPUs (0),", "56")
    (bound,) = bind(["0-55"], gpus=8, command="torchrun train.py")
    assert bound == Binding(cpus="0-55", cpus_needed=56)


@pytest.mark.parametrize(
    ("denied", "environment", "address"),
    [
        (range(2, 8), {}, "0000:0f:00.0"),
        ((), {}, ""),
        ((), {"CUDA_VISIBLE_DEVICES": "4,5"}, "0000:90:00.0"),
        ((), {"CUDA_VISIBLE_DEVICES": "4,5", "ROCR_VISIBLE_DEVICES": "4,5"}, "0000:90:00.0"),
        ((), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ""),
        ((), {"CUDA_VISIBLE_DEVICES": "6"}, "0000:b7:00.0"),
        (range(6), {"CUDA_VISIBLE_DEVICES": "0,1"}, "0000:bd:00.0"),
        (range(7), {"CUDA_VISIBLE_DEVICES": "0"}, "0000:bd:00.0"),
        ((), {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, ""),
        (range(6), {"CUDA_VISIBLE_DEVICES": "2,3"}, ""),
        (range(8), {}, ""),
    ],
)
def test_the_gpu_of_a_rank_is_the_one_that_cuda_would_give_it(
    tmp_path: Path, bind: BindRanks, denied: Sequence[int], environment: dict[str, str], address: str
) -> None:
    DGX_A100.write(tmp_path / "root", denied=denied)
    _, bound = bind(["0-7", "8-15"], **environment)
    assert bound is not None
    assert bound.gpu_address == address
    assert bool(bound.gpu_cpus) == bool(address)


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, "0000:d6:00.0"),
        # Of these, HIP heeds the second one only if the first one is empty.
        ({"HIP_VISIBLE_DEVICES": "3,2", "CUDA_VISIBLE_DEVICES": "1,0"}, "0000:d1:00.0"),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1,0"}, "0000:c9:00.0"),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "1"}, "0000:d6:00.0"),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, ""),
    ],
)
def test_a_rank_of_amds_gpus_has_the_one_that_rocm_would_give_it(
    tmp_path: Path, bind: BindRanks, environment: dict[str, str], address: str
) -> None:
    LUMI.write(tmp_path / "root", denied=(0, 1))
    bound = bind(["0-7", "8-15"], **environment)[1]
    cpus = {"0000:c9:00.0": LUMI.numa_nodes[1], "": ""}.get(address, LUMI.numa_nodes[0])
    assert bound == Binding(cpus="8-15", cpus_needed=7, gpu_address=address, gpu_cpus=cpus)


def test_of_several_kinds_of_gpus_none_is_given_to_a_rank(tmp_path: Path, bind: BindRanks) -> None:
    """By default CUDA counts the fastest first, and ROCm all of one kind before those of another."""
    DGX_H100.write(tmp_path / "root")
    write_file(tmp_path / "root/sys/bus/pci/devices/0000:43:00.0/device", "0x20b0")
    assert {bound.gpu_address for bound in bind([*DGX_H100.numa_nodes] * 4) if bound is not None} == {""}


def test_a_rank_without_a_gpu_and_a_machine_that_shows_nothing_are_no_error(tmp_path: Path, bind: BindRanks) -> None:
    alone = Binding(cpus="0-7", cpus_needed=7)
    assert bind(["0-7"]) == [alone]
    DGX_H100.write(tmp_path / "root")
    assert bind(["0-7"], gpus=0) == [alone]


def test_a_machine_that_does_not_tell_the_numa_node_of_its_gpus_is_no_hindrance(
    made: FakeRun, tmp_path: Path, bind: BindRanks
) -> None:
    virtual = Machine(numa_nodes=["0-3", "4-7"], gpus=[("0000:00:05.0", -1), ("0000:00:06.0", -1)], minors=range(2))
    virtual.write(tmp_path / "root")
    assert told(made, bind(["0-3", "4-7"], cpus_per_task=4)) == []


@pytest.mark.parametrize(
    "line",
    [
        "n1:924:1152 [0] NCCL INFO Using network Socket",
        "n1:45361:45361 [0] NCCL INFO NET/Socket : Using [0]ens3:172.31.12.210<0>",
        "n1:7:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0",
    ],
)
def test_sockets_between_nodes_are_told(made: FakeRun, line: str) -> None:
    made.log(0, f"begin\n{line}\n" + "step\n" * 100000)
    assert told(made, [None, None]) == []
    (sentence,) = told(made, [None], [None])
    assert_facts(sentence, "NCCL", "RCCL", "environment.modules")


def test_a_fast_network_is_no_hindrance(made: FakeRun) -> None:
    made.log(0, "n1:9:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB; OOB ib0\nn1:9:9 [0] NCCL INFO Using network IB\n")
    assert told(made, [None], [None]) == []


@pytest.mark.parametrize("cpus", ["0-x", "", "99999999999"])
def test_damaged_numbers_say_nothing(made: FakeRun, cpus: str) -> None:
    damaged = Binding(cpus=cpus, cpus_needed=7, gpu_cpus="7-1")
    assert told(made, [damaged, damaged]) == []


def test_why_and_the_report_tell_them(made: FakeRun, tmp_path: Path, bind: BindRanks, golden: GoldenMessages) -> None:
    LUMI.write(tmp_path / "root")
    (crowded,) = told(made, bind(["1"] * 8))
    assert "cores" in golden.message(crowded)
    made.log(0, "NCCL INFO Using network Socket\n")
    sockets, far = told(made, bind(WITHOUT_FIRST_CORES), bind(WITHOUT_FIRST_CORES))
    assert "sockets" in golden.message(sockets)
    assert "mask_cpu" in golden.message(far)
    lines = list(explain(status(made)).lines())
    assert {f"  {sockets}", f"  {far}"} < set(lines)
    reports = reports_of(overview_of([entry_of(made.run)], ask=list, now=NOON + 100).lines)
    assert reports[0].as_json()["hindrances"] == [sockets, far]
    shown = unescape(page(reports, title="digits", now=NOON))
    assert sockets in shown
    assert far in shown
