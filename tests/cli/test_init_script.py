from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from tests.facts import assert_facts
from tests.messages import GoldenMessages

Run = Callable[..., tuple[str, str]]

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2 --ntasks-per-node=4 --gres=gpu:4 --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --output=%j.out
module load cuda
srun python train.py --lr 0.1
python report.py
"""
JOB = """\
# Made from old job.sbatch by hpcddp init --from.
name: train
resources:
  nodes: 2
  gpus_per_node: 4
  cpus_per_task: 8
  time_limit: "12:00:00"
environment:
  modules: [cuda]
command: [python, train.py, "--lr", "0.1"]
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    file = Path("old job.sbatch")
    file.write_text(SCRIPT)
    return file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str, code: int = 0) -> tuple[str, str]:
        assert boundary.run(app, list(words)) == code, capsys.readouterr()
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


def test_it_writes_the_job_file_and_prints_it_with_the_table(run: Run, script: Path) -> None:
    output, errors = run("init", "--from", str(script))
    assert errors == ""
    assert Path("old job.yaml").read_text() == JOB
    assert output.startswith(JOB)
    rows = [" ".join(line.split()) for line in output.removeprefix(JOB).splitlines()]
    assert "line 2 taken --job-name=train -> name" in rows
    assert "line 6 taken module load cuda -> environment.modules" in rows
    assert any(row.startswith("line 8 to do python report.py -> it runs after the training") for row in rows)
    assert rows[-1] == "next look at 1 line to do, then: hpcddp submit 'old job.yaml'"


def test_the_job_file_renders(run: Run, script: Path) -> None:
    run("init", "--from", str(script), "-o", "new.yaml")
    text, _ = run("render", "new.yaml")
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gres=gpu:4\n#SBATCH --cpus-per-task=8\n" in text


def test_a_job_file_that_is_there_is_replaced_only_by_force(run: Run, script: Path, golden: GoldenMessages) -> None:
    Path("old job.yaml").write_text("# mine\n")
    _, errors = run("init", "--from", str(script), code=2)
    assert_facts(golden.message(errors), "old job.yaml is there already", "--force", "--job")
    assert Path("old job.yaml").read_text() == "# mine\n"
    run("init", "--from", str(script), "--force")
    assert Path("old job.yaml").read_text() == JOB


def test_a_dry_run_writes_nothing(run: Run, script: Path) -> None:
    output, _ = run("init", "--from", str(script), "--dry-run")
    assert output.startswith(JOB)
    assert list(Path().iterdir()) == [script]


def test_the_document_holds_the_rows(run: Run, script: Path) -> None:
    document = json.loads(run("init", "--from", str(script), "--json")[0])
    assert (document["job_file"], document["written"], document["text"]) == ("old job.yaml", True, JOB)
    assert document["rows"][0] == {
        "line": 2,
        "text": "--job-name=train",
        "outcome": "taken",
        "field": "name",
        "reason": "name",
    }
    assert {row["outcome"] for row in document["rows"]} == {"taken", "dropped", "to do"}


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--from", "absent.sh"), ("absent.sh: does not exist", "check the path")),
        (("--from", "."), (".: is a directory", "name a file in it")),
        (("--from", "old job.sbatch", "--partition", "x"), ("--partition is for a profile", "leave it out")),
        (("--from", "old job.sbatch", "big"), ("NAME is for a profile", "leave it out")),
        (("--from", "old job.sbatch", "-o", "absent/job.yaml"), ("absent/job.yaml cannot be written", "--job")),
        (("--from", "empty.sh"), ("empty.sh is empty", "name a script")),
        (("--from", "binary"), ("binary: contains NUL bytes", "check the path")),
        (("--from", "latin.sh"), ("latin.sh:2: is not UTF-8", "save it as UTF-8")),
        (("--from", "python.sh"), ("python.sh: the script is for /usr/bin/env python3", "bash and sh")),
        (("--from", "nothing.sh"), ("nothing.sh: no line starts a program", "docs/any-script.md")),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_nothing_is_written(
    run: Run, words: tuple[str, ...], facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    Path("empty.sh").touch()
    Path("binary").write_bytes(b"\x7fELF\0\0")
    Path("latin.sh").write_bytes(b"#!/bin/sh\n# \xe4\nsrun python x.py\n")
    Path("python.sh").write_text("#!/usr/bin/env python3\n#SBATCH -N2\nprint(1)\n")
    Path("nothing.sh").write_text("#!/bin/bash\n#SBATCH -N2\necho hi\n")
    _, errors = run("init", *words, code=2)
    assert_facts(golden.message(errors), *facts)
    assert list(Path().glob("**/*.yaml")) == []


@pytest.mark.parametrize("command", ["submit", "render", "plan"])
@pytest.mark.parametrize("mode", [0o600, 0o700])
def test_other_commands_answer_a_script_with_this_command(
    run: Run, script: Path, command: str, mode: int, golden: GoldenMessages
) -> None:
    script.chmod(mode)
    _, errors = run(command, str(script), code=2)
    assert "hpcddp init --from 'old job.sbatch'" in golden.message(errors)


def test_control_characters_of_a_script_do_not_reach_the_terminal(run: Run) -> None:
    Path("evil.sh").write_text("#!/bin/bash\nsrun python train.py '\x1b]0;x\x07'\n")
    _, errors = run("init", "--from", "evil.sh", code=2)
    assert "U+001B" in errors
    assert "\x1b" not in errors


def test_a_job_file_that_is_a_link_stays_one(run: Run, script: Path) -> None:
    Path("real.yaml").write_text("# mine\n")
    Path("old job.yaml").symlink_to("real.yaml")
    run("init", "--from", str(script), "--force")
    assert Path("old job.yaml").is_symlink()
    assert Path("real.yaml").read_text() == JOB
