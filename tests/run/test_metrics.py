"""The lines of ``metrics.jsonl``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hpcddp
from hpcddp.jobfile.fields import Best
from hpcddp.jobfile.read import DefaultSettings, load_job
from hpcddp.jobfile.write import dump_job
from hpcddp.run import metrics_log
from hpcddp.run.directory import RunDirectory
from hpcddp.run.evaluations import Summary, mode_of, read_evaluations, summaries
from hpcddp.run.metrics import MetricsLine, lines_until, read_metrics
from hpcddp.run.record import RecordError
from hpcddp.run.result import Result, metrics_of, read_result, write_result
from tests.messages import GoldenMessages


def test_lines_up_to_a_step_are_kept_and_damaged_ones_are_dropped() -> None:
    damaged = [
        b"7", b"null", b"\xff", b"[]", b'["val_samples"]', b'"val_samples"', b"{}", b'{"step": "1"}', b'{"step": true}',
        b"[" * 100_000, b"1" * 10_000, b"",
    ]  # fmt: skip
    steps = [b'{"step": 1, "loss": 0.5}', b'{"step": 1, "val_samples": 3}', b'{"step": 2, "val_samples": 3}']
    content = b"\n".join([*damaged, *steps, b'{"step": 3}', b'{"step": 2'])
    assert lines_until(content, step=2, evaluated_step=1) == b"\n".join(steps[:2]) + b"\n"
    assert lines_until(b"", step=2, evaluated_step=1) == b""


def lines(*records: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("val_loss", "min"), ("eval/perplexity", "min"), ("val_top1_error", "min"), ("test_wer", "min"),
        ("val_accuracy", "max"), ("val_f1", "max"), ("eval/maestro", "max"), ("dev.merit", "max"),
    ],
)  # fmt: skip
def test_the_name_says_whether_more_is_better(name: str, mode: str) -> None:
    assert mode_of(name) == mode


def test_the_best_and_the_last_value_have_their_steps(tmp_path: Path, golden: GoldenMessages) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        lines(
            {"step": 1, "loss": 3.0, "time": 1.0},
            {"step": 10, "val_loss": 0.5, "val_accuracy": 0.8, "val_samples": 100},
            {"step": 20, "val_loss": 0.4, "val_accuracy": 0.9, "val_samples": 100},
            {"step": 30, "val_loss": 0.6, "val_accuracy": 0.9, "loss": 1.0, "f1": 0.3},
        )
    )
    found = summaries(path)
    assert found == {
        "val_loss": Summary(last=0.6, last_step=30, best=0.4, best_step=20, mode="min"),
        "val_accuracy": Summary(last=0.9, last_step=30, best=0.9, best_step=20, mode="max"),
    }
    sentence = golden.message(found["val_loss"].sentence)
    assert "best 0.4 after step 20" in sentence
    assert "0.6 after step 30" in sentence
    # The job may name any metric, and how it is compared.
    mine = summaries(path, Best(metric="val_loss", mode="max"))["val_loss"]
    assert (mine.best, mine.best_step) == (0.6, 30)
    assert "best 0.3 after step 30" in golden.message(summaries(path, Best(metric="f1"))["f1"].sentence)
    assert summaries(tmp_path / "nothing") == {}


@pytest.mark.parametrize("is_ascii", [True, False])
def test_the_best_metric_of_a_job_may_have_any_name(tmp_path: Path, *, is_ascii: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 10, "Güte": 0.5}, ensure_ascii=is_ascii) + "\n")
    assert summaries(path, Best(metric="Güte"))["Güte"].best == 0.5


def test_after_a_restart_the_later_values_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = [{"step": step, "val_f1": step / 100} for step in (10, 20, 30, 40)]
    again = [{"step": step, "val_f1": step / 1000} for step in (20, 30)]
    path.write_text(lines(*first, *again))
    assert read_evaluations(path) == {"val_f1": {10: 0.1, 20: 0.02, 30: 0.03}}
    assert summaries(path)["val_f1"] == Summary(last=0.03, last_step=30, best=0.1, best_step=10, mode="max")


HOSTILE = [
    b"7", b"null", b"\xff\xfe", b"\x00" * 50, b"[]", b"{}", b'{"step": "1", "val_f1": 2}',
    b'{"step": true, "val_f1": 2}',
    b'{"step": -1, "val_f1": 2}', b'{"step": 1e3, "val_f1": 2}', b'{"step": 1' + b"0" * 400 + b', "val_f1": 2}',
    b'{"step": 1' + b"0" * 5000 + b', "val_f1": 2}', b'{"step": 3, "time": 1e300, "val_f1": 2}',
    b'{"step": 3, "time": "now", "val_f1": 2}', b'{"val_f1":' * 20_000, b'{"val_f1": ' + b"1" * 200_000,
    b'{"step": 3, "val_f1": "2"}', b'{"step": 3, "val_f1": NaN}', b'{"step": 3, "val_f1": -Infinity}',
    b'{"step": 3, "val_f1": 1' + b"0" * 400 + b"}", b'{"step": 3, "val_\\u001b[31m": 2}',
    b'{"step": 3, "val_\\ud800": 2}',
    b'{"step": 3, "val_' + b"x" * 1000 + b'": 2}', b'{"step": 3, "val_f1": 2',
]  # fmt: skip


def test_hostile_lines_are_left_out_wherever_metrics_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 2, "val_f1": 0.5}', b'{"step": 4, "val_f1": 0.25}']
    path.write_bytes(b"\n".join([good[0], *HOSTILE, good[1], b'{"step": 5, "val_f1": 9']))
    assert read_evaluations(path) == {"val_f1": {2: 0.5, 4: 0.25}}
    found = read_metrics(path, 1 << 20)
    assert {record.step for record in found.records} == {2, 3, 4}
    assert found.damaged > 10
    assert "damaged, and left out" in (found.sentence(path) or "")
    for record in found.records:
        assert record.numbers().keys() <= {"val_f1"}


def test_a_line_longer_than_a_block_hides_no_other_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    long = b'{"step": 2, "x": "' + b"y" * (3 << 20) + b'", "val_f1": 7}'
    path.write_bytes(b"\n".join([b'{"step": 1, "val_f1": 1}', long, b'{"step": 3, "val_f1": 3}', b""]))
    assert read_evaluations(path) == {"val_f1": {1: 1, 3: 3}}


def test_something_else_in_the_place_of_the_metrics_is_one_sentence(tmp_path: Path, golden: GoldenMessages) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RecordError, match=r"metrics\.jsonl cannot be read") as caught:
        summaries(tmp_path / "metrics.jsonl")
    assert "not a regular file" in golden.message(caught.value)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.attempt(0).path.mkdir(parents=True)
    monkeypatch.setenv("HPCDDP_METRICS_FILE", str(run.metrics))
    monkeypatch.setenv("HPCDDP_ATTEMPT", "0")
    monkeypatch.setenv("RANK", "0")
    return run


def logged(run: RunDirectory) -> list[MetricsLine]:
    return list(read_metrics(run.metrics, 1 << 20).records)


class Scalar:
    """Stands for a tensor of one number."""

    def __float__(self) -> float:
        return 0.25


def test_log_writes_a_line_at_once(run: RunDirectory) -> None:
    hpcddp.log({"loss": 0.5, "val_f1": Scalar(), "seen": 7, "bad": float("nan")}, step=3)
    (line,) = logged(run)
    assert (line.step, line.facts) == (3, {"loss": 0.5, "val_f1": 0.25, "seen": 7, "bad": None})
    assert line.time is not None
    assert run.metrics.stat().st_mode & 0o777 == 0o600


def test_log_does_nothing_on_other_ranks_and_outside_of_hpcddp(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    hpcddp.log({"loss": 0.5}, step=3)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("HPCDDP_METRICS_FILE")
    hpcddp.log({"loss": 0.5}, step=3)
    assert not run.metrics.exists()


@pytest.mark.parametrize(
    ("given", "step", "error", "facts"),
    [
        ({"loss": "low"}, 1, TypeError, ("the metric loss is 'low'", "give one number")),
        ({"loss": None}, 1, TypeError, ("the metric loss is None", "give one number")),
        ({"loss": "0.5"}, 1, TypeError, ("the metric loss is '0.5'", "give one number")),
        ({"loss": b"1"}, 1, TypeError, ("the metric loss is b'1'", "give one number")),
        ({"loss": 10**400}, 1, TypeError, ("the metric loss is 1000", "give one number")),
        ({"loss": [1.0]}, 1, TypeError, ("the metric loss is [1.0]", "give one number")),
        ("loss", 1, TypeError, ("metrics is 'loss'", "as in {'loss': 0.3}")),
        ({"time": 2.0}, 1, TypeError, ("a metric is called time", "another name")),
        ({"loss": 1.0}, -1, ValueError, ("step is -1", "give 0 or more")),
        ({"loss": 1.0}, 1.5, TypeError, ("step is 1.5", "no integer")),
        ({"loss": 1.0}, "1", TypeError, ("step is '1'", "no integer")),
    ],
)
def test_a_mistake_in_a_call_of_log_is_one_sentence(
    run: RunDirectory,
    given: dict[str, Any],
    step: Any,
    error: type[Exception],
    facts: tuple[str, ...],
    golden: GoldenMessages,
) -> None:
    with pytest.raises(error) as caught:
        hpcddp.log(given, step=step)
    message = golden.message(caught.value)
    for fact in facts:
        assert fact in message
    assert not run.metrics.exists()


def test_log_takes_numbers_of_torch_and_numpy_and_refuses_what_is_not_one_number(run: RunDirectory) -> None:
    import numpy as np
    import torch

    weight = torch.tensor([0.5], requires_grad=True)
    taken = {"scalar": torch.tensor(2.0), "weight": weight, "half": torch.tensor(1.5, dtype=torch.bfloat16)}
    hpcddp.log({**taken, "float32": np.float32(0.25), "array": np.array(3.0)}, step=np.int64(7))  # type: ignore[arg-type]
    (line,) = logged(run)
    assert (line.step, line.facts) == (
        7,
        {"scalar": 2.0, "weight": 0.5, "half": 1.5, "float32": 0.25, "array": 3.0},
    )
    for value in (torch.ones(2), torch.tensor(1 + 1j), torch.empty((), device="meta"), np.ones(2)):
        with pytest.raises(TypeError, match=r"metric loss is .*; give one number"):
            hpcddp.log({"loss": value}, step=1)
    assert len(logged(run)) == 1


def test_log_of_an_attempt_that_was_overtaken_writes_nothing_more(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_log, "_CHECK_OWNER_EVERY_S", 0.0)
    hpcddp.log({"loss": 0.5}, step=1)
    run.attempt(1).path.mkdir()
    for step in (2, 3):
        hpcddp.log({"loss": 0.5}, step=step)
    assert [line.step for line in logged(run)] == [1]
    assert capfd.readouterr().err.count("another attempt owns the run") == 1


def test_a_file_that_cannot_be_written_costs_one_warning_and_its_lines_wait(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run.metrics.mkdir()
    for step in (1, 2):
        hpcddp.log({"loss": 0.5}, step=step)
    assert capfd.readouterr().err.count("cannot be written") == 1
    run.metrics.rmdir()
    monkeypatch.setattr(metrics_log, "METRICS_OPEN_S", 0.0)
    hpcddp.log({"loss": 0.5}, step=3)
    assert [line.step for line in logged(run)] == [1, 2, 3]


def test_a_line_after_one_that_a_killed_process_tore_is_whole(run: RunDirectory) -> None:
    run.metrics.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    hpcddp.log({"loss": 0.25}, step=2)
    assert [(line.step, line.number("loss")) for line in logged(run)] == [(1, 0.5), (2, 0.25)]


def test_log_imports_neither_torch_nor_numpy_nor_pydantic() -> None:
    program = (
        "import sys, hpcddp; hpcddp.log({'loss': 1.0}, step=1); "
        "print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("best", "mode"), [("null", "min"), ("val_loss", "min"), ("{metric: val_loss, mode: max}", "max")]
)
def test_the_result_follows_the_mode_of_the_job(tmp_path: Path, best: str, mode: str) -> None:
    run = RunDirectory(tmp_path)
    job = f"name: a\nentrypoint: a.b:c\ncheckpoint: {{best: {best}}}\n"
    (tmp_path / "mine.yaml").write_text(job)
    defaults = DefaultSettings(profiles=None, project=None, directory=tmp_path, user_id=os.geteuid())
    spec = load_job(tmp_path / "mine.yaml", overrides=(), defaults=defaults).spec
    run.job_file.write_text(dump_job(spec, environment_values=False))
    run.metrics.write_text(lines({"step": 1, "val_loss": 1.0}, {"step": 2, "val_loss": 2.0}))
    write_result(run, Result(status="finished"))
    result = read_result(run)
    assert result is not None
    assert result.metrics["val_loss"].mode == mode


@pytest.mark.parametrize("content", [b"", b"\xff  best: x", b"checkpoint:\n  best: [\n", None])
def test_a_damaged_job_file_hides_no_metrics(tmp_path: Path, content: bytes | None) -> None:
    run = RunDirectory(tmp_path)
    if content is not None:
        run.job_file.write_bytes(content)
    run.metrics.write_text(lines({"step": 1, "val_loss": 1.0}))
    assert metrics_of(run)["val_loss"].best == 1.0


def test_a_value_that_is_not_finite_replaces_that_of_an_earlier_attempt(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [(100, 0.5), (200, 0.9), (200, None), (300, 0.6)]
    path.write_text("".join(json.dumps({"step": step, "val_f1": value}) + "\n" for step, value in lines))
    assert read_evaluations(path) == {"val_f1": {100: 0.5, 300: 0.6}}
