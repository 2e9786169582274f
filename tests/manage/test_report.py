"""The numbers and the page of a report, compared with what follows from records that are written by hand."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hpcddp.manage.attempt_times import Phase
from hpcddp.manage.overview import entry_of, overview_of
from hpcddp.manage.report import RunReport, ranked, reports_of
from hpcddp.manage.report_page import page
from hpcddp.run.code import Source, add_source
from hpcddp.run.directory import RunDirectory
from hpcddp.run.record import RecordError
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from tests.manage.runs import NOON, FakeRun, make, queued
from tests.manage.three_attempts import ON_NODES, RANK_SECONDS, three_attempts
from tests.messages import GoldenMessages

HOSTILE = "</pre><script>alert(1)</script>\"'&$x_$\x1b[31m\u202e"
SWEEP_ID = "20261121-084500-5e5e"


def reports(*runs: FakeRun, state: str | None = None, now: float = 4000) -> list[RunReport]:
    """Return the reports of runs; with a state, Slurm knows their job."""
    jobs = [] if state is None else [queued(state=state)]
    return reports_of(overview_of([entry_of(made.run) for made in runs], ask=lambda: jobs, now=NOON + now).lines)


def report(made: FakeRun, **more: Any) -> RunReport:
    (found,) = reports(made, **more)
    return found


def phases(found: RunReport, number: int = 0) -> dict[str, float]:
    return {str(phase): round(seconds, 6) for phase, seconds in found.attempts[number].seconds.items()}


def html(*found: RunReport, title: str = "digits") -> str:
    metric, order = ranked(found)
    return page(order, metric=metric, title=title, now=NOON)


@pytest.fixture
def made(tmp_path: Path) -> FakeRun:
    return make(tmp_path).submitted()


def test_the_times_of_three_attempts_are_those_computed_by_hand(tmp_path: Path) -> None:
    found = report(three_attempts(tmp_path))
    assert phases(found, 0) == {
        "queue": 100, "start_up": 30, "training": 200, "lost": 54, "save": 2, "stop": 4,
    }  # fmt: skip
    assert phases(found, 1) == {
        "queue": 110, "start_up": 20, "training": 200, "evaluation": 5, "save": 3, "stop": 2,
    }  # fmt: skip
    assert phases(found, 2) == {"queue": 170, "start_up": 15, "training": 100, "save": 5}
    rows = [(one.resumed_from, one.last_step, one.lost_steps, one.ranks, one.outcome) for one in found.attempts]
    assert rows == [
        (0, 20, 5, 4, "crash, requeued"),
        (20, 40, 0, 4, "preemption, requeued"),
        (40, 60, 0, 8, "finished"),
    ]


def test_the_sums_over_all_devices_are_those_computed_by_hand(tmp_path: Path, golden: GoldenMessages) -> None:
    document = report(three_attempts(tmp_path)).as_json()
    hours = {name: part["device_hours"] for name, part in document["phases"].items()}
    assert hours == pytest.approx({name: seconds / 3600 for name, seconds in RANK_SECONDS.items()})
    assert document["device_hours"] == pytest.approx(ON_NODES / 3600)
    assert document["goodput"] == pytest.approx(2400 / 3040)
    assert (document["device"], document["goodput_unknown"]) == ("GPU", None)
    assert document["advice"]["phase"] == "start_up"
    assert document["samples_per_s"] == {"p10": 6.4, "median": 6.4, "p90": 12.8}
    accuracy = {"last": {"value": 0.7, "step": 60}, "best": {"value": 0.75, "step": 30}}
    assert document["metrics"]["val_accuracy"] == accuracy
    assert document["metrics"]["val_loss"]["best"] == {"value": 0.25, "step": 30}
    first_error = golden.message(document["first_error"]["sentence"])
    assert first_error.startswith("rank 2 on n1 failed first")
    assert "step 25: IndexError" in first_error
    json.dumps(document, allow_nan=False)


def test_the_first_error_says_how_the_run_went_on(made: FakeRun) -> None:
    made.started().failed(2, step=25).event("restart", at=40, cause="crash", reason="rank 2 on n1 failed first")
    made.started(attempt=1, at=50)
    found = report(made, state="RUNNING")
    went_on = "the run went on: its tasks were started again in the same job, as attempt 1"
    assert found.as_json()["first_error"]["went_on"] == went_on
    assert went_on in html(found)


def test_the_wait_for_data_and_the_slowest_rank_are_those_computed_by_hand(tmp_path: Path) -> None:
    document = report(three_attempts(tmp_path)).as_json()
    assert document["data_wait"] == {"seconds": pytest.approx(3 * 19 * 0.3), "share": pytest.approx(3 * 19 * 0.3 / 500)}
    assert document["slowest_rank"] == {
        "attempt": 2, "rank": 1, "host": "n1", "data_wait_s": 0.3, "forward_s": 2.0, "median_s": pytest.approx(2.1),
    }  # fmt: skip


def test_a_long_wait_for_data_is_what_would_help_most(tmp_path: Path, golden: GoldenMessages) -> None:
    made = three_attempts(tmp_path)
    made.run.events.write_text(made.run.events.read_text().replace('"wait_s": 5.7', '"wait_s": 145'))
    advice = report(made).advice
    assert advice.phase == Phase.TRAINING
    assert golden.message(advice.sentence).startswith("Load the data faster")
    # 3 * 145 s of 500 s in the training, which is 2400 of 3040 rank seconds.
    assert "69% of the time" in advice.sentence


@pytest.mark.parametrize(
    "wrong",
    [
        {"train_s": -1.0}, {"wait_s": "5"}, {"save_s": 1e308}, {"eval_s": None}, {"slowest": [1]},
        {"slowest": {"rank": 1.5, "data_wait_s": 0.1, "forward_s": None, "median_s": 0.1}},
    ],
    ids=str,
)  # fmt: skip
def test_of_an_account_that_cannot_be_the_one_before_counts(tmp_path: Path, wrong: dict[str, Any]) -> None:
    made = three_attempts(tmp_path)
    made.account(55, attempt=2, at=1015.5, **{"train_s": 95.0, **wrong})
    found = report(made)
    assert found.attempts[2].account is not None
    assert (found.attempts[2].account.step, found.attempts[2].seconds[Phase.TRAINING]) == (60, 100)


def test_every_step_waits_for_a_rank_that_is_much_slower(tmp_path: Path, golden: GoldenMessages) -> None:
    made = three_attempts(tmp_path)
    slowest = {"rank": 1, "data_wait_s": 0.487, "forward_s": 0.014, "median_s": 0.016}
    made.account(60, attempt=2, at=1016, train_s=100.0, slowest=slowest)
    text = " ".join(html(report(made)).split())
    (paragraph,) = re.findall(r"Every step waits for [^<]*", text)
    sentence = golden.message(paragraph)
    for fact in ("rank 1 on n1 (attempt 2)", "it needed 501 ms", "data (487 ms)", "forward (14 ms)"):
        assert fact in sentence
    assert "median rank needed 16 ms" in sentence


def test_a_restart_in_the_same_job_is_told(made: FakeRun) -> None:
    made.started().steps(1, 10).event("restart", at=30, reason="rank 1 was killed", cause="crash")
    made.started(attempt=1, at=31).steps(11, 20, at=32)
    (first, _) = report(made, state="RUNNING").attempts
    assert (first.outcome, first.is_end_known) == ("crash, restarted", True)


def test_without_measured_steps_nothing_is_said_of_the_ranks(made: FakeRun) -> None:
    found = report(made.started().steps(1, 10), state="RUNNING")
    assert (found.data_wait, found.slowest_rank) == (None, None)
    assert "The wait for data is unknown" in html(found)


def test_the_page_shows_these_numbers(tmp_path: Path) -> None:
    text = html(report(three_attempts(tmp_path)))
    for words in (
        "78.9%",
        "0.844",
        "GPU-hours",
        "crash, requeued",
        "11% of the time on the nodes",
        "IndexError: 10",
        "3.4% of their duration",
        "rank 1 on n1",
        "300 ms",
        "about equally fast",
    ):
        assert words in text
    # Two for each of four metrics.
    assert text.count("<svg") == 2 * 4


def resumed(made: FakeRun) -> FakeRun:
    """Write a run that has finished, and was given more epochs; its second start took longer than its training."""
    change = {"key": "train.epochs", "before": 1, "after": 2, "attempt": 1}
    made.started(at=100).event("train", at=130, step=0).steps(1, 5, at=132, seconds=2)
    made.event("finish", at=140, step=5).event("resume", at=150, reason="resumed by me").submitted(changes=[change])
    made.started(at=300, attempt=1).event("train", at=330, attempt=1, step=5).steps(6, 10, at=332, seconds=2)
    return made.event("finish", at=340, attempt=1, step=10).ended("finished", steps=10)


def test_a_change_of_the_training_is_told_of_the_attempt_that_began_with_it(made: FakeRun) -> None:
    found = report(resumed(made))
    assert [attempt.get("changes") for attempt in found.as_json()["attempts"]] == [None, ["train.epochs 1 -> 2"]]
    text = html(found)
    assert '<th class="text">change</th>' in text
    assert "train.epochs 1 -&gt; 2</td>" in text


def test_an_attempt_that_ran_other_code_than_was_submitted_is_told(made: FakeRun) -> None:
    what = "train.py changed since the submission; this attempt runs the new one"
    found = report(resumed(made).event("code", at=301, attempt=1, reason=what))
    assert found.as_json()["code_changes"] == [{"attempt": 1, "what": what}]
    assert f"<p>Attempt 1: {what}.</p>" in html(found)


def test_without_a_change_the_table_has_no_column_for_it(tmp_path: Path) -> None:
    assert '<th class="text">change</th>' not in html(report(three_attempts(tmp_path)))


def test_attempts_that_slurm_has_ended_are_what_a_longer_limit_makes_fewer(
    made: FakeRun, golden: GoldenMessages
) -> None:
    made.started(at=100).event("train", at=130, step=0).steps(1, 5, at=132, seconds=2)
    made.event("stop", at=140, step=5, saved=True, cause="preemption").event("requeue", at=141, cause="preemption")
    made.started(at=300, attempt=1).event("train", at=330, attempt=1, step=5).steps(6, 10, at=332, seconds=2)
    made.event("finish", at=340, attempt=1, step=10).ended("finished", steps=10)
    advice = golden.message(report(made).advice.sentence)
    assert advice.startswith("Start less often: 1 of 2 attempts")
    assert "A longer time_limit" in advice
    assert "The queue took longer, 4m" in advice


def test_attempts_that_the_user_has_ended_or_added_are_not_held_against_the_job(
    made: FakeRun, golden: GoldenMessages
) -> None:
    advice = golden.message(report(resumed(made)).advice.sentence)
    assert advice.startswith("Shorten the start-up")
    assert "or train longer" in advice


def test_a_run_on_this_machine_gets_no_advice_about_slurm(made: FakeRun, golden: GoldenMessages) -> None:
    made.started(at=100).event("train", at=130, step=0).steps(1, 5, at=132, seconds=2).event("finish", at=140, step=5)
    made.submitted(cluster="local").ended("finished", steps=5)
    advice = golden.message(report(made).advice.sentence)
    assert advice.startswith("Shorten the start-up")
    assert "30s, 75% of the time" in advice
    assert "train longer" not in advice


def test_steps_that_a_cancelled_attempt_lost_are_no_reason_to_save_more_often(made: FakeRun) -> None:
    made.started().event("train", at=20, step=0).steps(1, 10, at=30, seconds=10)
    made.account(5, at=70, train_s=50.0).event("save", at=71, step=5, seconds=1.0, blocked_s=0.0)
    made.event("stop", at=122, cause="cancelled").ended("cancelled", reason="cancelled by its user")
    assert report(made).advice.phase == Phase.START_UP


def test_steps_of_a_failed_run_after_its_last_checkpoint_are_lost(made: FakeRun) -> None:
    made.started().event("train", at=20, step=0).steps(1, 10, at=30, seconds=10)
    made.account(5, at=70, train_s=50.0).event("save", at=71, step=5, seconds=1.0, blocked_s=0.0)
    made.failed(0, at=120, step=10).event("failure", at=122).ended("failed", reason="no", exit_code=70)
    found = report(made)
    assert phases(found) == {"queue": 10, "start_up": 10, "training": 50, "lost": 50, "stop": 2}
    assert found.attempts[0].lost_steps == 5
    assert found.goodput.value == pytest.approx(50 / 112)
    # Young: sqrt(2 * 0.1 s * 112 s) is below a minute.
    assert found.advice.sentence.startswith("Save every 1 minutes (checkpoint.every: 1min)")


@pytest.mark.parametrize("saved_step", [5, 10])
def test_the_time_of_a_hang_is_lost_and_its_cause_is_what_to_look_for(
    made: FakeRun, saved_step: int, golden: GoldenMessages
) -> None:
    made.started().event("train", at=20, step=0).steps(1, 10, at=30, seconds=10)
    made.failed(0, at=420, step=10, kind="hang", exit_code=124, waiting=True)
    made.account(saved_step, at=20 + 10 * saved_step, train_s=10.0 * saved_step)
    made.event("save", at=421, step=saved_step, seconds=1.0, blocked_s=0.0)
    made.event("failure", at=422, exit_code=124).ended("failed", reason="a hang", exit_code=124)
    found = report(made)
    assert phases(found) == {
        "queue": 10, "start_up": 10, "training": saved_step * 10, "lost": 400 - saved_step * 10, "stop": 2,
    }  # fmt: skip
    advice = golden.message(found.advice.sentence)
    assert "hpcddp logs run-1 --first-error" in advice
    assert advice.startswith("Save every" if saved_step < 10 else "Remove the cause")


def test_a_hang_before_the_first_step_is_no_unknown_goodput(made: FakeRun) -> None:
    made.started().event("train", at=20, step=0).failed(0, at=420, kind="hang", exit_code=124, waiting=True)
    found = report(made.event("failure", at=422, exit_code=124).ended("failed", reason="a hang", exit_code=124))
    assert (found.goodput.value, found.advice.phase) == (0.0, Phase.LOST)


def test_the_time_since_the_last_save_of_a_run_that_is_training_counts_so_far(made: FakeRun) -> None:
    made.started().event("train", at=20, step=0).steps(1, 10, at=30, seconds=10)
    found = report(made, state="RUNNING", now=121)
    assert phases(found) == {"queue": 10, "start_up": 10, "training": 101}
    assert found.attempts[0].as_json()["ended"] is None
    made.account(5, at=72, train_s=50.0, eval_s=1.0, save_s=0.5)
    found = report(made, state="RUNNING", now=121)
    assert phases(found) == {
        "queue": 10, "start_up": 10, "training": 99, "evaluation": 1, "save": 0.5, "other": 0.5,
    }  # fmt: skip
    assert found.attempts[0].last_step == 10


def test_an_attempt_that_was_killed_between_saves_loses_what_it_had_not_saved(made: FakeRun) -> None:
    # Its node was lost: no rank left a record, and the lines after the checkpoint are dropped.
    made.started().event("train", at=20, step=0).steps(1, 5, at=30, seconds=10)
    made.account(5, at=70, train_s=50.0).event("save", at=71, step=5, seconds=1.0, blocked_s=0.0)
    made.event("requeue", at=100, cause="node_failure", by="hpcddp")
    made.started(at=120, attempt=1).event("train", at=130, attempt=1, step=5)
    found = report(made, state="RUNNING", now=140)
    assert phases(found) == {"queue": 10, "start_up": 10, "training": 50, "lost": 30}
    assert phases(found, 1) == {"queue": 20, "start_up": 10, "training": 10}
    assert found.goodput.value == pytest.approx(60 / 110)


def test_what_a_damaged_checkpoint_had_saved_is_lost(made: FakeRun) -> None:
    made.started().event("train", at=20, step=0).account(5, at=70, train_s=50.0)
    made.event("save", at=71, step=5, seconds=1.0, blocked_s=0.0).account(10, at=120, train_s=100.0)
    made.event("save", at=121, step=10, seconds=1.0, blocked_s=0.0)
    made.event("stop", at=121, step=10, saved=True, cause="preemption").event("requeue", at=122, cause="preemption")
    made.started(at=140, attempt=1).event("train", at=150, attempt=1, step=5)
    found = report(made, state="RUNNING", now=160)
    assert phases(found) == {"queue": 10, "start_up": 10, "training": 50, "lost": 51, "stop": 1}
    assert (found.attempts[0].last_step, found.attempts[0].lost_steps) == (5, 5)


def test_a_requeue_that_the_user_requested_is_named_once(made: FakeRun) -> None:
    made.started().steps(1, 10)
    made.event("stop", at=390, step=10, cause="requeued").event("requeue", at=391, cause="requeued", by="user")
    assert [attempt.outcome for attempt in report(made).attempts] == ["requeued"]


def test_a_stop_of_unknown_cause_is_told_as_its_supervisor_knows_it(made: FakeRun) -> None:
    made.started().event("stop", at=50, step=5, saved=True, cause="unknown")
    assert report(made).attempts[0].outcome == "stopped"
    made.event("stop", at=51, step=5, cause="cancelled")
    assert report(made).attempts[0].outcome == "cancelled"


def test_an_attempt_that_left_no_end_makes_the_goodput_unknown_and_not_zero(
    made: FakeRun, golden: GoldenMessages
) -> None:
    made.started().event("train", at=20, step=0).steps(1, 10, at=30, seconds=10)
    made.event("requeue", at=500, cause="node_failure", by="slurm", reason="Slurm requeued the job on its own")
    made.started(at=500, attempt=1).event("train", at=520, attempt=1, step=5)
    found = report(made, state="RUNNING", now=530)
    assert found.goodput.value is None
    assert "end of attempt 0" in golden.message(found.goodput.unknown)
    assert "unknown: the end of attempt 0" in html(found)


def test_slurm_knows_when_an_attempt_ended_whose_node_was_lost(made: FakeRun) -> None:
    made.started().event("train", at=20, step=0).steps(1, 10, at=30, seconds=10)
    made.event("requeue", at=500, cause="node_failure", by="slurm", reason="Slurm requeued the job on its own")
    submitted = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(NOON + 300))
    made.started(at=500, attempt=1, submit_time=submitted).event("train", at=520, attempt=1, step=5)
    found = report(made, now=530)
    assert (found.attempts[0].ended - NOON, found.attempts[0].is_end_known) == (300, True)


def test_a_program_that_records_no_steps_has_no_goodput(made: FakeRun) -> None:
    made.started().event("train", at=20, reason="python train.py").event("finish", at=100).ended("finished")
    found = report(made)
    assert phases(found) == {"queue": 10, "start_up": 10, "program": 80}
    assert (found.goodput.value, found.goodput.unknown) == (None, "the program records no steps")


def test_steps_that_a_program_logged_twice_count_once(made: FakeRun) -> None:
    def log(first: int, last: int, at: float) -> None:
        with made.run.metrics.open("a") as stream:
            for place, step in enumerate(range(first, last + 1), start=1):
                stream.write(json.dumps({"step": step, "reward": step, "time": NOON + at + 10 * place}) + "\n")

    made.started().event("train", at=20, reason="demo:train")
    log(1, 10, 20)
    made.event("requeue", at=120, cause="crash").started(at=200, attempt=1).event("train", at=210, attempt=1)
    log(6, 10, 210)
    made.event("finish", at=260, attempt=1).ended("finished")
    found = report(made)
    assert phases(found, 0) == {"queue": 10, "start_up": 20, "training": 40, "lost": 50}
    assert phases(found, 1) == {"queue": 80, "start_up": 20, "training": 40}
    assert found.goodput.value == pytest.approx(80 / 170)
    assert found.metrics == ("reward",)


@pytest.mark.parametrize("metric", ["val_loss", "val_accuracy"])
def test_the_best_of_equal_values_is_the_first(made: FakeRun, metric: str) -> None:
    with made.run.metrics.open("a") as stream:
        for step in (10, 20, 30):
            stream.write(json.dumps({"step": step, metric: 0.5, "time": NOON + step}) + "\n")
    best = report(made.started()).measured.best(metric)
    assert best is not None
    assert (best.value, best.step) == (0.5, 10)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_phases_on_the_nodes_add_up_to_the_time_of_the_attempt(tmp_path: Path, number: int) -> None:
    attempt = report(three_attempts(tmp_path)).attempts[number]
    assert sum(attempt.seconds.values()) - attempt.seconds[Phase.QUEUE] == pytest.approx(attempt.on_nodes_s)


RECORDS = (
    "job.yaml",
    "submission.json",
    "result.json",
    "source.json",
    "attempts/1/start.json",
    "attempts/1/ranks.json",
)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_a_damaged_record_is_one_sentence_in_the_page(tmp_path: Path, name: str, content: bytes) -> None:
    made = three_attempts(tmp_path)
    (made.run.path / name).write_bytes(content)
    found = report(made)
    assert [sentence for sentence in found.damaged if name in sentence] == list(found.damaged)
    assert len(found.damaged) == 1
    assert html(found).count('<p class="damage">') == 1
    is_start_known = name != "attempts/1/start.json"
    assert len(found.attempts) == (3 if is_start_known else 2)


def test_metrics_that_cannot_be_read_are_one_sentence_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = three_attempts(tmp_path)

    def fail(path: Path) -> None:
        raise RecordError(f"{path} cannot be read (Input/output error)", path=path)

    # A file server that fails.
    monkeypatch.setattr("hpcddp.manage.report.read_run_metrics", fail)
    found = report(made)
    assert list(found.damaged) == [f"{made.run.metrics} cannot be read (Input/output error)"]
    assert len(found.attempts) == 3


def test_damaged_lines_of_logs_are_told_and_the_goodput_is_not_guessed(tmp_path: Path, golden: GoldenMessages) -> None:
    made = three_attempts(tmp_path)
    for path in (made.run.metrics, made.run.events):
        path.write_bytes(path.read_bytes() + b'garbage\n{"step": true}\n[]\n')
    found = report(made)
    for sentence, name in zip(found.damaged, ("events", "metrics"), strict=True):
        assert f"{name}.jsonl: 3 lines are damaged" in golden.message(sentence)
    assert found.goodput.unknown == "lines of its event log are damaged"


def test_a_run_that_has_not_begun_has_a_page(made: FakeRun) -> None:
    found = report(made, state="PENDING")
    assert (found.goodput.value, found.goodput.unknown) == (None, "no attempt has begun")
    assert "No attempt has begun." in html(found)


def test_hostile_values_are_text_in_the_page(tmp_path: Path) -> None:
    made = three_attempts(tmp_path, name="digits")
    with made.run.metrics.open("a") as stream:
        stream.write(json.dumps({"step": 61, "loss": 1.0, HOSTILE: 0.5, "time": NOON + 1019}) + "\n")
    made.failed(1, attempt=2, at=1019, kind=HOSTILE, message=HOSTILE, traceback=f"T\n{HOSTILE}")
    made.ended("failed", reason=HOSTILE, exit_code=70)
    source = Source(time=NOON, commit="c", branch=HOSTILE, dirty=True, diff=f"+{HOSTILE}\n", directory=HOSTILE,
                    python=HOSTILE, python_version=HOSTILE, packages={HOSTILE: HOSTILE})  # fmt: skip
    add_source(made.run, source)
    text = html(report(made), title=HOSTILE)
    assert text.count("&lt;script&gt;alert(1)") >= 8
    for never in ("<script", "\x1b", "\u202e", "</pre><s"):
        assert never not in text


def test_the_page_needs_no_network_and_no_script(tmp_path: Path) -> None:
    text = html(report(three_attempts(tmp_path)))
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"\w+://[^\"'\s<)]+", text)) <= names
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|link|img|iframe|object)\b|@import|url\((?!#)", text)


def test_the_colours_are_those_of_the_page_so_that_it_is_light_and_dark(tmp_path: Path) -> None:
    text = html(report(three_attempts(tmp_path)))
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "prefers-color-scheme: dark" in text
    assert {"var(--c0)", "var(--ink)", "var(--grid)"} <= set(re.findall(r"var\([^)]*\)", drawings))
    assert "#e0" not in drawings


def test_a_page_about_a_hundred_thousand_steps_is_small(made: FakeRun) -> None:
    made.started().event("train", at=20, step=0).steps(1, 100_000, at=20, seconds=0.01)
    made.event("finish", at=1030, step=100_000).ended("finished", steps=100_000)
    found = report(made)
    assert len(html(found)) < 1_500_000


@pytest.mark.parametrize(("largest", "axes"), [(50.0, 0), (2000.0, 2)])
def test_values_of_several_powers_of_ten_have_a_logarithmic_axis(made: FakeRun, largest: float, axes: int) -> None:
    made.started().event("train", at=20, reason="demo:train")
    values = [{"loss": largest, "reward": 1.0}, {"loss": 1.0, "reward": -largest}]
    lines = [json.dumps({"step": step, "time": NOON + 30 + step, **value}) for step, value in enumerate(values, 1)]
    made.run.metrics.write_text("\n".join([*lines, ""]))
    # Over the steps and over the time; values that are not positive have none.
    assert html(report(made)).count("log scale") == axes


def test_the_words_about_the_axis_are_not_in_the_drawing(made: FakeRun) -> None:
    made.started().event("train", at=20, reason="demo:train")
    made.run.metrics.write_text('{"step": 1, "loss": 5000}\n{"step": 2, "loss": 0.01}\n')
    text = html(report(made))
    assert "<span>over steps, log scale</span>" in text
    assert "log scale" not in "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))


SMALLEST = 5e-324
DAMAGED: dict[str, list[dict[str, Any]]] = {
    "an evaluation before any time": [{"step": 0, "val_loss": 1.0, "eval_s": 5.0}, {"step": 1, "loss": 1.0}],
    "the smallest and large numbers": [{"step": 1, "loss": SMALLEST}, {"step": 2, "loss": 1e99}],
    "only the smallest numbers": [{"step": 1, "loss": SMALLEST}, {"step": 2, "loss": 2 * SMALLEST}],
    "the largest numbers": [{"step": 1, "loss": 1e308}, {"step": 2, "loss": -1e308}, {"step": 3, "loss": 1e308}],
    "integers of many digits": [{"step": 1, "loss": 10**400}, {"step": 2, "loss": -(10**400)}, {"step": 3, "loss": 1}],
    "no number": [{"step": 1, "loss": math.nan}, {"step": 2, "loss": math.inf}, {"step": 3, "loss": "1.5"}],
    "negative steps": [{"step": -1, "loss": 1.0}, {"step": -2, "loss": 2.0}],
    "one line of a step that is too large": [{"step": 2**53, "loss": 1.0}],
    "zero and negative numbers": [{"step": 1, "loss": 0.0}, {"step": 2, "loss": -1e6}, {"step": 3, "loss": 1e6}],
    "durations that cannot be": [{"step": 1, "eval_s": 1e308, "time": NOON + 30, "loss": 1.0}] * 3,
    "rates that cannot be": [
        {"step": step, "samples_seen": 1e15 * step, "samples_per_s": SMALLEST, "time": NOON + 30, "loss": 1.0}
        for step in (1, 2, 3)
    ],
    "times that cannot be": [
        {"step": step, "time": time, "loss": 1.0} for step, time in enumerate((1e300, -5, "x", 2**60))
    ],
}


@pytest.mark.parametrize("reason", [{"step": 0}, {"reason": "python train.py"}], ids=["training", "program"])
@pytest.mark.parametrize("lines", DAMAGED.values(), ids=DAMAGED)
def test_metrics_that_cannot_be_give_a_page(made: FakeRun, lines: list[dict[str, Any]], reason: dict[str, Any]) -> None:
    made.started().event("train", at=20, **reason).event("finish", at=200).ended("finished")
    made.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = report(made)
    json.dumps(found.as_json(), allow_nan=False)
    assert not re.search(r"\b(nan|inf)\b", re.sub("<[^>]*>", "", html(found)), flags=re.IGNORECASE)


@pytest.mark.parametrize("seed", range(6))
def test_random_metrics_give_a_page(made: FakeRun, seed: int) -> None:
    chance = random.Random(seed)
    values = [line["loss"] for lines in DAMAGED.values() for line in lines if "loss" in line] + [None, True, [], 2**53]
    names = ["loss", "val_loss", "samples_per_s", "samples_seen", "eval_s", "time", "step"]
    lines = [
        {
            "step": number,
            "time": NOON + 30 + number,
            **{name: chance.choice(values) for name in chance.sample(names, 3)},
        }
        for number in range(100)
    ]
    made.started().event("train", at=20, step=0).started(at=80, attempt=1).event("train", at=90, attempt=1, step=20)
    made.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = report(made, state="RUNNING")
    json.dumps(found.as_json(), allow_nan=False)
    assert "<svg" in html(found)


def test_a_run_that_is_training_has_no_end_yet(made: FakeRun) -> None:
    made.started().event("train", at=20, step=0).steps(1, 10, at=30, seconds=10)
    assert "since the first start" in html(report(made, state="RUNNING", now=121))
    made.event("finish", at=121, step=10).ended("finished", steps=10)
    assert "from the first start to the end" in html(report(made))


def test_the_legend_names_the_job_and_the_id_of_each_run(tmp_path: Path) -> None:
    runs = [make(tmp_path, f"20261126-025413-{name}", f"job-{name}").submitted().started() for name in ("e1c4", "43ee")]
    labels = legend_of(html(*reports(*(made.steps(1, 3) for made in runs))))
    assert labels == ["job-e1c4/20261126-025413-e1c4", "job-43ee/20261126-025413-43ee"]


def legend_of(text: str) -> list[str]:
    legend = text[text.index("Curves</h2>") : text.index("<figure>")]
    return re.findall(r"</span>([^<]*)</li>", legend)


def test_long_texts_are_cut(tmp_path: Path) -> None:
    runs = [three_attempts(tmp_path, f"run-{number}") for number in range(12)]
    for number, made in enumerate(runs):
        add_source(made.run, Source(time=NOON, commit="c", dirty=True, diff=f"+{number}<\n" * 60_000))
    text = html(*reports(*runs))
    assert "(only the beginning)" in text
    assert len(text) < 2_500_000


def test_runs_that_measured_different_things_share_a_page(tmp_path: Path) -> None:
    other = make(tmp_path, "other").submitted().started().event("train", at=20, reason="demo:train")
    with other.run.metrics.open("a") as stream:
        stream.write(json.dumps({"step": 1, "reward": 3, "time": NOON + 30}) + "\n")
    found = reports(three_attempts(tmp_path), other, make(tmp_path, "empty").submitted())
    for order in (found, found[::-1]):
        # loss, val_loss, val_accuracy, reward and samples_per_s.
        assert html(*order).count("<svg") == 2 * 5


@pytest.fixture
def sweep(tmp_path: Path) -> list[RunReport]:
    made = make(tmp_path, SWEEP_ID, "rates").submitted("12")
    elements = tuple({"learning_rate.base": rate} for rate in (0.1, 0.2, 0.4))
    write_sweep(
        Sweep(sweep_id=SWEEP_ID, path=made.run.path, elements=elements, chunks=(Chunk(job_id="12", first=0, count=3),))
    )
    for index, accuracy in enumerate((0.7, 0.9)):
        element = make(tmp_path, f"{SWEEP_ID}_{index}", "rates").submitted(f"12_{index}").started(f"12_{index}")
        element.event("train", at=20, step=0).steps(1, 10, at=30, seconds=1)
        line = {"step": 10, "val_accuracy": accuracy, "val_loss": 1.0, "val_samples": 10, "eval_s": 1.0}
        with element.run.metrics.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        element.event("finish", at=41, step=10).ended("finished", steps=10)
    return reports(made)


def test_the_elements_of_a_sweep_are_ranked_the_best_first(sweep: list[RunReport]) -> None:
    metric, order = ranked(sweep)
    assert metric == "val_accuracy"
    assert [one.run.run_id[-1] for one in order] == ["1", "0", "2"]
    assert order[0].values == {"learning_rate.base": 0.2}


def test_the_page_of_a_sweep_has_a_table_and_curves_of_all_elements(sweep: list[RunReport]) -> None:
    text = html(*sweep)
    rows = re.findall(rf"{SWEEP_ID}_(\d): base=([0-9.]+)</a>", text)
    assert rows == [("1", "0.2"), ("0", "0.1"), ("2", "0.4")]
    assert {"var(--c0)", "var(--c1)"} <= set(re.findall(r"var\(--c\d\)", text))


def test_the_page_of_a_sweep_shows_a_value_that_a_resumption_has_changed(sweep: list[RunReport]) -> None:
    change = {"key": "learning_rate.base", "before": 0.1, "after": 0.05, "attempt": 1}
    FakeRun(sweep[0].run).submitted("13_0", changes=[change])
    found = reports(FakeRun(RunDirectory(sweep[0].run.path.with_name(SWEEP_ID))))
    assert "base=0.1 -&gt; 0.05" in html(*found)


def test_the_page_of_a_sweep_names_a_key_whole_where_another_has_the_same_last_word(tmp_path: Path) -> None:
    made = make(tmp_path, SWEEP_ID, "rates").submitted("12")
    elements = ({"learning_rate.base": 0.1, "model_args.base": 64}, {"learning_rate.base": 0.1, "model_args.base": 128})
    chunks = (Chunk(job_id="12", first=0, count=2),)
    write_sweep(Sweep(sweep_id=SWEEP_ID, path=made.run.path, elements=elements, chunks=chunks))
    assert f"{SWEEP_ID}_1: learning_rate.base=0.1 model_args.base=128</a>" in html(*reports(made))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_opens_the_page(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(html(report(three_attempts(tmp_path))))
    words = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*words, "--enable-logging=stderr", "--dump-dom", f"file://{tmp_path / 'page.html'}"],
        capture_output=True, text=True, timeout=240, check=True, env=environment,
    )  # fmt: skip
    assert done.stdout.count("<svg") == 8
    assert "78.9%" in done.stdout
    assert "CONSOLE" not in done.stderr


def records(made: FakeRun, first: int, last: int, *, at: float, seconds: float, every: int = 1) -> FakeRun:
    """Append what ``hpcddp.log`` writes: the first record at a time, and one for each interval of steps."""
    with made.run.metrics.open("a") as stream:
        for place, step in enumerate(range(first, last + 1, every)):
            stream.write(json.dumps({"step": step, "loss": 1.0, "time": NOON + at + place * seconds}) + "\n")
    return made


def test_a_command_starts_up_until_its_first_record_and_stops_after_its_last(made: FakeRun) -> None:
    # 29 s on the node: 19.2 s of imports and data, 20 records within 0.76 s, and 9.04 s until the program has ended.
    made.started().event("train", at=12, reason="python train.py")
    records(made, 1, 20, at=29.2, seconds=0.04)
    made.event("finish", at=39).ended("finished")
    found = report(made)
    assert phases(found) == {"queue": 10, "start_up": 19.2, "training": 0.76, "stop": 9.04}
    assert found.goodput.value == pytest.approx(0.76 / 29)
    assert found.advice.phase == Phase.START_UP
    assert (found.attempts[0].resumed_from, found.attempts[0].last_step, found.attempts[0].lost_steps) == (0, 20, 0)


def test_an_attempt_of_a_command_that_ended_before_its_first_record_was_starting_up(made: FakeRun) -> None:
    made.started(at=10).event("train", at=12, reason="python train.py")
    made.event("requeue", at=28, cause="preemption", by="hpcddp")
    made.started(at=40, attempt=1).event("train", at=42, attempt=1, reason="python train.py")
    records(made, 1, 11, at=60, seconds=2)
    made.event("finish", at=85, attempt=1).ended("finished")
    found = report(made)
    assert phases(found, 0) == {"queue": 10, "start_up": 18}
    assert phases(found, 1) == {"queue": 12, "start_up": 20, "training": 20, "stop": 5}
    assert found.goodput.value == pytest.approx(20 / 63)
    assert found.goodput.unknown is None
    assert [attempt.resumed_from for attempt in found.attempts] == [None, 0]


def test_the_step_that_an_attempt_of_a_command_went_on_from_is_the_one_before_its_first_record(made: FakeRun) -> None:
    # Records from 30 s to 230 s, of which those after step 198 (at 227 s) are repeated.
    made.started(at=10).event("train", at=12, reason="python train.py")
    records(made, 1, 201, at=30, seconds=1)
    made.event("requeue", at=240, cause="preemption", by="hpcddp")
    made.started(at=300, attempt=1).event("train", at=302, attempt=1, reason="python train.py")
    records(made, 199, 305, at=320, seconds=1)
    made.event("requeue", at=430, attempt=1, cause="preemption", by="hpcddp")
    made.started(at=500, attempt=2).event("train", at=502, attempt=2, reason="python train.py")
    records(made, 306, 400, at=510, seconds=1)
    made.event("finish", at=610, attempt=2).ended("finished")
    found = report(made)
    rows = [(one.resumed_from, one.last_step, one.lost_steps) for one in found.attempts]
    assert rows == [(0, 198, 3), (198, 305, 0), (305, 400, 0)]
    assert phases(found, 0) == {"queue": 10, "start_up": 20, "training": 197, "lost": 3, "stop": 10}
    assert phases(found, 1) == {"queue": 60, "start_up": 20, "training": 106, "stop": 4}
    assert found.goodput.value == pytest.approx((197 + 106 + 94) / (230 + 130 + 110))
    assert re.findall(r"<td>(198|305)</td>\s*<td>(305|400)</td>", html(found)) == [("198", "305"), ("305", "400")]


def test_a_checkpoint_tells_where_a_program_that_records_every_tenth_step_went_on(made: FakeRun) -> None:
    # Each save ends after the last record of its attempt that counts.
    made.started(at=10).event("train", at=12, reason="python train.py")
    records(made, 10, 60, at=100, seconds=10, every=10)
    made.event("save", at=132, step=35, seconds=3.0, blocked_s=1.0)
    made.event("requeue", at=155, cause="crash", by="hpcddp")
    made.started(at=200, attempt=1).event("train", at=202, attempt=1, reason="python train.py")
    records(made, 40, 60, at=230, seconds=10, every=10)
    made.event("save", at=254, attempt=1, step=60, seconds=2.0, blocked_s=2.0)
    made.event("finish", at=260, attempt=1).ended("finished")
    found = report(made)
    rows = [(one.resumed_from, one.last_step, one.lost_steps) for one in found.attempts]
    assert rows == [(0, 30, 25), (35, 60, 0)]
    assert phases(found, 0) == {"queue": 10, "start_up": 90, "training": 20, "lost": 30, "stop": 5}
    assert phases(found, 1) == {"queue": 45, "start_up": 30, "training": 20, "stop": 10}


def test_what_follows_the_last_record_of_a_command_that_failed_is_lost(made: FakeRun) -> None:
    made.started().event("train", at=12, reason="python train.py")
    records(made, 1, 11, at=30, seconds=1)
    made.failed(0, at=70).event("failure", at=72).ended("failed", reason="no", exit_code=70)
    found = report(made)
    assert phases(found) == {"queue": 10, "start_up": 20, "training": 10, "lost": 30, "stop": 2}


def test_a_command_that_runs_has_not_stopped(made: FakeRun) -> None:
    made.started().event("train", at=12, reason="python train.py")
    records(made, 1, 11, at=30, seconds=1)
    found = report(made, state="RUNNING", now=50)
    assert phases(found) == {"queue": 10, "start_up": 20, "training": 20}
