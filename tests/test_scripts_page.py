"""What docs/for-scripts.md says of the documents of the commands, of their exit codes and of a second call is so."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli.main import app
from scripts.command_pages import all_commands
from tests.command_line import hpcddp
from tests.manage.example import example
from tests.submission.fake_sbatch import FakeSlurm, make_fake_slurm

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "for-scripts.md").read_text(encoding="utf-8")
DOCUMENTS = re.findall(
    r"^\| `([^`]+)` \| (.*) \|$", PAGE.partition("## The documents")[2].partition("\n## ")[0], re.MULTILINE
)
((COMMAND, SHOWN),) = re.findall(r"^```\n\$ hpcddp (.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    """Write the program and the script of the page, and the runs, beside a Slurm that takes every job."""
    example(tmp_path / "runs")
    (tmp_path / "runs" / "digits" / "20261121-090544-03bd" / "checkpoints" / "step-000020").mkdir(parents=True)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "train.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=2 --time=90\nsrun python train.py\n")
    return make_fake_slurm(tmp_path / "slurm")


def call(slurm: FakeSlurm, *words: str) -> tuple[int, Any]:
    """Return the exit code and the document of a command, which has no terminal."""
    home = slurm.directory
    (home / "slurm.conf").touch()
    more = {"HOME": str(home), "SLURM_CONF": str(home / "slurm.conf"), "PYTHONPATH": str(ROOT)}
    given = words.index("--") if "--" in words else len(words)
    done = hpcddp(home.parent, *words[:given], "--json", *words[given:], environment=slurm.environment(**more))
    return done.returncode, json.loads(done.stdout)


def keys_of(document: Any) -> Iterator[str]:
    """Yield the keys of a document and of what is in it."""
    if isinstance(document, dict):
        yield from document
    parts = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    for part in parts:
        yield from keys_of(part)


@pytest.mark.parametrize(("command", "keys"), DOCUMENTS, ids=[command for command, _ in DOCUMENTS])
def test_a_document_has_the_keys_that_stay(slurm: FakeSlurm, command: str, keys: str) -> None:
    code, document = call(slurm, *shlex.split(command))
    # Standard output has nothing else, and the stand-in for Slurm has no sinfo.
    assert code == {"status no-such-run": 2, "doctor install": 1}.get(command, 0)
    promised = set(re.findall(r"`(\w+)`", keys.partition("; with `--follow`")[0])) - {"requeue"}
    assert promised <= set(keys_of(document))


def test_the_table_has_documents_of_all_kinds() -> None:
    assert len(DOCUMENTS) > 15


def test_the_command_prints_what_the_page_shows(slurm: FakeSlurm) -> None:
    _, document = call(slurm, *shlex.split(COMMAND.removesuffix(" --json")))
    rest = json.dumps(document, indent=2)
    for excerpt in filter(None, SHOWN.split("...\n")):
        assert excerpt.rstrip("\n") in rest


def test_every_command_but_shell_takes_json() -> None:
    known = dict(all_commands(app))
    without = {
        words for words, command in known.items() if all("--json" not in parameter.opts for parameter in command.params)
    }
    groups = {words[:-1] for words in known if words}
    assert without - groups == {("shell",)}


def test_a_run_that_is_followed_ends_with_its_result_in_the_document(slurm: FakeSlurm) -> None:
    code, document = call(slurm, "submit", "--cluster", "local", "--follow", "--", "python", "train.py")
    assert (code, document["status"], document["exit_code"]) == (0, "finished", 0)
    assert document["result"]["status"] == "finished"
    # There is nothing to resume, and nothing left to cancel.
    assert call(slurm, "submit", "--resume", document["run_id"])[0] == 2
    assert call(slurm, "cancel", document["run_id"])[0] == 0


def test_a_second_submission_is_a_second_run(slurm: FakeSlurm) -> None:
    documents = [call(slurm, "submit", "--name", "twice", "--", "python", "train.py")[1] for _ in range(2)]
    assert len({document["run_dir"] for document in documents}) == 2
    assert len(slurm.calls) == 2


def test_a_second_init_is_refused(slurm: FakeSlurm) -> None:
    codes = [call(slurm, "init", "--from", "train.sbatch")[0] for _ in range(2)]
    assert codes == [0, 2]
    assert call(slurm, "init", "--from", "train.sbatch", "--force")[0] == 0


def test_check_returns_2_for_a_warning(slurm: FakeSlurm) -> None:
    script = slurm.directory.parent / "train.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --gres=gpu:2\nexport MASTER_PORT=29500\nsrun python train.py\n")
    assert call(slurm, "check", "train.sbatch")[0] == 2


def test_the_one_question_is_refused_without_a_terminal(slurm: FakeSlurm) -> None:
    code, document = call(slurm, "rehearse", "--cluster", "slurm", "--", "python", "train.py")
    assert code == 2
    assert "--yes" in document["error"]["message"]


def test_a_submission_that_was_killed_has_left_its_run(slurm: FakeSlurm) -> None:
    sbatch = slurm.directory / "bin" / "sbatch"
    sbatch.write_text("#!/bin/bash\nkill -9 $PPID\n")
    with pytest.raises(json.JSONDecodeError):
        call(slurm, "submit", "--name", "killed", "--", "python", "train.py")
    code, document = call(slurm, "status", "killed")
    assert (code, [run["state"] for run in document["runs"]]) == (0, ["unknown"])
    assert call(slurm, "status", "not-submitted")[1]["error"]["kind"] == "no_run"
