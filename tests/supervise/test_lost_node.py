"""Whether a node has gone."""

import socket

import pytest

from hpcddp.slurm import commands
from hpcddp.supervise.attempt_facts import lost_nodes, nodes_without_records


@pytest.mark.parametrize(
    ("recorded", "silent"), [([0, 1, 2, 3], []), ([0, 1], ["n2"]), ([1, 2], []), ([3], ["n1"]), ([], ["n1", "n2"])]
)
def test_a_node_is_silent_if_none_of_its_ranks_left_a_word(recorded: list[int], silent: list[str]) -> None:
    assert nodes_without_records(["n1", "n2"], tasks_per_node=2, recorded=recorded) == silent


def test_a_silent_node_is_lost_if_its_slurmd_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.create_server(("127.0.0.1", 0)) as gone:
        addresses = {"n1": alive.getsockname(), "n2": gone.getsockname()}
        gone.close()
        monkeypatch.setattr(commands, "slurmd_address", addresses.__getitem__)
        environment = {"SLURM_JOB_NODELIST": "n[1-2]"}
        assert lost_nodes(environment, tasks_per_node=1, recorded=[]) == ["n2"]
        assert lost_nodes(environment, tasks_per_node=1, recorded=[1]) == []


def test_a_node_that_nobody_knows_is_not_called_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(node: str) -> tuple[str, int]:
        raise commands.SlurmCommandError(f"scontrol show node {node} failed: Node {node} not found")

    monkeypatch.setattr(commands, "slurmd_address", unknown)
    assert lost_nodes({"SLURM_JOB_NODELIST": "n1"}, tasks_per_node=1, recorded=[]) == []
