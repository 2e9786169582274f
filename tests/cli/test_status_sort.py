"""``hpcddp status SWEEP --sort METRIC``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.slurm import commands
from tests.manage.example import NOW, example
from tests.messages import GoldenMessages

SWEEP = "20261121-084500-5e5e"


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = example(tmp_path / "runs")
    monkeypatch.setattr(commands, "queue", lambda _: jobs)
    monkeypatch.setattr("time.time", lambda: NOW)
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = boundary.run(app, ["status", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_document_has_the_best_element_first(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capsys, SWEEP, "--sort", "loss", "--json")[1])
    (sweep,) = document["sweeps"]
    assert [element["index"] for element in sweep["elements"]][:4] == [0, 1, 3, 11]
    assert sweep["elements"][0]["values"] == {"learning_rate.base": 0.1, "train.seed": 0}
    assert (sweep["sorted_by"], sweep["smaller_is_better"]) == ("loss", True)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--sort", "loss"], ("--sort sorts the runs of one sweep", "name it: hpcddp status SWEEP --sort METRIC\n")),
        (
            ["20261121-0930", "--sort", "loss"],
            ("--sort sorts the runs of one sweep", "20261121-093012-a41f is one run; leave --sort out\n"),
        ),
        (
            [SWEEP, "--sort", "los"],
            ("--sort is 'los',", SWEEP, "did you mean loss?", " loss, samples_per_s, samples_seen\n"),
        ),
    ],
)
def test_what_cannot_be_sorted_is_refused(
    words: list[str], facts: tuple[str, ...], capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    golden.message(err)
    assert [fact for fact in facts if fact not in err] == []


def test_a_damaged_record_is_a_sentence_below_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    element = tmp_path / "runs" / "rates" / f"{SWEEP}_0"
    (element / "result.json").write_text("{")
    (element / "metrics.jsonl").write_text('torn\n{"step": 1, "loss": 9.5}\n{"step": 2, "lo')
    code, out, _ = run(capsys, SWEEP, "--sort", "loss")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert [f"{SWEEP}_0", "base=0.1", "9.5"] in [[row[0], row[2], row[7]] for row in rows if row[0] == f"{SWEEP}_0"]
    assert "/result.json is damaged" in out
    assert "/metrics.jsonl: 1 line is damaged" in out
