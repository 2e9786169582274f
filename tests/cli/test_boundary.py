"""One sentence, one way out, one exit code."""

import importlib
import json
import os
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpcddp
from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.errors import HpcddpError, UserError
from hpcddp.run.record import RecordError
from tests.messages import GoldenMessages


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = boundary.run(app, words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_an_unknown_option_is_the_users_and_names_the_help(
    capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    code, out, err = run(capsys, "submit", "--folow", "x.yaml")
    assert (code, out) == (2, "")
    assert "--folow; did you mean --follow?\n" in golden.message(err)
    assert err.endswith("See 'hpcddp submit --help'.\n")


def test_each_problem_of_a_job_is_a_line_of_its_own(capsys: pytest.CaptureFixture[str], golden: GoldenMessages) -> None:
    _, _, err = run(capsys, "render", "--set", "resources.nodes=-1", "--set", "train.modle=x", "--", "true")
    nodes, model = golden.message(err).splitlines()
    assert nodes.startswith("hpcddp: --set resources.nodes: is -1")
    assert nodes.endswith("write 1 or more")
    assert model.startswith("hpcddp: --set train.modle: ")
    assert model.endswith("did you mean train.model?")


def test_the_hint_of_a_document_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    def hint(*words: str) -> str:
        return str(json.loads(run(capsys, *words, "--json")[1])["error"]["hint"])

    assert hint("submit", "--folow", "x.yaml") == "See 'hpcddp submit --help'."
    assert hint("status", "--xyz") == "See 'hpcddp status --help'."
    assert hint("--xyz") == "See 'hpcddp --help'."


def test_an_option_without_its_value_leads_to_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "submit", "--resume")
    assert code == 2
    assert err.endswith("\n  See 'hpcddp submit --help'.\n")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("submit", "--xyz", "x.yaml"), ("no option --xyz;", "--help --all lists all")),
        (("status", "--xyz"), ("no option --xyz;",)),
        (("status", "--dependency", "x"), ("no option --dependency;",)),
        (("submit", "x.yaml", "--epochs", "4"), ("no option --epochs;", "write --set train.epochs=VALUE,")),
        (
            ("render", "--batch-size=64", "x.yaml"),
            ("no option --batch-size;", "write --set batch.global_batch_size=VALUE,"),
        ),
        (
            ("submit", "--cluster", "slrum"),
            ("'--cluster': 'slrum'", "'auto', 'slurm', 'local', 'here'"),
        ),
        (("plan", "--rule", "none of them"), ("'--rule': 'none of them'", "'none', 'linear', 'sqrt'.\n")),
        (("submit", "--env", "A=1"), ("no option --env;", "write --set environment.env=VALUE,")),
        (("plan", "--tasks-per-node", "3"), ("--tasks-per-node;", "write --set resources.tasks_per_node=VALUE,")),
        (("plan", "-t", "10m"), ("no option -t;",)),
    ],
)
def test_an_option_or_a_value_that_does_not_exist_leads_to_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], facts: tuple[str, ...], golden: GoldenMessages
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    golden.message(err)
    assert [fact for fact in facts if fact not in err] == []
    assert err.endswith(f"\n  See 'hpcddp {words[0]} --help'.\n")


@pytest.mark.parametrize("words", ["logs --rank x", "status --interval abc", "status --interval 0"])
def test_a_value_that_is_no_such_number_names_its_option(capsys: pytest.CaptureFixture[str], words: str) -> None:
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    # The rest is typer's, with no words of the library that reads the value.
    assert f"hpcddp: Invalid value for '{words.split()[1]}': " in err
    assert not {"Input", "parse"} & set(err.split())


def test_a_group_of_commands_alone_is_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor")
    assert (code, out) == (2, "")
    assert err.startswith("Usage: hpcddp doctor [OPTIONS] COMMAND")
    assert "See 'hpcddp doctor --help'" not in err


def test_json_errors_are_one_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "submit", "no-such-file.yaml", "--json")
    assert (code, err) == (2, "")
    error = json.loads(out)["error"]
    assert set(error) >= {"kind", "message", "hint"}
    assert "no-such-file.yaml" in error["message"]


def test_there_is_no_traceback_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Traceback" not in run(capsys, "submit", "no-such-file.yaml")[2]
    assert "Traceback" in run(capsys, "--debug", "submit", "no-such-file.yaml")[2]
    assert "Traceback" in run(capsys, "submit", "no-such-file.yaml", "--debug")[2]


@pytest.mark.parametrize(
    ("error", "fact"),
    [
        (OSError(28, "No space left on device"), "failed: No space left on device\n"),
        (PermissionError(13, "Permission denied", "/x"), "/x cannot be used: Permission denied\n"),
        (ZeroDivisionError("division by zero"), "hpcddp: ZeroDivisionError: division by zero\n"),
    ],
)
def test_what_nobody_foresaw_is_a_sentence_too(
    capsys: pytest.CaptureFixture[str], error: Exception, fact: str, golden: GoldenMessages
) -> None:
    def fail(**_: object) -> None:
        raise error

    assert boundary.run(fail, []) == 1  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert fact in golden.message(err)
    assert "--debug" in err
    assert "Traceback" not in err
    assert boundary.run(fail, ["--json"]) == 1  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "unforeseen"


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: hpcddp ")
    assert "render" in err


def test_an_interrupt_is_130() -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    assert boundary.run(interrupt, []) == 130  # type: ignore[arg-type]


def test_an_interrupt_that_has_something_to_tell_tells_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(**_: object) -> None:
        raise boundary.InterruptedCommandError("interrupted: sbatch refused the job: too many jobs", code=130)

    assert boundary.run(interrupt, ["--json"]) == 130  # type: ignore[arg-type]
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["hint"]) == ("interrupted", "Run the command again.")


def test_a_damaged_file_of_a_run_is_no_exit_code_of_a_job() -> None:
    def fail(**_: object) -> None:
        raise RecordError("result.json is empty", path=Path("result.json"))

    assert boundary.run(fail, []) == 2  # type: ignore[arg-type]


def test_errors_survive_pickling_with_their_values() -> None:
    error = pickle.loads(pickle.dumps(UserError("no such thing", hint="look again", name="x")))
    assert isinstance(error, UserError)
    assert (error.message, error.hint, error.name, error.exit_code) == ("no such thing", "look again", "x", 2)
    with pytest.raises(AttributeError, match="colour"):
        _ = error.colour
    assert HpcddpError("x").exit_code == 1


def started(command: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell, where ``hpcddp`` is this one, which imports nothing from the working directory."""
    function = f'hpcddp() {{ {sys.executable} -P -c "from hpcddp.cli.main import main; main()" "$@"; }}'
    return subprocess.run(
        ["bash", "-c", f"{function}; {command}"],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "code", "fact"),
    [
        ("hpcddp status >&-", 0, ""),
        ("hpcddp status >&- 2>&- <&-", 0, ""),
        ("hpcddp status --json >/dev/full", 1, "written: No space left on device\n"),
        ("hpcddp status x --json >/dev/full", 2, "no run under runs matches 'x'"),
        ("hpcddp --version >/dev/full", 1, "written: No space left on device\n"),
        ("hpcddp status x >/dev/full 2>/dev/full", 2, ""),
        ("hpcddp --version >/dev/full 2>/dev/full", 1, ""),
        ("hpcddp status 2>/dev/full", 0, ""),
        ("mkdir d; cd d; rmdir ../d; hpcddp status", 1, "working directory does not exist"),
        ("hpcddp status $'\\xff\\x1b'", 2, "no run under runs matches '\\udcff\\x1b'"),
        (f"hpcddp status {'x' * 5000}", 2, "no run under runs matches 'xxxxxxxx"),
    ],
)
def test_a_closed_or_full_output_and_odd_arguments_are_one_sentence(
    tmp_path: Path, command: str, code: int, fact: str, golden: GoldenMessages
) -> None:
    done = started(command, tmp_path)
    assert done.returncode == code
    assert fact in golden.message(done.stderr, {"x" * 5000: "LONG"})
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("\n") <= 2


def error_classes() -> list[type[HpcddpError]]:
    """Return every class of error in the package, also in modules that need torch."""
    for module in pkgutil.walk_packages(hpcddp.__path__, "hpcddp."):
        # Processes start in these, and a tracker may not be installed.
        if not module.name.endswith("__main__") and ".tracking." not in module.name:
            importlib.import_module(module.name)
    found, todo = [], [HpcddpError]
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return found


def test_every_error_has_a_hint_for_programs() -> None:
    """It is the error's own, the end of the message, or the advice of its class."""
    classes = error_classes()
    assert len(classes) > 40
    for cls in classes:
        error = cls.__new__(cls)
        HpcddpError.__init__(error, "x is 1")
        assert error.as_json()["error"]["hint"], cls
        HpcddpError.__init__(error, "x is 1, which is too small; write 2 or more")
        assert error.as_json()["error"]["hint"] == "write 2 or more"
        HpcddpError.__init__(error, "x is 1; write 2", hint="Run it again.")
        assert error.as_json()["error"]["hint"] == "Run it again."


@pytest.mark.parametrize(
    "words", [("submit", "--folow"), ("why",), ("submit", "none.yaml"), ("plan", "--rule", "x"), ("nothing",)]
)
def test_every_error_of_a_command_has_a_hint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, *words, "--json")
    assert code == 2
    assert json.loads(out)["error"]["hint"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [("resume", "submit --resume RUN"), ("run", "submit"), ("stop", "cancel"), ("kill", "cancel"), ("list", "status"),
     ("ls", "status")],
)  # fmt: skip
def test_a_command_of_another_name_is_answered_with_the_one_that_does_it(
    capsys: pytest.CaptureFixture[str], word: str, meant: str
) -> None:
    assert boundary.run(app, [word, "x"]) == 2
    assert capsys.readouterr().err == f"hpcddp: there is no command {word}; write hpcddp {meant}\n"


@pytest.mark.parametrize("module", ["typing", "typer"])
def test_an_interrupt_while_the_command_line_is_loaded_is_no_traceback(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        # Without site, which may import typing before hpcddp does.
        [sys.executable, "-S", "-m", "hpcddp", "status"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")
