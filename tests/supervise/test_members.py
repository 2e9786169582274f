"""The membership service: who forms the next generation after a death, and when the ranks are told to end."""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.failure import beginning
from hpcddp.supervise import serve_members
from hpcddp.supervise.generations import LastGeneration, Member, NewGeneration
from hpcddp.supervise.job_nodes import JobNodes
from hpcddp.supervise.members import NODE_LOST, MemberService
from hpcddp.task.channel import Channel, ChannelClosedError, connect

KEY = b"the token"
KILLED = "Killed"
NOTHING: Mapping[int, int] = {}
NEW_PROCESS = {"step": -1, "evaluated_step": -1, "port": 1001}


# A service that has heard of something new goes through fewer phases than these before it waits again.
MOST_PHASES = 8


class ObservedService(MemberService):
    """A service that knows whether it has handled all that the ranks have said."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.served: set[Member] = set()
        self.asked: set[Member] = set()

    def has_handled_all(self) -> bool:
        """Return whether each connection has ended, or its rank was heard after all that it had said before."""
        return self.served <= self.asked and self._events.empty()

    def _serve_member(self, member: Member, hello: Mapping[str, Any]) -> None:
        self.served.add(member)
        super()._serve_member(member, hello)
        self.served.discard(member)

    def _hear(self, member: Member, document: Mapping[str, Any]) -> None:
        if "asks" in document:
            self.asked.add(member)
        else:
            super()._hear(member, document)


class Cluster:
    """A service, and ranks that are connections alone."""

    def __init__(
        self,
        world_size: int = 4,
        most_failures: int = 3,
        nodes: Sequence[str] = ("n1", "n2"),
        min_nodes: int = 2,
        absent: Collection[int] = (),
    ) -> None:
        self.slurm_answers = True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.exits: dict[int, str] = {}
        self.recoveries: list[NewGeneration] = []
        self.refused: dict[int, str] = {}
        self.last: list[LastGeneration] = []
        self.started: list[int] = []
        self.tasks: dict[int, Mapping[str, str]] = {}
        self.channels: dict[int, Channel] = {}
        # With those that have been closed.
        self.all_channels: list[Channel] = []
        self.processes: dict[int, str] = {}
        self.now = time.monotonic
        self.service = ObservedService(
            self.listener,
            KEY,
            world_size=world_size,
            most_failures=most_failures,
            nodes=JobNodes(nodes, min_nodes=min_nodes, slurm_answers=lambda: self.slurm_answers),
            newcomers=self,
            on_new_generation=self.recoveries.append,
            on_last_generation=self.last.append,
            monotonic=self.clock,
        )
        self.service.start()
        for number in range(world_size):
            if number not in absent:
                self.join(number)
        self.settle()
        for channel in self.channels.values():
            channel.send({"smallest_world": 1})
        self.settle()

    def start(self, number: int, task: Mapping[str, str]) -> None:
        self.started.append(number)
        self.tasks[number] = task
        self.exits.pop(number, None)

    def refuse(self, number: int, why: str) -> None:
        self.refused[number] = why

    def exit_of(self, number: int) -> str | None:
        return self.exits.get(number)

    def task(self, number: int) -> Mapping[str, str]:
        """Return the task of a rank: two ranks on each node."""
        node = f"n{number // 2 + 1}"
        return self.tasks.get(number, {"SLURMD_NODENAME": node, "SLURM_STEP_NODELIST": "n[1-2]"})

    def clock(self) -> float:
        return self.now()

    def join(self, number: int, *, left: Mapping[str, Any] | None = None, version: str = "1") -> Channel:
        self.processes[number] = f"{number} {len(self.started)}"
        hello = {
            "number": number,
            "process": self.processes[number],
            "task": self.task(number),
            "identity": {"version": version},
            "left": left,
        }
        # The service answers in its own thread, which is this one.
        connection = socket.create_connection(("127.0.0.1", self.port))
        channel = Channel(connection, KEY, is_service=False)
        channel.send(hello)
        self.handle_until(lambda: bool(select.select([connection], [], [], 0)[0]))
        assert "welcome" in channel.receive()
        channel.greeted()
        self.channels[number] = channel
        self.all_channels.append(channel)
        return channel

    def settle(self) -> None:
        """Handle all that has happened."""
        self.service.asked.clear()
        for channel in self.all_channels:
            channel.send({"asks": "whether all is handled"})
        self.handle_until(self.service.has_handled_all)
        for _ in range(MOST_PHASES):
            self.service.handle(most_s=0.0)

    def handle_until(self, is_true: Callable[[], bool]) -> None:
        """Handle what happens until a condition holds."""
        deadline = time.monotonic() + 30
        while not is_true():
            assert time.monotonic() < deadline
            self.service.handle(most_s=0.01)

    def kill(self, number: int, how: str | None = KILLED) -> None:
        if how is not None:
            self.exits[number] = how
        self.channels.pop(number).close()
        self.settle()

    def leave(
        self,
        steps: Mapping[int, int],
        generation: int = 0,
        *,
        evaluated: Collection[int] = (),
        checksums: Mapping[int, int] = NOTHING,
        samples: Sequence[int] = (),
    ) -> None:
        for number, step in steps.items():
            left = {
                "left": generation,
                "step": step,
                "evaluated_step": step if number in evaluated else 0,
                "checksum": checksums.get(number, step),
                "samples": list(samples),
                "sample_count": len(samples),
                "port": 1000 + number,
            }
            self.channels[number].send(left)
        self.settle()

    def formations(self) -> dict[int, dict[str, Any]]:
        """Return the formation that each rank is told; other messages come before it."""
        formations = {}
        for number, channel in self.channels.items():
            while "form" not in (document := channel.receive()):
                assert "end" not in document, document
            formations[number] = document["form"]
        return formations

    def form(self, generation: int) -> None:
        for channel in self.channels.values():
            channel.send({"formed": generation})
        self.settle()

    def replace(self, number: int) -> None:
        """Let a rank die after step 7, and its new process form generation 2 with the others, after step 9."""
        self.kill(number)
        others = list(self.channels)
        self.leave(dict.fromkeys(others, 7))
        self.formations()
        self.form(1)
        self.join(number, left=NEW_PROCESS)
        self.leave(dict.fromkeys(others, 9), generation=1)
        self.formations()

    def ends(self) -> list[dict[str, Any]]:
        """Return with which document each rank is told to end."""
        ends = []
        for channel in self.channels.values():
            while "end" not in (document := channel.receive()):
                pass
            ends.append(document)
        return ends

    def reasons(self) -> list[str]:
        """Return why each rank is told to end, and to save its last step."""
        ends = self.ends()
        assert not any(document["states_differ"] for document in ends)
        return [document["end"] for document in ends]


@pytest.fixture
def new_cluster() -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(**options: Any) -> Cluster:
        made.append(Cluster(**options))
        return made[-1]

    yield make
    for cluster in made:
        for channel in cluster.channels.values():
            channel.close()
        cluster.settle()
        # accept() in the thread of the service returns.
        cluster.listener.shutdown(socket.SHUT_RDWR)
        cluster.listener.close()


@pytest.fixture
def cluster(new_cluster: Callable[..., Cluster]) -> Cluster:
    return new_cluster()


def test_ranks_that_are_left_form_the_next_generation_in_the_order_of_their_numbers(cluster: Cluster) -> None:
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    formations = cluster.formations()
    assert {number: found["rank"] for number, found in formations.items()} == {0: 0, 2: 1, 3: 2}
    assert {found["world_size"] for found in formations.values()} == {3}
    assert {(found["port"], found["source"], found["shares_state"]) for found in formations.values()} == {
        (1000, 0, False)
    }
    assert cluster.recoveries == []
    cluster.form(1)
    (recovery,) = cluster.recoveries
    assert (recovery.dead, recovery.world_size, recovery.step) == ({1: KILLED}, 3, 7)
    assert cluster.started == [1]


def test_after_rank_0_the_next_number_is_rank_0_and_completes_the_records(cluster: Cluster) -> None:
    cluster.kill(0)
    cluster.leave({1: 7, 2: 8, 3: 8})
    formations = cluster.formations()
    assert all(found["completes_records"] and found["port"] == 1001 for found in formations.values())
    # The lowest of those that stand at the highest step; in the new numbers.
    assert {(found["source"], found["shares_state"]) for found in formations.values()} == {(1, True)}


def test_the_records_are_completed_where_rank_0_is_a_step_behind(cluster: Cluster) -> None:
    cluster.kill(3)
    cluster.leave({0: 7, 1: 8, 2: 8})
    formations = cluster.formations()
    assert all(found["completes_records"] for found in formations.values())
    assert {(found["source"], found["shares_state"]) for found in formations.values()} == {(1, True)}


def test_ranks_of_which_only_some_have_ended_an_evaluation_take_the_state_after_it(cluster: Cluster) -> None:
    cluster.kill(3)
    cluster.leave({0: 7, 1: 7, 2: 7}, evaluated=[2])
    formations = cluster.formations()
    assert {(found["source"], found["shares_state"]) for found in formations.values()} == {(2, True)}
    assert all(found["completes_records"] for found in formations.values())


def test_the_records_are_completed_whenever_another_process_becomes_rank_0(cluster: Cluster) -> None:
    for generation, number in enumerate((0, 1)):
        cluster.kill(number)
        cluster.leave(dict.fromkeys(cluster.channels, 7 + generation), generation)
        assert all(found["completes_records"] for found in cluster.formations().values())
        cluster.form(generation + 1)
    cluster.kill(3)
    cluster.leave({2: 9}, generation=2)
    assert not cluster.formations()[2]["completes_records"]


def test_a_second_death_while_the_others_leave_makes_one_generation(cluster: Cluster) -> None:
    cluster.kill(1)
    cluster.leave({0: 7})
    cluster.kill(2)
    cluster.leave({3: 7})
    assert {number: found["rank"] for number, found in cluster.formations().items()} == {0: 0, 3: 1}
    cluster.form(1)
    assert cluster.recoveries[0].dead == {1: KILLED, 2: KILLED}
    assert cluster.started == [1, 2]


def test_a_new_process_joins_between_two_steps_and_takes_the_number(cluster: Cluster) -> None:
    cluster.kill(0)
    cluster.leave({1: 7, 2: 7, 3: 7})
    cluster.formations()
    cluster.form(1)
    cluster.join(0, left={"step": -1, "evaluated_step": -1, "port": 1000})
    assert [channel.receive() for number, channel in cluster.channels.items() if number] == [{"pause": 1}] * 3
    cluster.leave({1: 9, 2: 9, 3: 9}, generation=1)
    formations = cluster.formations()
    assert {number: found["rank"] for number, found in formations.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert all(
        found["source"] == 1 and found["shares_state"] and found["completes_records"] for found in formations.values()
    )
    cluster.form(2)
    assert (cluster.recoveries[1].dead, cluster.recoveries[1].joined) == ({}, {0: "n1"})
    assert cluster.started == [0]


def test_a_new_process_of_another_version_is_not_taken_in(cluster: Cluster) -> None:
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    cluster.formations()
    cluster.form(1)
    stranger = cluster.join(1, left=NEW_PROCESS, version="2")
    why = "version is 2 there, and 1 for the other ranks"
    assert stranger.receive() == {"end": why}
    assert cluster.refused == {1: why}
    assert not cluster.service.has_ended


def test_a_second_process_of_a_rank_that_is_there_is_sent_away_and_notes_nothing_about_the_rank(
    cluster: Cluster,
) -> None:
    first = cluster.channels[1]
    second = cluster.join(1, left=NEW_PROCESS)
    assert second.receive() == {"end": "rank 1 is not missing"}
    second.close()
    cluster.channels[1] = first
    assert cluster.refused == {}
    assert cluster.service.is_training


def test_a_new_process_that_has_loaded_other_code_is_not_taken_in(cluster: Cluster) -> None:
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    cluster.formations()
    cluster.form(1)
    why = "train.py changed since the ranks began"
    newcomer = cluster.join(1, left={**NEW_PROCESS, "why_code_differs": why})
    assert newcomer.receive() == {"end": why}
    assert cluster.refused == {1: why}
    assert cluster.service.is_training


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("Exited with exit code 1", "rank 1 has ended by itself (Exited with exit code 1)"),
        ("Terminated", "rank 1 has ended by itself (Terminated)"),
    ],
)
def test_an_end_that_is_not_a_signal_of_the_kernel_is_not_survived(cluster: Cluster, how: str, why: str) -> None:
    cluster.kill(1, how)
    assert cluster.reasons() == [why] * 3
    assert cluster.service.must_end


def test_an_end_that_srun_does_not_explain_is_not_survived(cluster: Cluster) -> None:
    cluster.kill(1, None)
    cluster.leave({0: 7, 2: 7, 3: 7})
    later = time.monotonic() + 6
    cluster.now = lambda: later
    cluster.settle()
    assert cluster.reasons() == ["rank 1 has ended, and srun does not say why"] * 3


def test_a_rank_that_does_not_leave_in_time_ends_the_generation(cluster: Cluster) -> None:
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7})
    cluster.channels[3].send({"told": 0, "step_s": 10.0})
    cluster.settle()
    began = time.monotonic()
    cluster.now = lambda: began + 20
    cluster.settle()
    assert not cluster.service.has_ended
    cluster.now = lambda: began + 30
    cluster.settle()
    assert cluster.reasons() == ["a rank did not leave the broken generation in time"] * 3


@pytest.mark.parametrize("absent", [[], [1]])
def test_a_rank_that_was_killed_before_it_connected_ends_the_others(
    new_cluster: Callable[..., Cluster], tmp_path: Path, absent: Sequence[int]
) -> None:
    cluster = new_cluster(absent=absent)
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.run.batch_log.write_text(f"{beginning(attempt)}srun: error: n1: task 1: Killed\n")
    serve_members._end_after_an_exit(attempt, cluster.service)
    if absent:
        assert cluster.reasons() == ["rank 1 was lost while the ranks met (Killed)"] * 3
    else:
        # Its connection ends, and the others go on.
        assert not cluster.service.has_ended


@pytest.mark.parametrize("dead", [0, 2])
def test_a_death_while_the_ranks_form_a_generation_is_one_more_failure(cluster: Cluster, dead: int) -> None:
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    assert {formation["connect_timeout_s"] for formation in cluster.formations().values()} == {0.2}
    cluster.channels[3].send({"formed": 1})
    cluster.kill(dead)
    left = [number for number in (0, 2, 3) if number != dead]
    assert all(channel.receive() == {"broken": 1} for channel in cluster.channels.values())
    assert cluster.recoveries == []
    cluster.leave(dict.fromkeys(left, 7), generation=1)
    formations = cluster.formations()
    assert {number: found["rank"] for number, found in formations.items()} == {left[0]: 0, left[1]: 1}
    assert {(found["generation"], found["connect_timeout_s"]) for found in formations.values()} == {(2, 0.4)}
    cluster.form(2)
    (recovery,) = cluster.recoveries
    assert (recovery.failures, recovery.world_size) == (({1: KILLED}, {dead: KILLED}), 2)
    assert cluster.started == sorted([1, dead])


def test_a_death_while_the_ranks_form_a_generation_ends_a_run_without_a_further_failure(
    new_cluster: Callable[..., Cluster],
) -> None:
    cluster = new_cluster(most_failures=1)
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    cluster.formations()
    cluster.kill(2)
    cluster.leave({0: 7, 3: 7}, generation=1)
    assert all(reason.startswith("requeue.max_failures is used up") for reason in cluster.reasons())


def test_the_third_death_at_a_step_ends_the_ranks_that_form(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(most_failures=10)
    for generation, number in enumerate((3, 2, 1)):
        cluster.kill(number)
        cluster.leave(dict.fromkeys(cluster.channels, 7), generation)
        if number > 1:
            cluster.formations()
    assert cluster.reasons() == ["processes have died 3 times after step 7, before the ranks could make the next one"]
    # No generation but the first has trained, so the step is not the cause.
    assert cluster.last == []


def test_the_records_are_completed_in_the_next_try_if_the_rank_that_was_to_complete_them_did_not_train(
    cluster: Cluster,
) -> None:
    cluster.kill(0)
    cluster.leave({1: 7, 2: 7, 3: 7})
    cluster.formations()
    cluster.kill(3)
    cluster.leave({1: 7, 2: 7}, generation=1)
    assert all(found["completes_records"] for found in cluster.formations().values())


def test_a_node_that_is_lost_while_the_ranks_form_a_generation_is_no_failure(
    new_cluster: Callable[..., Cluster],
) -> None:
    cluster = new_cluster(most_failures=1, min_nodes=1)
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    cluster.formations()
    lose_second_node(cluster, {0: 7}, generation=1)
    assert cluster.formations()[0]["world_size"] == 1


def test_a_rank_that_cannot_open_the_group_makes_all_try_again_with_more_time(cluster: Cluster) -> None:
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    for generation, connect_timeout_s in enumerate((0.2, 0.4, 0.8, 1.6, 3.2), start=1):
        assert cluster.formations()[0]["connect_timeout_s"] == connect_timeout_s
        cluster.leave({0: 7}, generation)
        cluster.leave({2: 7, 3: 7}, generation)
    assert cluster.reasons() == ["the ranks that are left could not meet in 5 tries"] * 3


def test_a_rank_that_is_stuck_while_the_ranks_form_a_generation_ends_it(cluster: Cluster) -> None:
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    cluster.formations()
    later = time.monotonic() + 22
    cluster.now = lambda: later
    cluster.settle()
    assert cluster.reasons() == ["the ranks that are left did not meet in time"] * 3


def test_a_new_process_that_had_no_state_yet_when_a_rank_died_has_joined_once(cluster: Cluster) -> None:
    cluster.replace(1)
    cluster.form(2)
    cluster.kill(3)
    cluster.leave({0: 9, 2: 9}, generation=2)
    cluster.leave({1: -1}, generation=2)
    cluster.formations()
    cluster.form(3)
    assert [(recovery.dead, recovery.joined) for recovery in cluster.recoveries] == [
        ({1: KILLED}, {}),
        ({}, {1: "n1"}),
        ({3: KILLED}, {}),
    ]


def test_a_new_process_that_dies_while_it_joins_is_replaced_after_the_others_went_on(cluster: Cluster) -> None:
    cluster.replace(1)
    cluster.kill(1)
    cluster.leave({0: 9, 2: 9, 3: 9}, generation=2)
    assert cluster.formations()[0]["world_size"] == 3
    cluster.form(3)
    assert cluster.recoveries[1].failures == ({1: KILLED},)
    assert cluster.started == [1, 1]


def test_a_new_process_takes_part_again_in_the_next_try(cluster: Cluster) -> None:
    cluster.replace(1)
    cluster.kill(0)
    cluster.leave({1: -1, 2: 9, 3: 9}, generation=2)
    formations = cluster.formations()
    assert {number: found["rank"] for number, found in formations.items()} == {1: 0, 2: 1, 3: 2}
    assert all(found["source"] == 1 and found["shares_state"] for found in formations.values())
    cluster.form(3)
    assert cluster.recoveries[1].joined == {1: "n1"}


def test_a_rank_that_is_stuck_after_a_new_process_could_not_join_and_another_rank_died_ends_the_generation(
    cluster: Cluster,
) -> None:
    cluster.replace(1)
    # Rank 0 could not open the group; rank 2 dies before rank 3 has left it.
    cluster.leave({0: 9, 1: -1}, generation=2)
    cluster.kill(2)
    later = time.monotonic() + 30
    cluster.now = lambda: later
    cluster.settle()
    assert cluster.reasons() == ["a rank did not leave the broken generation in time"] * 3


def test_the_ranks_end_if_nobody_is_left_who_has_the_state(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(world_size=2)
    cluster.replace(1)
    cluster.kill(0)
    cluster.leave({1: -1}, generation=2)
    assert cluster.reasons() == ["no rank is left that has the state"]


def test_the_failures_that_are_allowed_are_counted(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(most_failures=1)
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    cluster.formations()
    cluster.form(1)
    cluster.kill(2)
    cluster.leave({0: 9, 3: 9}, generation=1)
    assert cluster.reasons() == ["requeue.max_failures is used up"] * 2
    # The first death was in another step.
    assert cluster.last == []


def test_the_samples_are_named_where_the_failures_are_used_up_in_a_step_that_broke_before(
    new_cluster: Callable[..., Cluster],
) -> None:
    cluster = new_cluster(most_failures=1)
    for generation, number in enumerate((1, 2)):
        cluster.kill(number)
        cluster.leave(dict.fromkeys(cluster.channels, 7), generation, samples=range(100, 132))
        if generation == 0:
            cluster.formations()
            cluster.form(1)
    named = ", ".join(str(sample) for sample in range(100, 116))
    broken = "2 generations have broken in the step after step 7"
    why = f"requeue.max_failures is used up, and {broken}, on the samples {named} and 16 more"
    assert cluster.reasons() == [why] * 2
    assert cluster.last == [LastGeneration(reason=why, step=7, samples=list(range(100, 132)))]


def test_three_generations_that_break_at_one_step_are_the_last(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(most_failures=10)
    for generation, number in enumerate((3, 2)):
        cluster.kill(number)
        cluster.leave(dict.fromkeys(cluster.channels, 7), generation)
        cluster.formations()
        cluster.form(generation + 1)
    cluster.kill(1)
    cluster.leave({0: 7}, generation=2, samples=[31, 4])
    why = "3 generations have broken in the step after step 7, on the samples 31, 4"
    assert cluster.reasons() == [why]
    assert cluster.last == [LastGeneration(reason=why, step=7, samples=[31, 4], is_cascade=True)]


def test_nodes_that_are_lost_at_one_step_say_nothing_about_its_samples(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(world_size=10, nodes=("n1", "n2", "n3", "n4", "n5"), most_failures=10, min_nodes=1)
    for generation, first in enumerate((8, 6, 4)):
        cluster.exits[first + 1] = NODE_LOST
        cluster.kill(first, NODE_LOST)
        cluster.kill(first + 1, NODE_LOST)
        cluster.leave(dict.fromkeys(cluster.channels, 7), generation)
        assert cluster.formations()[0]["world_size"] == first
        cluster.form(generation + 1)
    # Only the deaths of processes count.
    cluster.kill(3)
    cluster.leave(dict.fromkeys(cluster.channels, 7), generation=3)
    assert cluster.formations()[0]["world_size"] == 3
    assert cluster.last == []


def test_ranks_whose_states_after_the_same_step_differ_end_and_save_none(cluster: Cluster) -> None:
    cluster.kill(1)
    cluster.leave({0: 7, 2: 8, 3: 8}, checksums={0: 1, 2: 2, 3: 3})
    why = "after step 8 the states of rank 2 and rank 3 differ"
    assert cluster.ends() == [{"end": why, "states_differ": True}] * 3
    assert cluster.last == [LastGeneration(reason=f"{why}; the ranks end, and save none of them", step=8)]
    assert cluster.service.must_end
    assert cluster.recoveries == []


def test_states_that_differ_are_also_found_before_a_new_process_joins(cluster: Cluster) -> None:
    cluster.kill(0)
    cluster.leave({1: 7, 2: 7, 3: 7})
    cluster.formations()
    cluster.form(1)
    cluster.join(0, left=NEW_PROCESS)
    cluster.leave({1: 9, 2: 9, 3: 9}, generation=1, checksums={1: 5, 2: 6, 3: 5})
    assert cluster.ends()[1]["end"] == "after step 9 the states of ranks 1,3 and rank 2 differ"


@pytest.fixture
def waiting_cluster(cluster: Cluster) -> Cluster:
    """Ranks that do not go on with fewer, one of which has died."""
    cluster.channels[0].send({"smallest_world": 4})
    cluster.settle()
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    assert cluster.started == [1]
    return cluster


def test_ranks_that_do_not_go_on_with_fewer_wait_for_a_new_process(waiting_cluster: Cluster) -> None:
    cluster = waiting_cluster
    cluster.join(1, left=NEW_PROCESS)
    formations = cluster.formations()
    assert {number: formation["rank"] for number, formation in formations.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert all(formation["source"] == 0 and formation["shares_state"] for formation in formations.values())
    cluster.form(1)
    (recovery,) = cluster.recoveries
    assert (recovery.dead, recovery.joined, recovery.world_size) == ({1: KILLED}, {1: "n1"}, 4)
    assert cluster.started == [1]


def test_the_ranks_end_if_the_new_process_that_they_wait_for_ends(waiting_cluster: Cluster) -> None:
    waiting_cluster.exits[1] = "Exited with exit code 2"
    waiting_cluster.settle()
    assert waiting_cluster.reasons() == ["the new process of rank 1 has ended (Exited with exit code 2)"] * 3


def test_a_new_process_that_is_killed_while_the_others_wait_is_replaced_once(waiting_cluster: Cluster) -> None:
    cluster = waiting_cluster
    cluster.exits[1] = KILLED
    cluster.settle()
    assert cluster.started == [1, 1]
    cluster.join(1, left=NEW_PROCESS)
    assert cluster.formations()[0]["world_size"] == 4
    cluster.form(1)
    assert cluster.recoveries[0].failures == ({1: KILLED}, {1: KILLED})


def test_the_ranks_end_if_the_second_new_process_is_killed_too(waiting_cluster: Cluster) -> None:
    cluster = waiting_cluster
    for _ in range(2):
        cluster.exits[1] = KILLED
        cluster.settle()
    assert cluster.started == [1, 1]
    why = "processes have died 3 times after step 7, before the ranks could make the next one"
    assert cluster.reasons() == [why] * 3
    assert cluster.last == []


def test_the_ranks_end_if_a_new_process_is_killed_and_no_failure_is_left(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(most_failures=1)
    cluster.channels[0].send({"smallest_world": 4})
    cluster.settle()
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    cluster.exits[1] = KILLED
    cluster.settle()
    assert cluster.started == [1]
    assert all(reason.startswith("requeue.max_failures is used up") for reason in cluster.reasons())


def test_a_new_process_that_dies_when_the_others_have_taken_it_in_is_replaced_once(waiting_cluster: Cluster) -> None:
    cluster = waiting_cluster
    cluster.join(1, left=NEW_PROCESS)
    cluster.formations()
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7}, generation=1)
    assert cluster.started == [1, 1]
    cluster.join(1, left=NEW_PROCESS)
    assert cluster.formations()[0]["world_size"] == 4


@pytest.mark.parametrize("spare", [(), ("n3",)])
def test_a_new_process_whose_node_is_lost_is_replaced_on_a_spare_node(
    new_cluster: Callable[..., Cluster], spare: Sequence[str]
) -> None:
    cluster = new_cluster(world_size=3, nodes=("n1", "n2", *spare), min_nodes=1)
    cluster.channels[0].send({"smallest_world": 3})
    cluster.settle()
    cluster.kill(2)
    cluster.leave({0: 7, 1: 7})
    assert cluster.started == [2]
    # What Slurm says when it has given up the node.
    cluster.exits[2] = NODE_LOST
    cluster.settle()
    if not spare:
        assert cluster.reasons() == ["2 ranks are too few for the same result"] * 2
        return
    assert cluster.tasks[2]["SLURMD_NODENAME"] == "n3"
    cluster.join(2, left=NEW_PROCESS)
    assert cluster.formations()[0]["world_size"] == 3
    cluster.form(1)
    assert cluster.recoveries[0].failures == ({2: KILLED}, {2: NODE_LOST})
    assert cluster.recoveries[0].joined == {2: "n3"}


def test_the_ranks_end_if_the_new_process_does_not_come(waiting_cluster: Cluster) -> None:
    later = time.monotonic() + 130
    waiting_cluster.now = lambda: later
    waiting_cluster.settle()
    assert waiting_cluster.reasons() == ["the new processes were not there in time"] * 3


def test_only_ranks_that_do_not_answer_that_they_end_are_stuck(cluster: Cluster) -> None:
    """One that answers may save."""
    seen = [cluster.service.only_stuck_ranks_are_left]
    cluster.service.end("rank 3 has ended by itself")
    seen.append(cluster.service.only_stuck_ranks_are_left)
    cluster.channels[2].send({"ending": True})
    cluster.settle()
    seen.append(cluster.service.only_stuck_ranks_are_left)
    cluster.kill(2)
    seen.append(cluster.service.only_stuck_ranks_are_left)
    for number in (0, 1, 3):
        cluster.kill(number)
    seen.append(cluster.service.only_stuck_ranks_are_left)
    assert seen == [False, True, False, True, False]


MUST_LEAVE = "the job must leave its nodes, and the new processes are not there yet"


def test_ranks_that_wait_end_when_the_job_must_leave_its_nodes(waiting_cluster: Cluster) -> None:
    """Slurm kills them KillWait after SIGTERM, and the imports of the new process may take longer."""
    waiting_cluster.channels[2].send({"must_leave": True})
    waiting_cluster.settle()
    assert waiting_cluster.reasons() == [MUST_LEAVE] * 3


def test_ranks_do_not_begin_to_wait_when_the_job_must_leave_its_nodes(cluster: Cluster) -> None:
    cluster.channels[0].send({"smallest_world": 4})
    cluster.channels[2].send({"must_leave": True})
    cluster.settle()
    assert cluster.service.is_training
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    assert cluster.reasons() == [MUST_LEAVE] * 3
    # A process that is started then would only be ended again.
    assert cluster.started == []


def test_ranks_that_can_go_on_with_fewer_do_so_when_the_job_must_leave_its_nodes(cluster: Cluster) -> None:
    """They stop together after their next step."""
    cluster.channels[2].send({"must_leave": True})
    cluster.kill(1)
    cluster.leave({0: 7, 2: 7, 3: 7})
    assert not cluster.service.has_ended


def test_the_ranks_wait_for_two_new_processes_if_another_one_dies_meanwhile(waiting_cluster: Cluster) -> None:
    cluster = waiting_cluster
    cluster.kill(2)
    assert cluster.started == [1, 2]
    for number in (1, 2):
        assert not cluster.recoveries
        cluster.join(number, left=NEW_PROCESS)
    assert cluster.formations()[3]["world_size"] == 4


def test_a_new_process_on_a_node_that_does_not_answer_is_replaced_before_it_connects(
    new_cluster: Callable[..., Cluster],
) -> None:
    cluster = new_cluster(world_size=3, nodes=("n1", "n2", "n3"), min_nodes=1)
    cluster.channels[0].send({"smallest_world": 3})
    cluster.settle()
    cluster.kill(2)
    cluster.leave({0: 7, 1: 7})
    # As when the connection of its sentinel ends with ETIMEDOUT.
    cluster.service._lose_node("n2")
    cluster.settle()
    assert cluster.started == [2, 2]
    assert cluster.tasks[2]["SLURMD_NODENAME"] == "n3"


def lose_second_node(cluster: Cluster, left: Mapping[int, int] | None = None, generation: int = 0) -> None:
    cluster.exits[3] = NODE_LOST
    cluster.kill(2, NODE_LOST)
    cluster.kill(3, NODE_LOST)
    cluster.leave({0: 7, 1: 7} if left is None else left, generation)


def test_the_ranks_on_the_other_nodes_go_on_and_no_failure_is_counted(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(most_failures=0, min_nodes=1)
    lose_second_node(cluster)
    assert cluster.formations()[1]["world_size"] == 2
    cluster.form(1)
    assert cluster.recoveries[0].dead == {2: NODE_LOST, 3: NODE_LOST}
    assert cluster.started == []
    for number in (0, 1):
        cluster.channels[number].send({"done": True})
        cluster.settle()
        assert not cluster.service.srun_waits_in_vain
    cluster.kill(0, None)
    cluster.kill(1, None)
    assert cluster.service.srun_waits_in_vain


def test_too_few_nodes_end(cluster: Cluster) -> None:
    lose_second_node(cluster)
    assert cluster.reasons() == ["a node was lost, and 1 of 2 are too few"] * 2


def test_a_node_of_which_all_ranks_have_died_is_not_lost(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(world_size=6, nodes=("n1", "n2", "n3"), min_nodes=2)
    cluster.exits[5] = KILLED
    cluster.kill(4)
    cluster.kill(5)
    cluster.leave(dict.fromkeys(range(4), 6))
    cluster.formations()
    cluster.form(1)
    lose_second_node(cluster, generation=1)
    assert cluster.formations()[0]["world_size"] == 2


def test_ranks_that_leave_wait_until_a_node_that_does_not_answer_is_noticed(
    new_cluster: Callable[..., Cluster],
) -> None:
    cluster = new_cluster(min_nodes=1)
    cluster.kill(1)
    cluster.leave({0: 7})
    began = time.monotonic()
    cluster.now = lambda: began + 4
    cluster.exits[3] = NODE_LOST
    cluster.kill(2, NODE_LOST)
    cluster.kill(3, NODE_LOST)
    assert cluster.formations()[0]["world_size"] == 1


def test_half_of_the_nodes_go_on_only_where_slurm_answers(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(min_nodes=1)
    cluster.slurm_answers = False
    lose_second_node(cluster)
    assert all("these may be the nodes that the job has lost" in reason for reason in cluster.reasons())


def test_the_ranks_of_a_lost_node_go_on_on_a_spare_one(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster(nodes=("n1", "n2", "n3"))
    lose_second_node(cluster)
    cluster.formations()
    cluster.form(1)
    assert cluster.started == [2, 3]
    assert cluster.tasks[3] == {"SLURMD_NODENAME": "n3", "SLURM_STEP_NODELIST": "n1,n3"}
    for number in (2, 3):
        cluster.join(number, left=NEW_PROCESS)
    cluster.leave({0: 9, 1: 9}, generation=1)
    assert cluster.formations()[0]["world_size"] == 4
    cluster.form(2)
    assert cluster.recoveries[1].joined == {2: "n3", 3: "n3"}


@pytest.mark.parametrize("said", [{"done": True}, {"failed": True}])
def test_after_the_end_of_a_rank_nobody_waits_for_it(cluster: Cluster, said: Mapping[str, Any]) -> None:
    cluster.channels[1].send(said)
    cluster.settle()
    cluster.kill(1, None)
    assert cluster.service.has_ended
    assert cluster.service.must_end == ("failed" in said)


def test_a_connection_with_another_token_is_not_a_member(cluster: Cluster) -> None:
    with pytest.raises(ChannelClosedError):
        connect(["127.0.0.1"], cluster.port, b"another", {"number": 1}, deadline=time.monotonic() + 0.5)
    cluster.settle()
    assert not cluster.service.has_ended


def watch(cluster: Cluster, number: int) -> Channel:
    """Connect as the sentinel of the newest process of a rank."""
    connection = socket.create_connection(("127.0.0.1", cluster.port))
    channel = Channel(connection, KEY, is_service=False)
    channel.send({"watches": cluster.processes[number], "node": cluster.task(number)["SLURMD_NODENAME"]})
    assert "welcome" in channel.receive()
    channel.greeted()
    return channel


def say_exit(cluster: Cluster, sentinel: Channel, status: object) -> None:
    """Let a sentinel say how its rank ends; the service closes its connection when it has heard that."""
    sentinel.send({"exit": status})
    with pytest.raises(ChannelClosedError):
        sentinel.receive()
    sentinel.close()
    cluster.settle()


def test_a_rank_of_which_its_sentinel_says_that_it_was_killed_is_dead_while_its_connection_is_open(
    cluster: Cluster,
) -> None:
    sentinel = watch(cluster, 1)
    say_exit(cluster, sentinel, int(signal.SIGKILL))
    dying = cluster.channels.pop(1)
    # srun says nothing yet.
    cluster.leave({0: 7, 2: 7, 3: 7})
    assert cluster.formations()[0]["world_size"] == 3
    cluster.form(1)
    assert cluster.recoveries[0].dead == {1: "Killed"}
    dying.close()
    cluster.settle()
    assert cluster.service.is_training


def test_a_rank_that_ends_by_itself_is_dead_when_its_connection_ends(cluster: Cluster) -> None:
    sentinel = watch(cluster, 1)
    say_exit(cluster, sentinel, 1 << 8)
    assert cluster.service.is_training
    cluster.kill(1, None)
    assert cluster.reasons() == ["rank 1 has ended by itself (Exited with exit code 1)"] * 3


def test_the_end_of_an_earlier_process_of_a_rank_says_nothing_about_its_newest(cluster: Cluster) -> None:
    sentinel = watch(cluster, 1)
    cluster.replace(1)
    cluster.form(2)
    say_exit(cluster, sentinel, int(signal.SIGKILL))
    assert cluster.service.is_training
    assert 1 in cluster.service.members


def test_a_sentinel_that_says_nonsense_is_not_heard(cluster: Cluster) -> None:
    sentinel = watch(cluster, 1)
    say_exit(cluster, sentinel, "soon")
    assert cluster.service.is_training


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    """The two sides of a connection: the rank's and the service's."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        service = pool.submit(Channel, server, KEY, is_service=True)
        rank = Channel(client, KEY, is_service=False)
        yield rank, service.result()
        rank.close()
        service.result().close()


def test_a_message_that_is_repeated_closes_the_channel(channels: tuple[Channel, Channel]) -> None:
    rank, service = channels
    rank.send({"left": 0})
    assert service.receive() == {"left": 0}
    # As one who listens on the way would send it again.
    rank._sent = 0
    rank.send({"left": 0})
    with pytest.raises(ChannelClosedError):
        service.receive()
