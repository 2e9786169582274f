"""Following a run by its files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcddp.cli.follow import BarDisplay, PlainDisplay, event_line
from hpcddp.manage import follow as following
from hpcddp.manage.follow import JobPhase, Outcome, RecordReader, follow
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import Event, append_event
from hpcddp.run.metrics import MetricsLine
from hpcddp.run.record import write_record
from hpcddp.run.result import Result


class Recorder:
    """Keeps what it was shown."""

    def __init__(self) -> None:
        self.states: list[JobPhase] = []
        self.events: list[Event] = []
        self.steps: list[int] = []
        self.evaluations: list[int] = []

    def job(self, state: JobPhase, why: str | None = None) -> None:  # noqa: ARG002
        self.states.append(state)

    def output(self, line: str) -> None:
        raise AssertionError(line)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def step(self, record: MetricsLine) -> None:
        self.steps.append(record.step)

    def evaluation(self, record: MetricsLine) -> None:
        self.evaluations.append(record.step)


def line(step: int) -> str:
    return json.dumps({"step": step, "epoch": 0, "loss": 1.0, "samples_per_s": 10.0}) + "\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(following, "_POLL_S", 0.0)
    monkeypatch.setattr(following, "_RESULT_GRACE_S", 0.05)
    return RunDirectory(tmp_path)


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RecordReader(path, MetricsLine)
    assert list(reader.new_records()) == []
    path.write_text(line(1) + '{"step": 2')
    assert [record.step for record in reader.new_records()] == [1]
    path.write_text(line(1) + line(2))
    assert [record.step for record in reader.new_records()] == [2]


def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(3))
    reader = RecordReader(path, MetricsLine)
    assert len(list(reader.new_records())) == 3
    replacement = tmp_path / "new"
    replacement.write_text(line(1))
    replacement.replace(path)
    assert [record.step for record in reader.new_records()] == [1]


def test_a_run_is_followed_through_a_requeue_and_no_step_is_shown_twice(run: RunDirectory) -> None:
    states: list[JobPhase] = ["pending", "running", "pending", "running", "ended"]
    seen = 0

    def job_state() -> JobPhase:
        nonlocal seen
        seen += 1
        if seen == 2:
            run.metrics.write_text(line(1) + line(2) + line(3))
        if seen == 4:
            resumed = run.path / "resumed"
            resumed.write_text(line(1) + line(2) + line(3) + line(4))
            resumed.replace(run.metrics)
        if seen == 5:
            write_record(run.result, Result(status="finished"))
        return states[min(seen, 5) - 1]

    recorder = Recorder()
    assert follow(run, recorder, job_state=job_state) == Outcome(status="finished", result=Result(status="finished"))
    assert recorder.states == states
    assert recorder.steps == [1, 2, 3, 4]


def test_a_job_that_ended_without_a_result_is_lost(run: RunDirectory) -> None:
    assert follow(run, Recorder(), job_state=lambda: "ended") == Outcome(status="lost", result=None)


def test_plain_lines_say_where_training_stands(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(steps_per_epoch=12, epochs=5)
    display.job("running")
    display.event(Event(kind="start", time=0.0, attempt=1, host="n1"))
    display.event(Event(kind="save", time=0.0, attempt=1))
    display.step(MetricsLine.from_document({"step": 24, "epoch": 1, "loss": 0.51234, "samples_per_s": 4321.0}))
    display.evaluation(
        MetricsLine.from_document(
            {"step": 24, "epoch": 1, "val_loss": 0.25, "val_accuracy": 0.9667, "val_samples": 360}
        )
    )
    assert capsys.readouterr().err.splitlines() == [
        "the job is running",
        "started on n1 (attempt 1)",
        "epoch 2/5  step 24/60  loss 0.5123  4,321 samples/s  val_loss 0.2500  val_accuracy 96.67%",
    ]


def test_records_of_a_function_of_ones_own_are_shown_with_what_they_have(capsys: pytest.CaptureFixture[str]) -> None:
    plain = PlainDisplay(steps_per_epoch=None, epochs=1)
    plain.step(MetricsLine.from_document({"step": 4, "loss": 0.25}))
    plain.evaluation(MetricsLine.from_document({"step": 4, "val_loss": 0.5}))
    with BarDisplay(None, 1) as bars:
        bars.step(MetricsLine.from_document({"step": 4, "loss": None}))
        bars.evaluation(MetricsLine.from_document({"step": 4, "val_loss": 0.5}))
    assert capsys.readouterr().err.splitlines()[0] == "step 4  loss 0.2500  val_loss 0.5000"


def test_metrics_under_names_of_ones_own_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    plain = PlainDisplay(steps_per_epoch=None, epochs=1)
    plain.step(MetricsLine.from_document({"step": 4, "train_loss": 0.25, "lr": 0.1, "samples_per_s": 10}))
    plain.evaluation(MetricsLine.from_document({"step": 4, "val_f1": 0.5, "val_loss": 1.0, "val_samples": 3}))
    with BarDisplay(None, 1) as bars:
        bars.step(MetricsLine.from_document({"step": 4, "[red]reward": 1.5}))
    shown = capsys.readouterr().err
    assert shown.splitlines()[0] == "step 4  train_loss 0.25  10 samples/s  val_loss 1.0000  val_f1 0.5"
    assert "[red]reward 1.5" in shown


def test_one_record_may_be_a_step_and_an_evaluation_and_a_step_that_goes_back_is_shown(run: RunDirectory) -> None:
    shown = Recorder()
    states = iter(["running", "running", "ended"])
    run.metrics.write_text(line(9) + json.dumps({"step": 10, "loss": 1.0, "val_f1": 0.5}) + "\n" + line(5))
    write_record(run.result, Result(status="finished"))
    follow(run, shown, job_state=lambda: next(states))  # type: ignore[arg-type]
    assert (shown.steps, shown.evaluations) == ([9, 10, 5], [10])


def evaluated(step: int) -> str:
    return json.dumps({"step": step, "val_loss": 1.0, "val_samples": 4}) + "\n"


def test_a_resumed_run_shows_what_it_does_from_now_on(run: RunDirectory) -> None:
    shown = Recorder()
    run.metrics.write_text(line(9) + line(10) + evaluated(10) + line(11) + line(12))

    def states() -> Iterator[JobPhase]:
        # Before the job begins.
        yield "pending"
        # The run continues from the checkpoint of step 10: what it lost is computed again.
        replacement = run.path / "new"
        replacement.write_text(line(9) + line(10) + evaluated(10))
        replacement.replace(run.metrics)
        append_event(run.events, kind="start", time=1.0, attempt=1)
        yield "running"
        append_event(run.events, kind="train", time=1.0, attempt=1, step=10)
        yield "running"
        with run.metrics.open("a") as stream:
            stream.write(line(11) + line(12) + evaluated(12))
        write_record(run.result, Result(status="finished"))
        yield "ended"

    looks = states()
    follow(run, shown, job_state=lambda: next(looks), first_attempt=1)
    assert (shown.steps, shown.evaluations) == ([11, 12], [12])
    assert [event_line(event) for event in shown.events] == ["started on a node (attempt 1)", "continues after step 10"]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("stop", "stopped: rank 1 was killed"),
        ("restart", "restarted: the tasks start again in the same job"),
        ("requeue", "requeued: the run continues when its job starts again"),
        ("save", None),
    ],
)
def test_what_is_said_of_the_end_of_an_attempt(kind: str, line: str | None) -> None:
    assert event_line(Event(kind=kind, time=1.0, attempt=0, reason="rank 1 was killed")) == line


def test_an_evaluation_is_shown_once_through_a_requeue(run: RunDirectory) -> None:
    shown = Recorder()

    def states() -> Iterator[JobPhase]:
        run.metrics.write_text(line(9) + line(10) + evaluated(10) + line(11))
        yield "running"
        replacement = run.path / "new"
        replacement.write_text(line(9) + line(10) + evaluated(10) + line(11) + line(12) + evaluated(12))
        replacement.replace(run.metrics)
        write_record(run.result, Result(status="finished"))
        yield "ended"

    looks = states()
    follow(run, shown, job_state=lambda: next(looks))
    assert (shown.steps, shown.evaluations) == ([9, 10, 11, 12], [10, 12])


def test_a_line_of_a_program_is_no_markup_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with BarDisplay(None, 1) as bars:
        bars.output("[red]x[/red] [/nothing]")
    assert "rank 0 | [red]x[/red] [/nothing]" in capsys.readouterr().err


def test_what_a_program_prints_comes_before_the_word_on_its_end(run: RunDirectory) -> None:
    shown: list[str] = []

    class Lines(Recorder):
        def output(self, line: str) -> None:
            shown.append(line)

        def job(self, state: JobPhase, why: str | None = None) -> None:  # noqa: ARG002
            shown.append(state)

    def output(*, ended: bool) -> list[str]:
        return ["last words"] if ended else []

    write_record(run.result, Result(status="finished"))
    follow(run, Lines(), job_state=lambda: "ended", output=output)
    assert shown == ["last words", "ended"]


def test_ctrl_c_that_stops_a_run_goes_on_following_until_its_end(run: RunDirectory) -> None:
    presses = 0

    def job_state() -> JobPhase:
        nonlocal presses
        presses += 1
        if presses == 1:
            raise KeyboardInterrupt
        return "running" if presses == 2 else "ended"

    def interrupted() -> bool:
        write_record(run.result, Result(status="cancelled"))
        return True

    outcome = follow(run, Recorder(), job_state=job_state, interrupted=interrupted)
    assert outcome.status == "cancelled"


@pytest.mark.parametrize("interrupted", [None, lambda: False])
def test_ctrl_c_that_stops_nothing_ends_the_following(
    run: RunDirectory, interrupted: Callable[[], bool] | None
) -> None:
    def job_state() -> JobPhase:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(run, Recorder(), job_state=job_state, interrupted=interrupted)
