"""A cancelled run stays cancelled, whatever it was doing; a finished one stays finished; a live one is left alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from pathlib import Path

from hpcddp.run import checkpoints
from tests.slurm.account import Account, report
from tests.slurm.jobs import HPCDDP
from tests.slurm.life import Life
from tests.slurm.play import UNDISTURBED, Place, looks_at

# Longer than a requeued job waits here before it starts again.
_SECOND_LIFE_S = 10


def cancel(life: Life) -> Life:
    """Cancel a job, and give it the time to come back."""
    life.sandbox.run("scancel", life.job_id)
    life.end("CANCELLED", timeout_s=60)
    time.sleep(_SECOND_LIFE_S)
    return life


def cancelled_in_training(place: Place) -> tuple[Life, Account]:
    """Cancelled in the middle; then continued, by a new job, to the end."""
    life = place.start("life", on=UNDISTURBED)
    life.wait_for_steps(60)
    report("scancel in the training", cancel(life))
    attempts = life.attempts
    assert (life.sandbox.job(life.job_id)["JobState"], attempts) == ("CANCELLED", 1)
    document = json.loads(place.sandbox.run(*HPCDDP, "submit", "--resume", life.run.path, "--json").stdout)
    assert document["run_dir"] == str(life.run.path)
    resumed = Life(sandbox=life.sandbox, job=life.job, run=life.run, job_id=document["job_id"])
    return resumed, place.account("scancel, then submit --resume", resumed)


def cancelled_in_a_save(place: Place) -> Life:
    slow = {"environment": {"env": {"HPCDDP_FAULTS": "sleep=4@save.rename:46"}}}
    life = place.start("life", on=UNDISTURBED, sections=slow)
    life.wait_until(lambda: list(life.run.checkpoints.glob(".step-*46.*")), "the save after step 46")
    cancel(life)
    report("scancel during a save", life)
    return life


def cancelled_before_the_requeue(place: Place) -> Life:
    life = place.start("life", on=UNDISTURBED)
    life.wait_for_steps(40)
    place.sandbox.run("scancel", "--signal=USR2", life.job_id)
    life.wait_until((life.attempt.path / "decision.json").exists, "the decision to stop")
    cancel(life)
    report("scancel between save and requeue", life)
    return life


def requeued_after_the_end(place: Place) -> tuple[Life, str, str]:
    life = place.start("life", on=UNDISTURBED, epochs=2)
    life.finish()
    before = digest_of(life.run.path)
    place.sandbox.run("scontrol", "requeue", life.job_id)
    life.wait_until(lambda: life.sandbox.job(life.job_id)["Restarts"] == "1", "the requeue")
    life.finish()
    report("finished, then requeued", life)
    return life, before, digest_of(life.run.path)


def with_strangers(place: Place) -> tuple[Life, Account]:
    """Somebody talks to the port of rank 0 as soon as it is known, and goes on."""
    life = place.start("life", on=UNDISTURBED)
    life.wait_until(lambda: life.attempts and life.attempt.rendezvous.exists(), "a rendezvous")
    meeting = json.loads(life.attempt.rendezvous.read_text())
    while life.sandbox.job(life.job_id)["JobState"] == "RUNNING":
        place_of = (meeting["addresses"][0], meeting["port"])
        with contextlib.suppress(OSError), socket.create_connection(place_of, 1) as door:
            door.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(range(256)))
            time.sleep(0.3)
        time.sleep(0.1)
    return life, place.account("a stranger on the port of rank 0", life)


def resumed_while_it_lives(place: Place) -> tuple[Life, str, Account]:
    life = place.start("life", on=UNDISTURBED)
    life.wait_for_steps(10)
    done = place.sandbox.run(*HPCDDP, "submit", "--resume", life.run.path, check=False)
    assert done.returncode == 2
    return life, done.stderr, place.account("a second job for a run that lives", life)


def digest_of(directory: Path) -> str:
    """Return one digest of every file, but for the batch script's log."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != "batch.log":
            digest.update(f"{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def assert_cancelled_for_good(life: Life) -> None:
    fields = life.sandbox.job(life.job_id)
    assert fields["JobState"] == "CANCELLED"
    assert life.attempts == 1
    newest = checkpoints.newest_valid(life.run.checkpoints, expected=True, warn=lambda _: None)
    assert newest is not None


@looks_at(cancelled_in_training)
def test_a_cancelled_run_stays_cancelled_and_goes_on_only_when_it_is_told_to(played: tuple[Life, Account]) -> None:
    life, account = played
    assert account.came_out_the_same, account
    assert account.attempts == 2
    assert life.events("requeue") == []


@looks_at(cancelled_in_a_save)
def test_a_cancel_during_a_save_leaves_a_checkpoint_that_loads(played: Life) -> None:
    assert_cancelled_for_good(played)
    assert played.events("requeue") == []


@looks_at(cancelled_before_the_requeue)
def test_a_cancel_between_save_and_requeue_is_final(played: Life) -> None:
    assert_cancelled_for_good(played)


@looks_at(requeued_after_the_end)
def test_a_finished_run_that_is_requeued_ends_at_once_and_nothing_changes(played: tuple[Life, str, str]) -> None:
    life, before, after = played
    assert life.sandbox.job(life.job_id)["ExitCode"] == "0:0"
    assert life.attempts == 1
    assert before == after


@looks_at(with_strangers)
def test_strangers_at_the_port_of_rank_0_change_nothing(played: tuple[Life, Account]) -> None:
    _, account = played
    assert account.is_unhurt, account
    assert account.attempts == 1


@looks_at(resumed_while_it_lives)
def test_a_run_that_lives_is_not_continued_by_a_second_job(played: tuple[Life, str, Account]) -> None:
    life, refusal, account = played
    assert life.job_id in refusal
    assert account.is_unhurt, account
    assert account.attempts == 1
