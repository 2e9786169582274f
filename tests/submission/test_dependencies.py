"""Waiting for other runs, by their ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.find import NoRunError
from hpcddp.run.job_records import SubmissionRecord, write_submission_record
from hpcddp.run.record import write_record
from hpcddp.run.result import Result
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from hpcddp.slurm import commands
from hpcddp.submission.dependencies import DependencyError, dependency_on
from tests.messages import GoldenMessages

ROOT = Path("runs")


class Known:
    """What Slurm knows: the records of each job."""

    def __init__(self, **jobs: str | list[dict[str, str]]) -> None:
        self.jobs = jobs

    def show_array(self, job_id: str, **_: Any) -> list[dict[str, str]]:
        found = self.jobs.get(f"j{job_id}", [])
        return [{"JobId": job_id, "JobState": found}] if isinstance(found, str) else found


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Known:
    monkeypatch.chdir(tmp_path)
    known = Known()
    monkeypatch.setattr(commands, "show_array", known.show_array)
    return known


def run_called(
    run_id: str, *, job: str | None = "7", status: str | None = None, cluster: Literal["slurm", "local"] = "slurm"
) -> RunDirectory:
    run = RunDirectory((ROOT / "demo" / run_id).absolute())
    run.path.mkdir(parents=True)
    run.script.write_text("")
    if job is not None:
        record = SubmissionRecord(
            cluster=cluster, job_id=job, directory="/", python="py", time=0.0, run_dir=str(run.path)
        )
        write_submission_record(run, record)
    if status is not None:
        write_record(run.result, Result(status=status, reason="a reason"))
    return run


def sweep_called(sweep_id: str, count: int) -> Sweep:
    run = run_called(sweep_id)
    elements = tuple({"train.seed": seed} for seed in range(count))
    sweep = Sweep(
        sweep_id=sweep_id, path=run.path, elements=elements, chunks=(Chunk(job_id="7", first=0, count=count),)
    )
    write_sweep(sweep)
    return sweep


def waits(*, after: tuple[str, ...] = (), after_any: tuple[str, ...] = ()) -> tuple[str | None, tuple[str, ...]]:
    dependency, notes = dependency_on(after, after_any, ROOT, {})
    return dependency.text, tuple(notes)


def refusal(*, after: tuple[str, ...] = (), after_any: tuple[str, ...] = ()) -> str:
    with pytest.raises(DependencyError) as caught:
        dependency_on(after, after_any, ROOT, {})
    return str(caught.value)


def test_runs_that_wait_or_run_are_waited_for_by_their_job_ids(known: Known) -> None:
    run_called("a", job="7")
    run_called("b", job="8")
    run_called("c", job="9_4")
    known.jobs = {
        "j7": "RUNNING",
        "j8": "PENDING",
        "j9_4": [{"JobState": "PENDING", "ArrayJobId": "9", "ArrayTaskId": "4"}],
    }
    assert waits(after=("a", "b", "a"), after_any=("c",)) == ("afterany:7:8:9_4", ())


def test_a_run_that_has_finished_is_not_waited_for(known: Known, golden: GoldenMessages) -> None:
    run_called("a", status="finished")
    condition, (note,) = waits(after=("a",))
    assert condition is None
    assert golden.message(note).startswith("--after a: it has ended already")
    assert waits(after_any=("a",))[0] is None
    assert known.jobs == {}


def test_a_run_that_has_failed_ends_the_wish_for_success_alone(known: Known, golden: GoldenMessages) -> None:
    run = run_called("a", status="failed")
    message = golden.message(refusal(after=("a",)))
    assert message.startswith("--after a: ")
    assert "failed (a reason)" in message
    assert message.endswith(f" hpcddp submit --resume {run.path}, or use --after-any")
    assert waits(after_any=("a",))[0] is None
    assert known.jobs == {}


def test_a_job_that_ended_without_a_result_is_known_by_its_state(known: Known, golden: GoldenMessages) -> None:
    run_called("a")
    known.jobs = {"j7": "CANCELLED"}
    message = golden.message(refusal(after=("a",)))
    assert message.startswith("--after a: job 7 is CANCELLED, ")
    assert message.endswith(" hpcddp submit --resume RUN, or use --after-any")
    assert waits(after_any=("a",))[0] is None


def test_a_job_that_slurm_has_forgotten_is_refused(known: Known, golden: GoldenMessages) -> None:
    run_called("a")
    for option, message in (("--after", refusal(after=("a",))), ("--after-any", refusal(after_any=("a",)))):
        assert golden.message(message).startswith(f"{option} a: Slurm does not know job 7 ")
        assert message.endswith(f" leave {option} out")
    assert known.jobs == {}


def test_a_run_of_this_machine_is_refused(known: Known, golden: GoldenMessages) -> None:
    run_called("a", cluster="local")
    message = golden.message(refusal(after=("a",)))
    assert message.startswith("--after a: ")
    assert "without Slurm" in message
    assert known.jobs == {}


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(None, id="not submitted"),
        # As ``begin_element`` records an element whose job array is not known.
        pytest.param("", id="without a job id"),
    ],
)
def test_a_run_that_was_never_submitted_is_refused(known: Known, golden: GoldenMessages, job: str | None) -> None:
    run_called("a", job=job)
    message = golden.message(refusal(after=("a",)))
    assert message.startswith("--after a: a was never submitted; ")
    assert known.jobs == {}


def test_an_unknown_run_is_refused(known: Known) -> None:
    with pytest.raises(NoRunError, match="matches 'nothing'"):
        dependency_on(["nothing"], [], ROOT, {})
    assert known.jobs == {}


def element_record(index: str, state: str, array: str = "7") -> dict[str, str]:
    return {"JobState": state, "ArrayJobId": array, "ArrayTaskId": index}


def test_a_sweep_is_waited_for_as_a_whole(known: Known) -> None:
    sweep_called("s", 5)
    known.jobs = {"j7": [element_record("3-4%2", "PENDING"), element_record("0", "RUNNING")]}
    run_called("s_1", job="7_1", status="finished")
    run_called("s_2", job="7_2", status="finished")
    assert waits(after=("s",)) == ("afterany:7", ())


def test_an_element_is_waited_for_before_it_has_begun(known: Known) -> None:
    sweep_called("s", 5)
    known.jobs = {"j7_3": [element_record("3-4%2", "PENDING")]}
    assert waits(after=("s_3",)) == ("afterany:7_3", ())


def test_a_sweep_of_which_one_has_failed_cannot_be_waited_for(known: Known, golden: GoldenMessages) -> None:
    sweep_called("s", 2)
    known.jobs = {"j7": [element_record("0", "RUNNING"), element_record("1", "FAILED")]}
    assert golden.message(refusal(after=("s",))).startswith("--after s: job 7_1 is FAILED, ")
    assert waits(after_any=("s",)) == ("afterany:7", ())


def test_a_sweep_of_which_one_was_resumed_is_waited_for_with_its_job(known: Known) -> None:
    sweep_called("s", 3)
    run_called("s_1", job="9_1")
    run_called("s_2", job="7_2", status="finished")
    known.jobs = {
        "j7": [element_record("0", "RUNNING"), element_record("1", "FAILED")],
        "j9": [element_record("1", "PENDING", "9")],
    }
    assert waits(after=("s",)) == ("afterany:7:9", ())


def test_a_sweep_that_has_finished_is_not_waited_for(known: Known, golden: GoldenMessages) -> None:
    sweep_called("s", 2)
    for index in range(2):
        run_called(f"s_{index}", job=f"7_{index}", status="finished")
    condition, (note,) = waits(after=("s",))
    assert condition is None
    assert golden.message(note).startswith("--after s: it has ended already")
    assert known.jobs == {}
