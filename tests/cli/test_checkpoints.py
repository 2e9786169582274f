"""``hpcddp checkpoints``: what is there to go on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpcddp.cli.main import app
from hpcddp.manage.format import size_text
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from tests.messages import GoldenMessages
from tests.run.checkpoints import save


def checkpoints(*words: str) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *words])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "digits" / "cluster-12"
    path.mkdir(parents=True)
    for step in (10, 20, 30):
        newest = save(path / "checkpoints", step).path
    (newest / "a.bin").write_bytes(b"stbte")
    return path


def test_every_checkpoint_is_listed_with_what_a_resume_would_take(run: Path, golden: GoldenMessages) -> None:
    result = checkpoints(str(run))
    assert result.exit_code == 0
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["step", "size", "age", "attempt"]
    assert [row.split()[0] for row in rows] == ["30", "20", "10"]
    damage = golden.message(rows[0].partition("  not valid: ")[2])
    assert damage.startswith(f"{run}/checkpoints/step-000030/a.bin has another sha256")
    assert "0  valid; a resume goes on" in rows[1]
    assert rows[2].endswith("0  valid")


def test_json_says_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[2])
    document = json.loads(checkpoints("cluster", "--json").stdout)
    assert document["run"] == str(run)
    newest, middle, oldest = document["checkpoints"]
    assert (newest["step"], newest["valid"], newest["resumes"], newest["attempt"]) == (30, False, False, None)
    assert "another sha256" in newest["damage"]
    assert (middle["step"], middle["valid"], middle["resumes"], middle["attempt"]) == (20, True, True, 0)
    assert (middle["time"], middle["damage"]) == (1.5, None)
    assert middle["size"] == sum(path.stat().st_size for path in Path(middle["path"]).iterdir())
    assert (oldest["step"], oldest["resumes"]) == (10, False)


def test_the_best_checkpoint_is_listed_as_such(run: Path) -> None:
    (run / "checkpoints" / "best").symlink_to("step-000010")
    assert checkpoints(str(run)).stdout.splitlines()[3].endswith("0  valid; the best, checkpoints/best")
    document = json.loads(checkpoints(str(run), "--json").stdout)
    assert [state["best"] for state in document["checkpoints"]] == [False, False, True]


def test_all_damaged_is_said_plainly(run: Path, golden: GoldenMessages) -> None:
    for path in run.glob("checkpoints/step-*/a.bin"):
        path.unlink()
    last_line = golden.message(checkpoints(str(run)).stdout.splitlines()[-1])
    assert last_line.startswith("None of them is valid:")
    assert last_line.endswith("exit code 65.")


def test_a_sweep_is_refused_with_the_name_of_one_of_its_runs(run: Path, golden: GoldenMessages) -> None:
    chunks = (Chunk(job_id="50", first=0, count=2),)
    write_sweep(Sweep(sweep_id=run.name, path=run, elements=({"a": 1}, {"a": 2}), chunks=chunks))
    result = checkpoints(str(run))
    message = golden.message(result.exception)
    assert message.startswith("cluster-12 is a sweep of 2 runs;")
    assert message.endswith("such as cluster-12_0")


def test_run_without_checkpoints_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "attempts").mkdir()
    result = checkpoints(str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/checkpoints holds no checkpoint\n")


def test_other_root_is_searched_when_asked(run: Path) -> None:
    assert checkpoints("cluster-12", "--run-root", str(run.parents[1])).exit_code == 0


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 50, "5120.0 TiB")]
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert size_text(size) == text
