"""``hpcddp report`` as it is typed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.slurm import commands
from tests.cli.slow_libraries import UNINSTALL, run_python
from tests.manage.example import example
from tests.manage.three_attempts import three_attempts
from tests.messages import GoldenMessages


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run root with two finished runs, and go to an empty directory."""
    root = tmp_path / "runs"
    for run_id in ("run-1", "run-2"):
        three_attempts(root, run_id)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return root


def typed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    found = boundary.run(app, ["report", *words])
    captured = capsys.readouterr()
    assert found == code, captured.out + captured.err
    return captured.out if code == 0 else captured.err


def test_the_page_lies_in_the_working_directory_under_the_name_of_the_run(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    assert typed(capsys, "run-1", "--run-root", str(root)) == "run-1-report.html\n"
    assert "78.9%" in Path("run-1-report.html").read_text()
    assert [path.name for path in Path().iterdir()] == ["run-1-report.html"]


def test_the_help_shows_that_any_number_of_runs_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    usage = typed(capsys, "--help").splitlines()[0]
    assert usage == "Usage: hpcddp report [OPTIONS] [RUN]..."


def test_several_runs_share_a_page_which_replaces_an_older_one(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    typed(capsys, "run-2", "--run-root", str(root), "-o", "page.html")
    words = ("run-1", "run-2", "run-1", "--run-root", str(root), "-o", "page.html")
    assert typed(capsys, *words) == "page.html\n"
    text = Path("page.html").read_text()
    assert text.count("<h2>digits/run-") == 2
    assert "<title>digits / run-1 and 1 more</title>" in text


def test_json_prints_the_numbers(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    document: dict[str, Any] = json.loads(typed(capsys, "run-1", "--json", "--run-root", str(root)))
    (run,) = document["runs"]
    assert run["goodput"] == pytest.approx(2400 / 3040)
    assert [attempt["lost_steps"] for attempt in run["attempts"]] == [5, 0, 0]
    assert not list(Path().iterdir())


def test_the_page_needs_neither_matplotlib_nor_numpy(root: Path) -> None:
    names = {"matplotlib", "numpy", "torch", "submitit"}
    run = UNINSTALL.format(names=names) + "from hpcddp.__main__ import main; main()"
    done = run_python(run, "report", "run-1", "--run-root", str(root))
    assert (done.returncode, done.stderr) == (0, "")
    assert Path("run-1-report.html").read_text().count("<svg") == 2 * 4


@pytest.mark.parametrize(
    ("output", "facts"),
    [
        (".", ("--output is ., which is a directory;", "name of a file in it\n")),
        ("no/page.html", ("--output is no/page.html,", "no does not exist; make it,", "write another file\n")),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], root: Path, output: str, facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    message = golden.message(typed(capsys, "run-1", "--run-root", str(root), "-o", output, code=2))
    assert [fact for fact in facts if fact not in message] == []


@pytest.mark.parametrize("kind", ["file", "named pipe"])
def test_what_is_no_page_is_not_replaced(
    capsys: pytest.CaptureFixture[str], root: Path, golden: GoldenMessages, kind: str
) -> None:
    path = Path("train.py")
    if kind == "file":
        path.write_text("import torch\n")
    else:
        os.mkfifo(path)
    message = golden.message(typed(capsys, "run-1", "--run-root", str(root), "-o", "train.py", code=2))
    assert "--output is train.py, which exists and is no page of hpcddp report; " in message
    assert [entry.name for entry in Path().iterdir()] == ["train.py"]
    assert path.is_fifo() or path.read_text() == "import torch\n"


def test_numbers_and_a_page_are_not_printed_at_once(
    capsys: pytest.CaptureFixture[str], root: Path, golden: GoldenMessages
) -> None:
    assert boundary.run(app, ["report", "run-1", "--run-root", str(root), "--json", "-o", "page.json"]) == 2
    message = golden.message(json.loads(capsys.readouterr().out)["error"]["message"])
    assert message.startswith("--json prints numbers, and --output ")
    assert message.endswith("; leave one of them out")
    assert not list(Path().iterdir())


@pytest.mark.usefixtures("root")
def test_a_run_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run under" in typed(capsys, "nothing", code=2)


SWEEP = "20261121-084500-5e5e"


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = example(tmp_path / "runs")
    monkeypatch.setattr(commands, "queue", lambda _: jobs)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("sweep")
def test_a_sweep_is_ranked_by_the_metric_that_the_user_names(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(typed(capsys, SWEEP, "--sort", "loss", "--json"))
    order = [run["run_id"] for run in document["runs"]]
    assert (document["ranked_by"], len(order)) == ("loss", 16)
    assert order[:4] == [f"{SWEEP}_{index}" for index in (0, 1, 3, 11)]
    typed(capsys, SWEEP, "--sort", "loss", "-o", "page.html")
    text = Path("page.html").read_text()
    assert "<h2>Elements, the best loss first" in text
    rows = [text.index(f'<a href="#{run_id}"') for run_id in order]
    assert rows == sorted(rows)


@pytest.mark.usefixtures("sweep")
def test_a_metric_that_no_run_has_is_refused(capsys: pytest.CaptureFixture[str], golden: GoldenMessages) -> None:
    message = golden.message(typed(capsys, SWEEP, "--sort", "los", code=2))
    assert message.startswith("hpcddp: --sort is 'los', which none of the runs has logged; did you mean loss?")
