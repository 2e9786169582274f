"""``hpcddp status``, ``logs``, ``why``, ``cancel``, ``requeue``: what they print, and the shell's completion of RUN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.run.directory import RunDirectory
from hpcddp.run.find import add_to_index
from hpcddp.slurm import commands
from hpcddp.slurm.commands import QueuedJob
from tests.manage.runs import make, queued
from tests.messages import GoldenMessages
from tests.slurm.programs import program


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs: one has failed, one runs, one waits."""
    root = tmp_path / "runs"
    failed = make(root, "b-failed").submitted("1").started("1").log(0, "hello\n").log(1, "world\n")
    failed.failed(1, message="a bug", step=4).ended("failed", reason="rank 1 failed", exit_code=70)
    make(root, "a-runs").submitted("2").started("2").event("train").steps(1, 40)
    make(root, "c-waits").submitted("3")
    for place, name in enumerate(("b-failed", "a-runs", "c-waits")):
        os.utime(root / "digits" / name / "submission.json", (place, place))
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setattr(commands, "queue", lambda _: JOBS)
    monkeypatch.setattr(commands, "priority", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return root


JOBS: list[QueuedJob] = [queued("2", used_s=60, limit_s=3600, nodes=2), queued("3", "PENDING", reason="Priority")]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = boundary.run(app, words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.usefixtures("root")
def test_status_shows_all_runs_the_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "status")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["run", "job", "name", "state", "attempt", "step", "loss", "samples/s", "eta", "nodes", "time"]
    assert [(row[0], row[3]) for row in rows[1:]] == [
        ("c-waits", "pending"),
        ("a-runs", "running"),
        ("b-failed", "failed"),
    ]
    assert "\x1b" not in out


@pytest.mark.usefixtures("root")
def test_status_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capsys, "status", "a-runs", "--json")[1])
    (found,) = document["runs"]
    expected = {"run_id": "a-runs", "state": "running", "job_id": "2", "step": 40, "total_steps": 400, "limit_s": 3600}
    assert {key: found[key] for key in expected} == expected


@pytest.mark.usefixtures("root")
def test_status_of_one_run_is_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "status", "b-failed")[1]
    assert out.startswith("run        b-failed  (digits)\nstate      failed: rank 1 failed\n")


def test_status_says_where_there_is_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "status", "--run-root", str(tmp_path))[:2] == (0, f"there is no run under {tmp_path}\n")
    code, _, err = run(capsys, "status", "x", "--run-root", str(tmp_path))
    assert code == 2
    assert "matches 'x'" in err


def test_a_controller_that_is_away_is_said_beside_the_table(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    def away(_: object) -> list[QueuedJob]:
        raise commands.SlurmUnavailableError("squeue failed: Unable to contact slurm controller")

    monkeypatch.setattr(commands, "queue", away)
    code, out, err = run(capsys, "status", "--run-root", str(root))
    assert code == 0
    assert [line.split()[3] for line in out.splitlines()[1:]] == ["unknown", "unknown", "failed"]
    assert golden.message(err).startswith("Slurm could not be asked, ")
    assert err.endswith("squeue failed: Unable to contact slurm controller\n")


@pytest.mark.usefixtures("root")
def test_watch_is_considerate(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "status", "--watch", "--interval", "0.1")
    assert code == 2
    assert "--interval" in err


@pytest.mark.usefixtures("root")
def test_watch_looks_until_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", wait)
    code, out, _ = run(capsys, "status", "--watch", "--interval", "5")
    assert (code, waits, out.count("a-runs")) == (130, [5, 5], 2)


@pytest.mark.usefixtures("root")
def test_logs_have_time_rank_and_host_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "logs", "b-failed")[1].splitlines()
    assert lines[0].startswith("--- attempt 0 of run b-failed, 2")
    assert [line[8:] for line in lines[1:]] == [" rank 0 | hello", " rank 1 n1 | world"]
    assert run(capsys, "logs", "b-failed", "-n", "1")[1].endswith(" rank 1 n1 | world\n")
    document = json.loads(run(capsys, "logs", "b-failed", "--rank", "1", "--json")[1])
    assert [line["text"] for line in document["lines"]] == ["world"]


@pytest.mark.usefixtures("root")
def test_the_first_error_is_all_that_is_printed(capsys: pytest.CaptureFixture[str], golden: GoldenMessages) -> None:
    code, out, _ = run(capsys, "logs", "b-failed", "--first-error")
    assert code == 0
    sentence = golden.message(out.splitlines()[0])
    assert sentence.startswith("attempt 0: rank 1 on n1 failed")
    assert sentence.endswith("after step 4: ValueError: a bug")
    assert json.loads(run(capsys, "logs", "b-failed", "--first-error", "--json")[1])["ranks"] == [1]
    assert run(capsys, "logs", "a-runs", "--first-error")[:2] == (0, "nothing has failed in run a-runs\n")
    assert run(capsys, "logs", "a-runs", "--first-error", "--json")[:2] == (0, "null\n")


@pytest.mark.usefixtures("root")
def test_following_ends_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "logs", "b-failed", "--follow")
    assert (code, err) == (0, "run b-failed has ended: failed\n")
    assert "hello" in out


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("option", [["--json"], ["--first-error"], ["--attempt", "0"]])
def test_following_is_for_people_and_for_the_newest_attempt(
    capsys: pytest.CaptureFixture[str], option: list[str], golden: GoldenMessages
) -> None:
    code, out, err = run(capsys, "logs", "b-failed", "--follow", *option)
    assert code == 2
    message = golden.message(out + err)
    assert "--follow prints the newest attempt" in message
    assert "leave out --json, --first-error and --attempt" in message


@pytest.mark.usefixtures("root")
def test_why_explains_the_last_run_unless_another_is_named(
    capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    sentence = golden.message(run(capsys, "why")[1].splitlines()[0])
    assert sentence.startswith("c-waits (digits): it waits to start,")
    assert "jobs of higher priority" in sentence
    document = json.loads(run(capsys, "why", "b-failed", "--json")[1])
    assert (document["state"], document["next"]) == ("failed", "hpcddp logs b-failed --first-error")


@pytest.mark.usefixtures("root")
def test_cancel_ends_the_run_that_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    ended: list[object] = []
    monkeypatch.setattr(commands, "cancel", lambda job_ids, _: ended.append(job_ids))
    code, _, err = run(capsys, "cancel")
    assert (code, ended) == (2, [])
    assert "RUN" in err
    code, out, _ = run(capsys, "cancel", "last")
    assert (code, ended) == (0, [["3"]])
    assert out.startswith("run c-waits is cancelled (job 3)")
    again = json.loads(run(capsys, "cancel", "c-waits", "--json")[1])
    assert golden.message(again["sentence"]).startswith("run c-waits has ended already (cancelled);")
    assert again["sentence"].endswith("nothing to cancel")


@pytest.mark.usefixtures("root")
def test_requeue_of_what_does_not_run_is_the_users_error(
    capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    code, _, err = run(capsys, "requeue", "c-waits")
    assert code == 2
    assert golden.message(err).startswith("hpcddp: the run c-waits waits")
    assert err.endswith("nothing to save or to requeue\n")


@pytest.mark.parametrize("words", [["status"], ["submit", "--resume"], ["checkpoints"]])
def test_run_ids_complete_in_the_shell_without_a_question_to_anybody(root: Path, words: list[str]) -> None:
    # Fails the completion if it calls Slurm.
    environment = program(root.parent, "squeue", "touch asked")
    line = ["hpcddp", *words, "b"]
    done = subprocess.run(
        [sys.executable, "-m", "hpcddp"],
        cwd=root.parent,
        env={
            **os.environ, "PATH": environment["PATH"], "PYTHONPATH": os.pathsep.join(sys.path),
            "_HPCDDP_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1),
        },
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["b-failed"], done.stderr
    assert not (root.parent / "asked").exists()


@pytest.mark.parametrize("where", ["project", "profile", "both"])
def test_runs_are_looked_for_where_the_project_or_the_profile_puts_them(
    where: str, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profiles = tmp_path / "config" / "hpcddp" / "profiles"
    profiles.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    said = f"run_root: {root}\n"
    if where == "project":
        (here / "hpcddp.yaml").write_text(said)
    else:
        (profiles / "gpu.yaml").write_text(said)
        (here / "hpcddp.yaml").write_text("profile: gpu\n")
    if where == "both":
        (profiles / "gpu.yaml").write_text("run_root: elsewhere\n")
        (here / "hpcddp.yaml").write_text(f"profile: gpu\n{said}")
    assert "a-runs" in run(capsys, "status")[1]
    assert "c-waits" in run(capsys, "why")[1]
    assert run(capsys, "logs", "b-fa")[0] == 0
    assert run(capsys, "status", "--run-root", "runs")[1] == f"there is no run under {Path('runs').absolute()}\n"


def test_a_project_file_that_cannot_be_read_is_named_and_does_not_stop_who_says_where_runs_are(
    root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "hpcddp.yaml").write_text("run_root: [a\n")
    code, _, err = run(capsys, "status")
    assert code == 2
    assert "hpcddp.yaml:1: is not valid YAML" in err
    assert "a-runs" in run(capsys, "status", "--run-root", str(root))[1]


def test_a_damaged_sweep_stands_in_nobody_elses_way(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(root, "d-sweep").submitted("9")
    (made.run.path / "sweep.json").write_text('{"sweep_id')
    code, out, _ = run(capsys, "status")
    assert code == 0
    assert "a-runs" in out
    assert "d-sweep" in out
    code, _, err = run(capsys, "status", "d-sweep")
    assert code == 2
    assert "sweep.json is damaged" in err


def test_why_names_a_run_elsewhere_by_its_path(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    path = root / "digits" / "b-failed"
    out = run(capsys, "why", "b-failed", "--run-root", str(root))[1]
    assert f"next: hpcddp logs {path} --first-error" in out
    assert (
        f"next: hpcddp logs {root / 'digits' / 'a-runs'} --follow"
        in run(capsys, "why", str(path.with_name("a-runs")))[1]
    )


def fifo(run: Path) -> None:
    for path in [*run.glob("*.json*"), *run.glob("attempts/0/*")]:
        path.unlink()
        os.mkfifo(path)


def endless(run: Path) -> None:
    for path in [*run.glob("*.json*"), *run.glob("attempts/0/*")]:
        path.unlink()
        path.symlink_to("/dev/zero")


def wrong_types(run: Path) -> None:
    for path in [*run.glob("*.json"), *run.glob("attempts/0/*.json")]:
        path.write_text(
            '{"format": 1, "job_id": [], "time": {}, "elements": 1, "host": 7, "total_steps": "x", "status": null}'
        )
    (run / "sweep.json").write_text('{"format": 1, "sweep_id": "../x", "elements": [{}], "chunks": []}')


def odd_names(run: Path) -> None:
    for name in ("rank-x.log", "rank--1.log", "error-rank-x.json", "exit-rank-.json"):
        (run / "attempts" / "0" / name).write_text("x")
    for name in ("x", "\u0663", "007", "9" * 200):
        (run / "attempts" / name).mkdir()


@pytest.mark.parametrize("damage", [fifo, endless, wrong_types, odd_names])
def test_a_damaged_run_does_not_hide_the_others(
    root: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    damage(root / "digits" / "a-runs")
    code, out, _ = run(capsys, "status")
    assert code == 0
    assert {"a-runs", "b-failed", "c-waits"} <= {line.split()[0] for line in out.splitlines()}
    for words in (("why",), ("logs",), ("logs", "--batch"), ("logs", "--first-error"), ("checkpoints",), ("cancel",)):
        code, _, err = run(capsys, words[0], str(root / "digits" / "a-runs"), *words[1:])
        assert code in {0, 1, 2}
        assert "mistake of hpcddp" not in err


def test_a_run_that_is_closed_to_this_user_is_one_row_that_says_why(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = root / "digits" / "b-failed" / "attempts"
    attempts = RunDirectory.attempt_numbers

    def refuse(run: RunDirectory) -> Iterator[int]:
        if run.attempts == closed:
            raise PermissionError(13, "Permission denied", str(closed))
        return attempts(run)

    # A root user may read everything.
    monkeypatch.setattr(RunDirectory, "attempt_numbers", refuse)
    code, out, _ = run(capsys, "status")
    assert code == 0
    assert f"{closed} cannot be read (Permission denied)" in out
    assert "a-runs" in out


CONTROL = "\x1b]0;title\x07\x1b[31mred\x9b0m\u202e"


def test_nothing_that_is_printed_controls_the_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(root, f"d-{CONTROL}\udcff\n", name=CONTROL).submitted("4").started("4").log(0, f"{CONTROL}\n")
    made.failed(0, message=CONTROL, traceback=f"{CONTROL}\n").ended("failed", reason=CONTROL)
    path = str(made.run.path)
    for words in (("status",), ("status", path), ("why", path), ("logs", path), ("logs", path, "--first-error"),
                  ("checkpoints", path), ("cancel", path), ("requeue", path), ("status", CONTROL)):  # fmt: skip
        _, out, err = run(capsys, *words)
        assert out + err
        assert not set(out + err) & set("\x1b\x07\x9b\u202e\udcff"), words
    assert f"| {CONTROL}\n" in run(capsys, "logs", path, "--raw")[1]
    assert "\\x1b[31mred" in run(capsys, "logs", path)[1]
    assert json.loads(run(capsys, "status", path, "--json")[1])["runs"][0]["run_dir"] == path


@pytest.mark.usefixtures("root")
def test_status_chooses_runs_and_says_what_it_does_not_understand(
    capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    assert [line["run_id"] for line in json.loads(run(capsys, "status", "--state", "failed", "--json")[1])["runs"]] == [
        "b-failed"
    ]
    assert run(capsys, "status", "--name", "other*", "--json")[0] == 0
    both = ("--state", "failed,finished")
    assert run(capsys, "status", *both, "--json")[0] == 0
    assert run(capsys, "status", *both, "--json") == run(
        capsys, "status", "--state", "failed", "--state", "finished", "--json"
    )
    code, _, err = run(capsys, "status", "--state", "faild")
    assert code == 2
    assert golden.message(err).startswith("hpcddp: --state is 'faild', ")
    assert err.endswith("; did you mean failed?\n")
    code, _, err = run(capsys, "status", "--since", "yesterday")
    assert code == 2
    assert golden.message(err).startswith("hpcddp: --since is 'yesterday', ")
    assert "write a duration such as 90min" in err
    for since in ("7d", "12h", "5m", "2020-01-01", "2020-01-01T08:00"):
        assert run(capsys, "status", "--since", since, "--json")[0] == 0
    assert run(capsys, "status", "b-failed", "--all")[0] == 2
    _, out, _ = run(capsys, "status", "--state", "held")
    assert out.startswith("no run matches --state under ")


def test_the_index_makes_runs_known_from_any_directory(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    golden: GoldenMessages,
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert run(capsys, "why", "b-failed")[0] == 2
    nothing = f"there is no run under {Path.cwd()}/runs"
    assert run(capsys, "status")[1] == f"{nothing}\n"
    add_to_index(RunDirectory(root / "digits" / "b-failed"))
    assert run(capsys, "why", "b-failed")[0] == 0
    sentence = golden.message(run(capsys, "status")[1], {str(Path.cwd()): "HERE"})
    assert sentence.startswith(f"{nothing}; hpcddp status --all shows ")
