from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.slurm.rank_env import RankEnv, RankEnvError
from tests.facts import assert_facts
from tests.messages import GoldenMessages

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "123",
}
SUBMITIT = {
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}


def test_a_task_of_srun_has_its_rank() -> None:
    assert RankEnv.from_env(SLURM) == RankEnv(
        rank=3,
        local_rank=1,
        world_size=5,
        local_world_size=2,
        node_rank=1,
        nodes=3,
        hosts=("n1", "n2", "n3"),
        tasks_per_node=(2, 2, 1),
        job_id="123",
        restart_count=0,
        source="slurm",
    )


def test_an_array_element_and_a_requeue_are_seen() -> None:
    env = RankEnv.from_env(
        {**SLURM, "SLURM_ARRAY_JOB_ID": "120", "SLURM_ARRAY_TASK_ID": "4", "SLURM_RESTART_COUNT": "2"}
    )
    assert (env.job_id, env.restart_count) == ("120_4", 2)


def test_a_task_of_submitits_local_executor_has_its_rank() -> None:
    assert RankEnv.from_env(SUBMITIT) == RankEnv(
        rank=1,
        local_rank=1,
        world_size=2,
        local_world_size=2,
        node_rank=0,
        nodes=1,
        tasks_per_node=(2,),
        job_id="4711",
        source="submitit",
    )


def test_a_task_of_torchrun_has_its_rank() -> None:
    assert RankEnv.from_env(TORCHRUN) == RankEnv(
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
        node_rank=1,
        nodes=2,
        restart_count=2,
        source="torchrun",
    )


@pytest.mark.parametrize(
    ("env", "source"),
    [
        ({**SLURM, **TORCHRUN}, "torchrun"),
        ({**SLURM, **SUBMITIT}, "submitit"),
        ({**SUBMITIT, **TORCHRUN}, "torchrun"),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}, "slurm"),
    ],
)
def test_the_innermost_launcher_wins(env: dict[str, str], source: str) -> None:
    assert RankEnv.from_env(env).source == source


def test_exports_are_what_torch_reads() -> None:
    assert RankEnv.from_env(SLURM).exports("n1", 20123) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "20123",
    }


def test_the_rank_is_read_back_from_the_variables_set_instead_of_srun() -> None:
    env = RankEnv.from_env(SLURM)
    given = env.slurm_exports()
    assert RankEnv.from_env(given) == env
    assert {name: value for name, value in given.items() if name not in SLURM} == {
        "SLURM_NTASKS": "5",
        "SLURM_NPROCS": "5",
        "SLURM_NNODES": "3",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2,2,1",
        "SLURM_NODELIST": "n1,n2,n3",
        "SLURM_JOB_NODELIST": "n1,n2,n3",
    }


def test_every_rank_has_its_host() -> None:
    env = RankEnv.from_env(SLURM)
    assert [env.host_of(rank) for rank in range(5)] == ["n1", "n1", "n2", "n2", "n3"]


def test_hosts_that_are_not_given_are_none() -> None:
    assert RankEnv.from_env(SUBMITIT).host_of(0) is None


def test_under_another_distribution_only_the_own_host_and_the_first_are_known() -> None:
    env = RankEnv.from_env(
        {**SLURM, "SLURM_DISTRIBUTION": "cyclic:block", "SLURM_PROCID": "4", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}
    )
    assert [env.host_of(rank) for rank in range(5)] == ["n1", None, None, None, "n2"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_ranks_of_a_step_agree_on_everything(tasks: list[int]) -> None:
    firsts = list(accumulate(tasks, initial=0))
    envs = [
        RankEnv.from_env(
            {
                "SLURM_PROCID": str(firsts[node] + local),
                "SLURM_LOCALID": str(local),
                "SLURM_NODEID": str(node),
                "SLURM_STEP_NUM_TASKS": str(sum(tasks)),
                "SLURM_STEP_NUM_NODES": str(len(tasks)),
                "SLURM_STEP_NODELIST": f"n[1-{len(tasks)}]",
                "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)),
            }
        )
        for node, count in enumerate(tasks)
        for local in range(count)
    ]
    assert [env.rank for env in envs] == list(range(sum(tasks)))
    assert all(env.host_of(other.rank) == f"n{other.node_rank + 1}" for env in envs for other in envs)


CONTRADICTIONS = [
    ({"SLURM_PROCID": "5"}, ("the rank is 5", "the world size, 5")),
    ({"SLURM_LOCALID": "2"}, ("the local rank is 2", "the number of ranks on this node, 2")),
    ({"SLURM_NODEID": "3"}, ("the node rank is 3", "the number of nodes, 3")),
    ({"SLURM_PROCID": "2"}, ("rank 2 is local rank 1 of node 1", "the first rank of that node is 2")),
    ({"SLURM_STEP_NUM_TASKS": "6"}, ("the tasks per node (2, 2, 1)", "6 tasks on 3 nodes")),
    ({"SLURM_STEP_NODELIST": "n[1-2]"}, ("2 host names (n1, n2)", "3 nodes")),
    ({"SLURM_STEP_NODELIST": "n[1-"}, ("SLURM_STEP_NODELIST", "'n[1-'", "at character 2")),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ("SLURM_STEP_TASKS_PER_NODE is '2(x2)'", "3 nodes")),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x999999999)"}, ("SLURM_STEP_TASKS_PER_NODE is '2(x999999999)'", "3 nodes")),
    ({"SLURM_STEP_TASKS_PER_NODE": "two"}, ("SLURM_STEP_TASKS_PER_NODE is 'two'", "3 nodes")),
    ({"SLURM_PROCID": "-1"}, ("SLURM_PROCID is '-1'", "0 or more")),
    ({"SLURM_PROCID": "٣"}, ("SLURM_PROCID is '٣'", "0 or more")),
    ({"SLURM_PROCID": "9" * 10}, (f"SLURM_PROCID is '{'9' * 10}'", "0 or more")),
    ({"SLURM_STEP_NUM_NODES": "0"}, ("SLURM_STEP_NUM_NODES is 0", "at least one")),
]


@pytest.mark.parametrize(("change", "facts"), CONTRADICTIONS, ids=[str(change) for change, _ in CONTRADICTIONS])
def test_numbers_that_contradict_each_other_are_named(
    change: dict[str, str], facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    with pytest.raises(RankEnvError) as caught:
        RankEnv.from_env({**SLURM, **change})
    assert_facts(golden.message(caught.value), *facts)


def test_more_local_ranks_than_the_world_has_room_for_are_refused(golden: GoldenMessages) -> None:
    with pytest.raises(RankEnvError) as caught:
        RankEnv.from_env({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"})
    assert_facts(golden.message(caught.value), "8 ranks on this node", "the other 1", "the world size 8")


def test_submitits_local_executor_has_one_node(golden: GoldenMessages) -> None:
    with pytest.raises(RankEnvError) as caught:
        RankEnv.from_env({**SUBMITIT, "SUBMITIT_LOCAL_JOB_NUM_NODES": "2"})
    assert_facts(golden.message(caught.value), "SUBMITIT_LOCAL_JOB_NUM_NODES is 2", "has one node")


@pytest.mark.parametrize(
    ("env", "name"),
    [(env, name) for env in (SLURM, SUBMITIT, TORCHRUN) for name in env if name not in {
        "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SUBMITIT_LOCAL_GLOBALID", "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    }],
)  # fmt: skip
def test_a_variable_that_is_missing_is_named(env: dict[str, str], name: str, golden: GoldenMessages) -> None:
    with pytest.raises(RankEnvError) as caught:
        RankEnv.from_env({key: value for key, value in env.items() if key != name})
    assert_facts(golden.message(caught.value), f"{name} is not set", "what starts the ranks should set it")


def test_a_batch_script_is_not_a_rank(golden: GoldenMessages) -> None:
    # Slurm gives the batch script itself a rank, a local rank and a node, but no step.
    with pytest.raises(RankEnvError) as caught:
        RankEnv.from_env({"SLURM_JOB_ID": "123", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    message = golden.message(caught.value)
    assert_facts(message, "inside Slurm job 123", "SLURM_STEP_NUM_TASKS is not set", "start it with srun")


@pytest.mark.parametrize("env", [{}, {"RANK": "0", "WORLD_SIZE": "1", "PATH": "/bin"}])
def test_a_process_without_a_launcher_is_refused(env: dict[str, str], golden: GoldenMessages) -> None:
    with pytest.raises(RankEnvError) as caught:
        RankEnv.from_env(env)
    message = golden.message(caught.value)
    assert_facts(message, "which rank this process is", "start it with srun, torchrun, or hpcddp submit")
