"""What a run writes is shown by each tracker once, over all its attempts."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.processes import wait_until
from hpcddp.stop.reasons import StopReason
from hpcddp.train.errors import StoppedError
from hpcddp.train.tracking import opening
from hpcddp.train.tracking.protocol import AttemptEnding
from tests.distributed.training import evaluations, job_document
from tests.messages import GoldenMessages
from tests.train.conftest import Training
from tests.train.shown import (
    MLFLOW_OPENS_FILES,
    same,
    shown_by_mlflow,
    shown_by_tensorboard,
    shown_by_wandb,
    wandb_records,
    written,
)

pytestmark = [
    pytest.mark.filterwarnings(MLFLOW_OPENS_FILES),
    pytest.mark.depends_on("hpcddp/run", "hpcddp/train", "pyproject.toml", "tests/train"),
]

# W&B names the directory of an attempt by the second in which it began.
WANDB_CLOCK_S = 1.0

NewTraining = Callable[[str], Training]

# 100 samples in batches of 32: 4 steps per epoch, 12 in all.
JOB: dict[str, Any] = {"checkpoint": {"every": {"steps": 3}}, "train__epochs": 3, "trackers": {}}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the trackers, however busy the machine is."""
    monkeypatch.setattr(opening, "_WAIT_S", dict.fromkeys(AttemptEnding, 60.0))


def stop(training: Training, *, after: int, attempt: int = 0, **changes: Any) -> None:
    calls = iter(range(after - 1))
    with pytest.raises(StoppedError):
        training.train(
            attempt=attempt,
            stop_reason=lambda: 0 if next(calls, None) is not None else StopReason.TERMINATED,
            **changes,
        )


def test_tensorboard_shows_the_metrics_without_being_asked(training: Training) -> None:
    training.train(**JOB)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


def test_no_tracker_is_used_where_none_is_wanted(training: Training) -> None:
    training.train(**{**JOB, "trackers": {"use": []}})
    assert not training.run.tensorboard.exists()
    assert not training.run.tracker("tensorboard").parent.exists()


def test_tensorboard_shows_a_stopped_and_resumed_run_as_one_curve(training: Training) -> None:
    stop(training, after=5, **JOB)
    training.train(attempt=1, **JOB)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


def test_tensorboard_shows_steps_once_that_were_computed_twice(training: Training) -> None:
    # A clock on which every record is due to be written at once.
    training.crash(steps=7, monotonic=itertools.count(0.0, 3.0).__next__, **JOB)
    assert shown_by_tensorboard(training.run.path)["train/loss"][-1][0] == 7
    training.train(attempt=1, **JOB)
    assert "going on after step 6" in "\n".join(training.said)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


def test_tensorboard_shows_a_run_that_began_anew_from_its_beginning(training: Training) -> None:
    training.crash(steps=3, **{**JOB, "checkpoint": {"every": {"steps": 100}}})
    training.train(attempt=1, **JOB)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


def test_evaluation_that_is_made_up_for_is_shown(training: Training) -> None:
    stop(training, after=4, **JOB)
    assert evaluations(training.run.path) == []
    training.train(attempt=1, **JOB)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


WANDB = {**JOB, "trackers": {"use": ["wandb"], "project": "shapes", "entity": "lab"}}


def three_attempts_with_wandb(training: Training) -> None:
    stop(training, after=5, **WANDB)
    time.sleep(WANDB_CLOCK_S)
    training.crash(steps=4, attempt=1, **WANDB)
    time.sleep(WANDB_CLOCK_S)
    training.train(attempt=2, **WANDB)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))


@pytest.mark.usefixtures("offline")
def test_wandb_shows_the_attempts_of_a_run_as_one(training: Training) -> None:
    three_attempts_with_wandb(training)
    same(shown_by_wandb(training.run.path), written(training.run.path))
    runs = [record for kind, record in wandb_records(training.run.path) if kind == "run"]
    assert {(run.run_id, run.project, run.entity, run.display_name) for run in runs} == {
        (json.loads(training.run.tracker("wandb").read_text())["run_id"], "shapes", "lab", "run")
    }
    assert runs[0].run_id.startswith("run-")


@pytest.mark.usefixtures("offline")
def test_wandb_is_told_how_each_attempt_ended(training: Training) -> None:
    three_attempts_with_wandb(training)
    kinds = [(kind, record) for kind, record in wandb_records(training.run.path) if kind in ("exit", "preempting")]
    assert [(kind, getattr(record, "exit_code", None)) for kind, record in kinds] == [
        ("preempting", None), ("exit", 75), ("exit", 1), ("exit", 0),
    ]  # fmt: skip


SECRET = "a-secret-value"


@pytest.mark.usefixtures("offline")
def test_wandb_gets_the_job_without_its_secrets(training: Training) -> None:
    environment = {"env": {"TOKEN": SECRET}, "setup": [f"export KEY={SECRET}"], "pass_env": ["WANDB_API_KEY"]}
    training.train(**{**WANDB, "environment": environment})
    runs = [record for kind, record in wandb_records(training.run.path) if kind == "run"]
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["batch"]["global_batch_size"] == 32
    assert config["environment"]["pass_env"] == ["WANDB_API_KEY"]
    assert not [path for path in training.run.path.rglob("*.wandb") if SECRET.encode() in path.read_bytes()]


@pytest.fixture
def server(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'mlruns'}"


def test_mlflow_shows_the_attempts_of_a_run_as_one(training: Training, server: str) -> None:
    job = {**JOB, "trackers": {"use": ["mlflow"], "project": "shapes", "tracking_uri": server}}
    stop(training, after=5, **job)
    assert [run.info.status for run in shown_by_mlflow(server)[0]] == ["SCHEDULED"]
    training.crash(steps=4, attempt=1, **job)
    assert [run.info.status for run in shown_by_mlflow(server)[0]] == ["FAILED"]
    training.train(attempt=2, **job)
    (run,), curves = shown_by_mlflow(server)
    same(curves, written(training.run.path))
    assert (run.info.status, run.info.run_name, run.data.tags["hpcddp.run_id"]) == ("FINISHED", "run", "run")
    assert run.data.params["batch.global_batch_size"] == "32"
    assert run.info.run_id == json.loads(training.run.tracker("mlflow").read_text())["run_id"]


def test_mlflow_is_told_of_a_run_that_its_user_ended(training: Training, server: str) -> None:
    job = {**JOB, "trackers": {"use": ["mlflow"], "tracking_uri": server}}
    stop(training, after=5, cause=lambda: "cancelled", **job)
    assert [run.info.status for run in shown_by_mlflow(server)[0]] == ["KILLED"]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_tracker_that_fails_costs_a_warning(
    training: Training, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    training.run.tensorboard.write_text("in the way")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    training.train(**{**JOB, "trackers": {"use": [name], "tracking_uri": "http://127.0.0.1:1"}})
    (warning,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: "))
    # Whether the end or the next attempt tries again is a matter of time.
    assert re.match(rf"warning: {name} failed \(\w+: .*\); the training goes on", warning)
    assert warning.endswith(("tried again at the end", "the next attempt tries again"))
    assert training.run.result.exists()


def test_steps_that_a_failed_attempt_did_not_show_are_shown_by_the_next_one(training: Training) -> None:
    training.run.tensorboard.write_text("in the way")
    stop(training, after=5, **JOB)
    training.run.tensorboard.unlink()
    training.train(attempt=1, **JOB)
    same(shown_by_tensorboard(training.run.path), written(training.run.path))


def test_tracker_that_is_not_there_in_the_task_costs_a_warning(
    golden: GoldenMessages, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "is_installed", lambda _: False)
    training.train(**{**JOB, "trackers": {"use": ["wandb"]}})
    (warning,) = (line for line in training.said if line.startswith("warning"))
    golden.message(warning)
    assert "wandb is not installed" in warning
    assert "run: pip install wandb" in warning


def test_tracker_that_hangs_holds_the_end_up_no_longer_than_agreed(
    golden: GoldenMessages, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_COMMAND", ("sleep", "100"))
    monkeypatch.setattr(opening, "_WAIT_S", dict.fromkeys(AttemptEnding, 0.1))
    training.train(**JOB)
    assert "trackers have not taken everything" in golden.message(training.said[-1])


def test_trackers_that_cannot_be_started_cost_a_warning(
    golden: GoldenMessages, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_COMMAND", ("no-such-program",))
    training.train(**JOB)
    (warning,) = (line for line in training.said if line.startswith("warning"))
    golden.message(warning)
    assert "trackers cannot be started ([Errno 2] " in warning
    assert "the training goes on without" in warning


def test_trackers_that_die_hurt_nobody(
    golden: GoldenMessages, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_COMMAND", ("false",))
    training.train(**JOB)
    golden.message(training.said[-1])
    assert "trackers ended with exit code 1" in training.said[-1]
    assert training.run.result.exists()


def test_the_process_of_the_trackers_does_not_load_torch() -> None:
    code = (
        "import sys, hpcddp.train.tracking.__main__, hpcddp.train.tracking.tensorboard; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_numpy_is_loaded_before_the_trackers_start(tmp_path: Path) -> None:
    """W&B would put a lazy module in its place, which fails if two threads load it."""
    code = textwrap.dedent(
        """
        import sys
        import hpcddp.train.tracking.__main__ as process

        class Thread:
            def __init__(self, name, inputs): self.name = name
            def start(self): print(self.name, "numpy" in sys.modules, flush=True)
            def end(self, ending): pass
            def join(self, most_s): pass

        process.TrackerThread = Thread
        process.main()
        """
    )
    message = {
        "names": ["wandb"], "run": str(tmp_path), "attempt": 0, "first_step": 0, "appended_from": None,
        "config": {"name": "digits"}, "settings": {},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], input=f"{json.dumps(message)}\nFINISHED\n", capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "wandb True\n"


def test_trackers_of_a_killed_rank_say_nothing_about_the_end(training: Training, server: str) -> None:
    job = {**JOB, "trackers": {"use": ["mlflow"], "tracking_uri": server}}
    training.run.attempt(0).path.mkdir(parents=True)
    with training.context(**job).tracking(first_step=0) as tracking:
        process, tracking._process = tracking._process, None
        assert process is not None
        training.run.metrics.write_text('{"step": 1, "loss": 0.5}\n')
        process.communicate(timeout=60)
    (run,), curves = shown_by_mlflow(server)
    assert (run.info.status, curves) == ("RUNNING", {"train/loss": [(1, 0.5)]})


def test_attempt_that_another_one_has_overtaken_shows_nothing_more(training: Training) -> None:
    training.crash(steps=7, **JOB)
    before = {path: path.stat().st_mtime_ns for path in training.run.tensorboard.iterdir()}
    memory = training.run.tracker("tensorboard").read_text()
    training.run.attempt(2).path.mkdir()
    with training.context(attempt=1, **JOB).tracking(first_step=0):
        pass
    assert training.run.tracker("tensorboard").read_text() == memory
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert not any(line.startswith("warning") for line in training.said)


def test_password_of_a_tracking_server_is_shown_to_nobody() -> None:
    spec = JobSpec.model_validate(job_document(trackers={"tracking_uri": f"https://me:{SECRET}@host/x"}))
    assert opening.config_of(spec)["trackers"]["tracking_uri"] == "https://host/x"


def test_memory_that_cannot_be_read_does_not_keep_a_run_from_its_training(training: Training) -> None:
    training.run.tracker("tensorboard").mkdir(parents=True)
    training.train(**JOB)
    assert training.run.result.exists()


def test_damaged_decision_does_not_hide_that_the_ranks_stopped(training: Training) -> None:
    context = training.context(trackers={"use": []})
    decision = context.run.attempt(context.attempt).decision
    decision.parent.mkdir(parents=True)
    decision.write_text('{"attempt": 0, "st')
    stopped = StoppedError("", step=4, reason=StopReason.TERMINATED, outcome=None)
    with pytest.raises(StoppedError), context.tracking(first_step=None):
        raise stopped


def test_records_of_a_function_of_ones_own_are_shown_once(training: Training) -> None:
    """It may log several records of a step. TensorBoard drops the steps that a later attempt computes again."""
    lines = [{"step": step, name: step / 2} for step in (0, 1, 2) for name in ("loss", "rate")]
    lines += [{"step": 2, "val_loss": 0.25}]
    training.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for attempt in (0, 1):
        training.run.attempt(attempt).path.mkdir(parents=True)
        with (
            training.context(attempt=attempt, trackers={}).tracking(first_step=None),
            training.run.metrics.open("a") as file,
        ):
            file.writelines(json.dumps({"step": step + attempt, "loss": 7 + attempt}) + "\n" for step in (2, 3))
    found = shown_by_tensorboard(training.run.path)
    assert found == {
        "train/loss": [(0, 0.0), (1, 0.5), (2, 7.0), (3, 8.0), (4, 8.0)],
        "train/rate": [(0, 0.0), (1, 0.5)],
        "val/loss": [],
    }


def test_what_a_program_of_ones_own_logs_is_shown_under_the_names_of_trackers(training: Training, server: str) -> None:
    """Other clocks, one record for two kinds, and hostile lines."""
    training.run.attempt(0).path.mkdir(parents=True)
    settings = {"use": ["tensorboard", "mlflow"], "tracking_uri": server}
    lines = [
        b'{"step": 1, "loss": 3, "eval/f1": 0.5, "epoch": 0, "val_samples": 7}', b"\xff", b"[" * 200_000,
        b'{"step": 2, "loss": NaN, "train_loss": 2}', b'{"step": 2, "loss": 1' + b"0" * 400 + b"}",
        b'{"step": 2, "\\ud800": 1, "\\u001b[2J": 1, "": 1, "../up": 1, "a@b": 1}', b'{"step": 3, "loss": 1}',
        b'{"step": 2, "test_accuracy": 0.25}', b'{"step": 4, "loss"',
    ]  # fmt: skip
    with training.context(trackers=settings).tracking(first_step=None):
        training.run.metrics.write_bytes(b"\n".join(lines))
    expected = {
        "train/loss": [(1, 3.0), (2, 2.0), (3, 1.0)],
        "eval/f1": [(1, 0.5)],
        "test/accuracy": [(2, 0.25)],
    }
    found = shown_by_tensorboard(training.run.path)
    assert found == {**expected, "train/../up": [(2, 1.0)], "train/a@b": [(2, 1.0)]}
    assert shown_by_mlflow(server)[1] == {**expected, "train/_/up": [(2, 1.0)], "train/a_b": [(2, 1.0)]}


def test_tracker_that_is_tried_again_gets_what_it_misses_once(
    training: Training, capfd: pytest.CaptureFixture[str]
) -> None:
    training.run.attempt(0).path.mkdir(parents=True)
    training.run.metrics.write_text('{"step": 9, "loss": 9}\n')
    with training.context(trackers={}).tracking(first_step=None):
        with training.run.metrics.open("a") as file:
            file.write('{"step": 5, "loss": 5}\n')
        wait_until(lambda: '"step": 9' in memory_of(training), timeout_s=60, poll_s=0.1)
        # The folder cannot be written, and the tracker is tried again at the end.
        training.run.tensorboard.rename(training.run.path / "away")
        with training.run.metrics.open("a") as file:
            file.write('{"step": 6, "loss": 6}\n')
        wait_until(lambda: "it is tried again at the end" in capfd.readouterr().err, timeout_s=60, poll_s=0.1)
        (training.run.path / "away").rename(training.run.tensorboard)
    assert shown_by_tensorboard(training.run.path)["train/loss"] == [(5, 5.0), (6, 6.0)]


def memory_of(training: Training) -> str:
    path = training.run.tracker("tensorboard")
    return path.read_text() if path.exists() else ""
