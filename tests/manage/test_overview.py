"""All runs of a run root, and sweeps among them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import UserError
from hpcddp.manage.overview import Filter, Overview, SweepStatus, entry_of, one_run, overview, overview_of
from hpcddp.manage.status import RunStatus
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import append_event
from hpcddp.run.find import add_to_index, find_run
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from hpcddp.slurm.commands import QueuedJob
from hpcddp.slurm.job import State
from tests.manage.runs import NOON, make, queued
from tests.messages import GoldenMessages


def look(root: Path, *jobs: QueuedJob, everything: bool = False) -> Overview:
    return overview(root, ask=lambda: jobs, now=NOON, everything=everything)


def age(run: RunDirectory, number: int) -> None:
    os.utime(run.submission, (NOON - number, NOON - number))


def ids(found: Overview) -> list[str]:
    return [line.run.run_id for line in found.lines if isinstance(line, RunStatus)]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    made = make(tmp_path, "sweep").submitted("50")
    elements = tuple({"train.seed": seed} for seed in range(5))
    sweep = Sweep(
        sweep_id="sweep", path=made.run.path, elements=elements, chunks=(Chunk(job_id="50", first=0, count=5),)
    )
    write_sweep(sweep)
    make(tmp_path, "sweep_0").submitted("50_0").started("50_0").ended("finished", steps=400)
    make(tmp_path, "sweep_1").submitted("50_1").started("50_1").event("train")
    return sweep


def test_a_root_without_runs_is_empty(tmp_path: Path) -> None:
    assert look(tmp_path / "nothing").lines == ()


def test_the_newest_are_first_and_older_ones_that_have_ended_are_left_out(tmp_path: Path) -> None:
    for number in range(30):
        made = make(tmp_path, f"run-{number:02d}").submitted(str(number))
        if number != 25:
            made.ended("finished")
        age(made.run, number)
    found = look(tmp_path, queued("25", "PENDING"))
    assert ids(found) == [f"run-{number:02d}" for number in [*range(20), 25]]
    assert found.left_out == 9
    everything = look(tmp_path, queued("25", "PENDING"), everything=True)
    assert (len(everything.lines), everything.left_out) == (30, 0)


def test_an_old_run_that_is_lost_is_not_shown_for_ever(tmp_path: Path) -> None:
    for number in range(22):
        made = make(tmp_path, f"run-{number:02d}").submitted(str(number))
        age(made.run, number)
    found = look(tmp_path)
    assert (len(found.lines), found.left_out) == (20, 2)


@pytest.mark.usefixtures("sweep")
def test_a_sweep_is_one_line_with_its_counts(tmp_path: Path) -> None:
    make(tmp_path, "alone").submitted("7").ended("failed")
    waiting = [queued(f"50_{index}", "PENDING") for index in (2, 3, 4)]
    found = look(tmp_path, queued("50_1"), *waiting)
    assert ids(found) == ["alone"]
    (line,) = [line for line in found.lines if isinstance(line, SweepStatus)]
    assert line.sentence == "3 pending, 1 running, 1 finished"
    assert line.counts == {State.PENDING: 3, State.RUNNING: 1, State.FINISHED: 1}
    document = line.as_json()
    assert [element["values"]["train.seed"] for element in document["elements"]] == list(range(5))
    assert document["elements"][4]["run_id"] == "sweep_4"


def test_elements_that_were_cancelled_before_they_began_stay_so(tmp_path: Path, sweep: Sweep) -> None:
    append_event(sweep.directory.events, kind="stop", time=NOON, attempt=0, cause="cancelled")
    (line,) = look(tmp_path, queued("50_1")).lines
    assert isinstance(line, SweepStatus)
    assert line.sentence == "1 running, 1 finished, 3 cancelled"


def test_a_sweep_is_no_run(sweep: Sweep, golden: GoldenMessages) -> None:
    assert one_run(sweep.run(1)) == sweep.run(1)
    with pytest.raises(UserError, match="sweep is a sweep of 5 runs") as caught:
        one_run(sweep.directory)
    assert "such as sweep_0" in golden.message(caught.value)


def test_an_element_that_has_not_begun_is_known_by_its_own_id(tmp_path: Path, sweep: Sweep) -> None:
    found = overview_of([entry_of(find_run("sweep_3", tmp_path))], ask=lambda: [queued("50_3", "PENDING")], now=NOON)
    (line,) = found.lines
    assert isinstance(line, RunStatus)
    assert (line.run, line.state) == (sweep.run(3), State.PENDING)


def test_the_values_of_elements_are_told_by_the_last_words_of_their_keys(sweep: Sweep) -> None:
    def values(elements: tuple[dict[str, Any], ...]) -> list[str]:
        found = Sweep(sweep_id="sweep", path=sweep.path, elements=elements, chunks=())
        (line,) = overview_of([found], ask=list, now=NOON).lines
        assert isinstance(line, SweepStatus)
        return line.values

    assert values(tuple({"train.seed": seed} for seed in range(5)))[3] == "seed=3"
    both = {"train.optimizer.name": "sgd", "train.name": "x"}
    assert values((both,)) == ["train.optimizer.name=sgd train.name=x"]


def test_runs_are_chosen_by_state_name_and_time(tmp_path: Path) -> None:
    for number, (name, status) in enumerate((("digits", "failed"), ("digits", "finished"), ("resnet", "failed"))):
        age(make(tmp_path, f"run-{number}", name).submitted(str(number)).ended(status).run, 100 * number)

    def chosen(**conditions: Any) -> list[str]:
        wanted = Filter(**conditions)
        return ids(overview(tmp_path, ask=lambda: (), now=NOON, everything=False, wanted=wanted))

    assert chosen(states=frozenset({State.FAILED})) == ["run-0", "run-2"]
    assert chosen(name="dig*") == ["run-0", "run-1"]
    assert chosen(since=NOON - 150) == ["run-0", "run-1"]
    assert chosen(states=frozenset({State.FAILED}), name="digits") == ["run-0"]
    assert chosen(states=frozenset({State.RUNNING})) == []


def test_everything_shows_the_runs_of_other_roots_once(tmp_path: Path) -> None:
    here, there = make(tmp_path / "here", "a").submitted(), make(tmp_path / "there", "b").submitted()
    for made in (here, there):
        add_to_index(made.run)
    assert ids(look(tmp_path / "here")) == ["a"]
    assert sorted(ids(look(tmp_path / "here", everything=True))) == ["a", "b"]
