"""Whether a node has gone."""

import socket

import pytest

from hpcddp.slurm import commands
from hpcddp.slurm.job import moment_of
from hpcddp.supervise.nodes import lost_nodes, nodes_without_records


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
        assert lost_nodes(environment, tasks_per_node=1, recorded=[], started_at=None) == ["n2"]
        assert lost_nodes(environment, tasks_per_node=1, recorded=[1], started_at=None) == []


def test_a_node_that_nobody_knows_is_not_called_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(node: str) -> tuple[str, int]:
        raise commands.SlurmCommandError(f"scontrol show node {node} failed: Node {node} not found")

    monkeypatch.setattr(commands, "slurmd_address", unknown)
    assert lost_nodes({"SLURM_JOB_NODELIST": "n1"}, tasks_per_node=1, recorded=[], started_at=None) == []


@pytest.mark.parametrize(
    ("boot_time", "lost"),
    [("2026-11-26T10:00:10", ["n2"]), ("2026-11-26T09:59:50", []), ("None", [])],
    ids=["after the start", "before the start", "unknown"],
)
def test_a_silent_node_is_lost_if_it_was_started_after_the_attempt_began(
    monkeypatch: pytest.MonkeyPatch, boot_time: str, lost: list[str]
) -> None:
    monkeypatch.setattr(commands, "boot_times", lambda nodes, _: dict.fromkeys(nodes, boot_time))
    monkeypatch.setattr("hpcddp.supervise.nodes._slurmd_answers", lambda _: True)
    started_at = moment_of("2026-11-26T10:00:00")
    environment = {"SLURM_JOB_NODELIST": "n[1-2]"}
    assert lost_nodes(environment, tasks_per_node=1, recorded=[0], started_at=started_at) == lost


def test_a_controller_that_does_not_say_boot_times_makes_no_node_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def boot_times(*_: object) -> dict[str, str]:
        raise commands.SlurmUnavailableError("scontrol show node failed: Unable to contact slurm controller")

    monkeypatch.setattr(commands, "boot_times", boot_times)
    monkeypatch.setattr("hpcddp.supervise.nodes._slurmd_answers", lambda _: True)
    assert lost_nodes({"SLURM_JOB_NODELIST": "n1"}, tasks_per_node=1, recorded=[], started_at=0.0) == []
