"""Nodes and the controller go away: the run goes on elsewhere or afterwards, and no generation disturbs the next."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest

from hpcddp.run import checkpoints
from hpcddp.run.events import read_events
from hpcddp.run.manifest import LATEST
from tests.slurm.account import Account
from tests.slurm.life import Life
from tests.slurm.play import STEPS_PER_EPOCH, Place, looks_at
from tests.slurm.trouble import daemon_pid, link_cut, without_controller, without_slurmd

Played = tuple[Life, Account]
# How long a lost slurmctld stays away: longer than a call waits for it.
_AWAY_S = 15


class LatestWatch:
    """Notes every step that ``latest`` ever names."""

    def __init__(self, directory: Path) -> None:
        self._path, self._ended = directory / LATEST, threading.Event()
        self.steps: list[int] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> list[int]:
        """Return the steps in the order in which they were named."""
        self._ended.set()
        self._thread.join()
        return self.steps

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            text = self._path.read_text().strip() if self._path.exists() else ""
            step = int(text.removeprefix("step-")) if text else None
            if step is not None and step not in self.steps[-1:]:
                self.steps.append(step)


def nodes_lost(place: Place) -> tuple[Life, Account, list[int], Played]:
    """The cable of one run's first host is cut until the run has gone on; slurmd on another run's host is killed.

    Rank 0 and the batch script live on in the host that is cut off, and reach the run directory. Slurm ends what is
    left of them when the host is back.
    """
    cut, killed = (start_on(place, name, hosts) for name, hosts in (("cut", "n1,n2"), ("killed", "n3,n4")))
    latest = LatestWatch(cut.run.checkpoints)
    for life in (cut, killed):
        life.wait_for_steps(60)
    with link_cut(place.sandbox, "n1"), without_slurmd(place.sandbox, "n4"):
        for life in (cut, killed):
            life.wait_for_attempt(1)
        place.sandbox.wait(cut.job_id, timeout=300)
    cut.wait_until(lambda: not cut.processes(), "the end of the old generation")
    account = place.account("link of the first node cut", cut)
    return cut, account, latest.end(), (killed, place.account("slurmd killed", killed))


def start_on(place: Place, name: str, hosts: str) -> Life:
    """Start a run on hosts that it is not bound to: the others take no new job for the moment."""
    others = ",".join(node for node in place.sandbox.nodes if node not in hosts.split(","))
    place.sandbox.run("scontrol", "update", f"NodeName={others}", "State=DRAIN", "Reason=test")
    # It is still at work when Slurm gives up a node that does not answer (SlurmdTimeout).
    life = place.start(name, seconds=0.1, sections={"launch": {"hang_timeout": "20s"}})
    life.wait_until(lambda: life.attempts, "a start")
    place.sandbox.run("scontrol", "update", f"NodeName={others}", "State=RESUME")
    return life


def controller_ended(place: Place) -> Played:
    """slurmctld is away when the run wants to be requeued, and comes back."""
    life = place.start("ended")
    life.wait_for_steps(60)
    with without_controller(place.sandbox):
        life.signal(1, signal.SIGUSR2)
        time.sleep(_AWAY_S)
    return life, place.account("slurmctld away at requeue time, back after 15 s", life)


def controller_hangs(place: Place) -> Played:
    """slurmctld takes connections and does not answer, when the run wants to be requeued."""
    life = place.start("hangs")
    life.wait_for_steps(60)
    pid = str(daemon_pid(place.sandbox, "slurmctld"))
    place.sandbox.inside("kill", "-STOP", pid)
    try:
        life.signal(1, signal.SIGUSR2)
        time.sleep(_AWAY_S)
    finally:
        place.sandbox.inside("kill", "-CONT", pid)
    return life, place.account("slurmctld does not answer at requeue time for 15 s", life)


@looks_at(nodes_lost, apart=True)
def test_a_run_whose_node_is_cut_off_goes_on_and_the_old_generation_publishes_nothing(
    played: tuple[Life, Account, list[int], Played],
) -> None:
    life, account, latest, _ = played
    assert account.came_out_the_same, account
    assert account.steps_lost <= STEPS_PER_EPOCH + 1
    assert latest == sorted(latest)
    assert account.attempts == 2
    newest = checkpoints.newest_valid(life.run.checkpoints, expected=True, warn=pytest.fail)
    assert newest is not None
    assert newest.manifest.attempt == 1
    (began,) = (event["time"] for event in life.events("start") if event["attempt"] == 1)
    late = [event for event in read_events(life.run.events) if event["attempt"] == 0 and event["time"] > began]
    assert late == []
    assert life.result["status"] == "finished"


@looks_at(nodes_lost, apart=True)
def test_a_run_whose_node_lost_its_slurmd_is_requeued_and_comes_out_the_same(
    played: tuple[Life, Account, list[int], Played],
) -> None:
    _, account = played[-1]
    assert account.came_out_the_same, account
    assert account.attempts == 2


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("ended", marks=looks_at(controller_ended, apart=True), id="ended"),
        pytest.param("silent", marks=[looks_at(controller_hangs, apart=True), pytest.mark.long], id="silent"),
    ],
)
def test_a_controller_that_is_away_at_requeue_time_delays_the_run_and_costs_nothing(played: Played, words: str) -> None:
    life, account = played
    assert account.is_unhurt, (words, account)
    assert account.attempts == 2
    decision = json.loads((life.run.attempt(0).path / "decision.json").read_text())
    assert decision["saved"] is True
