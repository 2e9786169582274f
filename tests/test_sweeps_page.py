"""docs/sweeps.md shows what its commands print today."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hpcddp.run.sweep import read_sweep
from tests.command_line import hpcddp
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import FakeSlurm, make_fake_slurm

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [text for language, text in BLOCKS if not language and text.startswith("$ ")]
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    """Write every file of the page, a YAML file is named in its first line, beside a Slurm that takes every job."""
    for language, text in BLOCKS:
        if language:
            name = "runs.csv" if language == "csv" else text.partition("\n")[0].removeprefix("# ")
            (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "train.py").touch()
    return make_fake_slurm(tmp_path / "slurm")


def run(slurm: FakeSlurm, *words: str) -> str:
    """Run hpcddp beside the files, and return what it prints as the page would show it."""
    (slurm.directory / "slurm.conf").touch()
    more = {"HOME": str(slurm.directory), "SLURM_CONF": str(slurm.directory / "slurm.conf"), "PYTHONPATH": str(ROOT)}
    done = hpcddp(slurm.directory.parent, *words, environment=slurm.environment(**more))
    assert done.returncode == (2 if done.stderr.startswith("hpcddp: ") else 0), done.stderr
    return RUN_ID.sub("ID", done.stdout + done.stderr).replace(str(slurm.directory.parent), "/home/you/project")


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.partition("\n")[0])
def test_the_command_prints_what_the_page_shows(slurm: FakeSlurm, block: str) -> None:
    command, _, shown = block.partition("\n")
    _, *words = shlex.split(command.removeprefix("$ "))
    if "LAST-SWEEP" in words:
        run(slurm, "submit", "job.yaml", "--sweep", "train.seed=0..1")
        words[words.index("LAST-SWEEP")] = next((slurm.directory.parent / "runs").glob("*/*")).name
    rest = run(slurm, *words)
    for excerpt in filter(None, RUN_ID.sub("ID", shown).split("...\n")):
        assert excerpt in rest
        rest = rest.partition(excerpt)[2]


def test_what_is_submitted_waits_for_the_sweep(slurm: FakeSlurm) -> None:
    run(slurm, "submit", "job.yaml", "--sweep", "train.seed=0..1")
    (directory,) = (slurm.directory.parent / "runs" / "digits").iterdir()
    run(slurm, "submit", "job.yaml", "--after", directory.name)
    assert slurm.calls[-1] == ["--dependency=afterany:101", "first=0"]


def test_the_csv_leaves_an_empty_cell_to_the_job_file(slurm: FakeSlurm) -> None:
    run(slurm, "submit", "job.yaml", "--sweep-file", "runs.csv")
    (directory,) = (slurm.directory.parent / "runs" / "digits").iterdir()
    sweep = read_sweep(directory)
    assert sweep is not None
    assert sweep.elements == (
        {"learning_rate.base": 0.1, "train.seed": 0, "train.epochs": 5}, {"learning_rate.base": 0.2, "train.seed": 1},
    )  # fmt: skip


def test_following_a_sweep_is_refused(slurm: FakeSlurm, golden: GoldenMessages) -> None:
    message = golden.message(run(slurm, "submit", "job.yaml", "--sweep", "train.seed=0..1", "--follow"))
    assert message.startswith("hpcddp: --follow shows one run, ")
    assert "; leave it out, " in message
    assert message.endswith(": hpcddp status SWEEP\n")
    assert slurm.calls == []


def test_waiting_is_refused_on_this_machine(slurm: FakeSlurm, golden: GoldenMessages) -> None:
    message = golden.message(run(slurm, "submit", "job.yaml", "--cluster", "local", "--after", "x"))
    assert message.startswith("hpcddp: --after and --after-any are Slurm's,")
    assert message.endswith("submit it when the other run ends\n")


def test_json_lists_the_elements_before_and_without_a_submission(slurm: FakeSlurm) -> None:
    sweep = ("job.yaml", "--sweep", "train.seed=0..1", "--json")
    for words in (("render", *sweep), ("submit", *sweep, "--dry-run")):
        assert json.loads(run(slurm, *words))["elements"] == [{"train.seed": 0}, {"train.seed": 1}]
    assert slurm.calls == []
    submitted = json.loads(run(slurm, "submit", *sweep))
    assert [element["run_id"] for element in submitted["elements"]] == ["ID_0", "ID_1"]


def test_the_preview_of_a_resumed_element_is_a_script_of_its_own(slurm: FakeSlurm) -> None:
    run(slurm, "submit", "grid.yaml")
    (directory,) = (slurm.directory.parent / "runs" / "digits").iterdir()
    element = directory.with_name(f"{directory.name}_7")
    element.mkdir()
    (element / "attempts").mkdir()
    script = run(slurm, "submit", "grid.yaml", "--resume", element.name, "--dry-run")
    assert "--array" not in script
    assert "--run-id=ID_7 " in script
    assert "\n  seed: 2\n" in script
