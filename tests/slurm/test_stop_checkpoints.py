"""Death during a save, full disks, rotten files, another number of ranks: what a run goes on from is always whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcddp.run import checkpoints
from tests.slurm.account import Account, report
from tests.slurm.jobs import HPCDDP
from tests.slurm.life import Life, records
from tests.slurm.play import STEPS_PER_EPOCH, UNDISTURBED, Place, looks_at

Played = tuple[Life, Account]


def faults(*texts: str) -> dict[str, Any]:
    return {"environment": {"env": {"HPCDDP_FAULTS": ";".join(texts)}}}


# One before the checkpoint has its name, one between name and `latest`; the others are taken by the repetitions.
SOME_POINTS = ("save.manifest", "save.latest")


def killed_in_saves(place: Place, points: tuple[str, ...] = SOME_POINTS) -> Played:
    """Rank 0 is killed at points of a save, once in each attempt, always in its second save."""
    # In an attempt that begins after epoch e, the second save comes two epochs later; before that one is published.
    texts = [
        f"kill@{point}:{STEPS_PER_EPOCH * (attempt + 2)},attempt={attempt}" for attempt, point in enumerate(points)
    ]
    budgets = {"max_failures": len(points), "max_attempts_without_progress": len(points) + 1}
    life = place.start(
        f"killed-{len(points)}", on=UNDISTURBED, seconds=0.01, sections={**faults(*texts), "requeue": budgets}
    )
    return life, place.account(f"SIGKILL at each of {len(points)} points of a save", life)


def disk_trouble(place: Place) -> Played:
    """Four saves fail, each in another way, with good ones between."""
    places = {"ENOSPC": "file:23", "EROFS": "begin:69", "ESTALE": "rename:115", "EIO": "manifest:161"}
    texts = [f"oserror={error}@save.{point}" for error, point in places.items()]
    life = place.start("disk", on=UNDISTURBED, seconds=0.01, sections=faults(*texts))
    return life, place.account("disk full, read-only, stale handle, I/O error", life)


def folder_gone(place: Place) -> Played:
    """The folder of checkpoints is taken away while it trains."""
    life = place.start("gone", on=UNDISTURBED)
    life.wait_until(lambda: len(life.events("save")) >= 2, "two saves")
    life.run.checkpoints.rename(life.run.path / "elsewhere")
    return life, place.account("checkpoint directory gone", life)


def rotten(place: Place) -> Played:
    """The newest checkpoint is damaged between two attempts."""
    life = place.start("rotten", on=UNDISTURBED)
    life.wait_until(lambda: len(life.events("save")) >= 3, "three saves")
    place.sandbox.run("scancel", life.job_id)
    life.end("CANCELLED")
    newest = checkpoints.list_checkpoints(life.run.checkpoints)[0] / "model.pt"
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    resumed = resume(life)
    return resumed, place.account("newest checkpoint rotten", resumed)


def other_world_size(place: Place) -> tuple[Life, Life]:
    """Two ranks begin, four go on."""
    life = place.start("two", on=UNDISTURBED)
    life.wait_until(lambda: len(life.events("save")) >= 2, "two saves")
    place.sandbox.run("scancel", life.job_id)
    life.end("CANCELLED")
    document = json.loads(life.job.read_text())
    document["resources"]["tasks_per_node"] = 2
    job = life.job.with_name("four.yaml")
    job.write_text(json.dumps(document))
    resumed = resume(life, job)
    resumed.finish()
    report("another world size on resume", resumed)
    return resumed, place.references.of(2, 1)


def resume(life: Life, *job: Path) -> Life:
    """Continue a run that has ended, under a new job id."""
    done = life.sandbox.run(*HPCDDP, "submit", *job, "--resume", life.run.path, "--json", cwd=life.job.parent)
    document = json.loads(done.stdout)
    return Life(sandbox=life.sandbox, job=life.job, run=life.run, job_id=document["job_id"])


@looks_at(killed_in_saves, long=True)
def test_death_at_a_point_of_a_save_leaves_a_checkpoint_to_go_on_from(played: Played) -> None:
    life, account = played
    assert account.came_out_the_same, account
    assert account.attempts == len(SOME_POINTS) + 1
    assert all(event["step"] > 0 for event in life.events("train")[1:])


@looks_at(disk_trouble)
def test_saves_that_fail_now_and_then_cost_nothing_but_a_warning(played: Played) -> None:
    life, account = played
    assert account.is_unhurt, account
    assert account.attempts == 1
    for words in ("No space left on device", "Read-only file system", "Stale file handle", "Input/output error"):
        assert words in life.log()


@looks_at(folder_gone)
def test_a_folder_of_checkpoints_that_is_gone_does_not_end_the_training(played: Played) -> None:
    _, account = played
    assert account.is_unhurt, account
    assert account.attempts == 1


@looks_at(rotten)
def test_a_rotten_checkpoint_is_passed_over_by_name_for_the_one_before_it(played: Played) -> None:
    life, account = played
    assert account.came_out_the_same, account
    assert "is passed over" in life.log()
    assert "sha256" in life.log()
    assert list(Path(life.run.checkpoints).glob("invalid-step-*"))


@looks_at(other_world_size)
def test_twice_as_many_ranks_go_on_with_the_same_batches_to_rounding(played: tuple[Life, Life]) -> None:
    life, reference = played
    assert life.result["world_size"] == 4
    ours, theirs = ([(one["step"], one["samples_seen"]) for one in records(run.run)] for run in played)
    assert ours == theirs
    losses = ([one["loss"] for one in records(run.run)] for run in (life, reference))
    assert [abs(one - other) < 1e-9 for one, other in zip(*losses, strict=True)] == [True] * len(ours)
