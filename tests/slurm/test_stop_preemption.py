"""A job of higher priority takes the nodes: nothing is lost, and the run comes back once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcddp.run.directory import RunDirectory
from tests.slurm.account import Account
from tests.slurm.jobs import HPCDDP, write_job
from tests.slurm.life import Life
from tests.slurm.play import EPOCHS, PREEMPTED, STEP_S, Place, looks_at

# low: ten seconds of grace; low0: none; lowc: twenty, and then cancelled instead of requeued.
PARTITIONS = ("low", "low0", "lowc")
HOSTS = PREEMPTED.split(",")


def preempted(place: Place) -> dict[str, tuple[Life, Account]]:
    """One job of ``high`` preempts three runs at once, and one of two elements of a job array."""
    elements = start_array(place)
    lives = {partition: place.start(partition, on=PREEMPTED, partition=partition) for partition in PARTITIONS}
    for life in lives.values():
        life.wait_for_steps(40)
    place.preempt()
    accounts = {
        partition: (life, place.account(f"preemption on partition {partition}", life))
        for partition, life in lives.items()
    }
    return accounts | {f"element {number}": finished(place, life) for number, life in enumerate(elements)}


def finished(place: Place, life: Life) -> tuple[Life, Account]:
    return life, place.account("preemption of an array element", life, nodes=1)


def start_array(place: Place) -> list[Life]:
    """Submit the rendered script, by hand, as an array of two jobs of one host: one here, one where nobody preempts."""
    directory = place.directory / "array"
    directory.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("traced.py"), directory)
    train = {"model_args": {"seconds": STEP_S}}
    job = write_job(directory, model="traced:build", nodes=1, epochs=EPOCHS, sections={"train": train})
    place.sandbox.run(*HPCDDP, "render", str(job), "-o", "job.sbatch", cwd=directory)
    array = place.sandbox.submit("--array=0-1", "--hold", "job.sbatch", cwd=directory)
    for number, host in enumerate((HOSTS[0], "n4")):
        place.sandbox.run("scontrol", "update", f"JobId={array}_{number}", f"ReqNodeList={host}")
    place.sandbox.run("scontrol", "release", array)
    runs = [RunDirectory(directory / "runs" / "digits" / f"sandbox-{array}_{number}") for number in range(2)]
    return [
        Life(sandbox=place.sandbox, job=job, run=run, job_id=f"{array}_{number}") for number, run in enumerate(runs)
    ]


play = looks_at(preempted, long=True)


@play
@pytest.mark.parametrize("partition", PARTITIONS)
def test_preemption_costs_no_step_and_one_restart(played: dict[str, Any], partition: str) -> None:
    life, account = played[partition]
    assert account.is_unhurt, account
    assert (account.attempts, life.sandbox.job(life.job_id)["Restarts"]) == (2, "1")


@play
def test_the_event_log_tells_the_stop_the_save_and_the_requeue(played: dict[str, Any]) -> None:
    life, _ = played["low"]
    (stop,) = (event for event in life.events("stop") if event.get("saved"))
    (requeue,) = life.events("requeue")
    assert requeue["cause"] == "preemption"
    assert stop["step"] in [event["step"] for event in life.events("save")]
    assert [event["step"] for event in life.events("train")] == [0, stop["step"]]


@play
def test_only_the_array_element_that_is_preempted_is_requeued(played: dict[str, Any]) -> None:
    (hit, hit_account), (spared, spared_account) = played["element 0"], played["element 1"]
    assert (hit_account.attempts, spared_account.attempts) == (2, 1)
    assert hit_account.is_unhurt
    assert spared_account.is_unhurt
    assert [life.sandbox.job(life.job_id)["Restarts"] for life in (hit, spared)] == ["1", "0"]
