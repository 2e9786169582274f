"""Lines of ``environment.setup`` that fail, set traps and change the shell, in real shells."""

from __future__ import annotations

import pytest

from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.read import load_job
from tests.messages import GoldenMessages
from tests.submission.script_runner import ScriptRunner, script_of

FALSE_FILE = "[ -n '' ]\n"


def run(runner: ScriptRunner, *setup: str, **variables: str) -> tuple[int, str]:
    return runner.run(script_of(runner, environment={"setup": setup}), **variables)


@pytest.mark.parametrize(
    ("setup", "command", "code"),
    [
        (["module load cuda/0", "no-such-command --x"], "no-such-command --x", 127),
        (["source ./activate.sh"], "source ./activate.sh", 1),
        (['. "$HOME/none/activate.sh"'], '. "$HOME/none/activate.sh"', 1),
        (["cd /none/at/all"], "cd /none/at/all", 1),
        (["if true; then", "  false", "fi"], "false", 1),
        (["f() { return 3; }", "f now"], "f now", 3),
        (["(exit 5)"], "(exit 5)", 5),
        (["set -o pipefail", "false | cat"], "false | cat", 1),
        (["set -e", "false"], "false", 1),
        (["set -E", "f() { false; true; }", "f", "false"], "false", 1),
        (["trap - ERR", "false"], "false", 1),
        (["trap : ERR", "false"], "false", 1),
        (["trap 'exit 0' EXIT", "false"], "false", 1),
        (["x=$(false)"], "x=$(false)", 1),
        (["cat <<END", "text", "END", "false"], "false", 1),
        (["for x in 1 2; do\n    test -e /none/$x # $HOME\ndone"], "test -e /none/$x # $HOME", 1),
    ],
)
def test_a_command_that_fails_is_named_and_starts_no_task(
    runner: ScriptRunner, setup: list[str], command: str, code: int
) -> None:
    (runner.directory / "init" / "bash").write_text("module() { :; }\n")
    script_code, errors = run(runner, *(["module() { :; }"] if "module" in setup[0] else []), *setup)
    assert script_code == 70
    (said,) = (line for line in errors.splitlines() if line.startswith("hpcddp"))
    assert f"environment.setup: {command} ended with exit code {code}, so that no task was started" in said
    assert "append || true to it" in said
    assert runner.words("begin") == []


@pytest.mark.parametrize(
    "setup",
    [
        ["false || true"],
        ["! true"],
        ["if false; then :; fi"],
        ["[ -d /none ] && module load x"],
        ["while false; do :; done"],
        ["false | cat"],
        ["f() { false; true; }", "f"],
        ["(false; true)"],
        ["false &"],
        ["set -E", "(false; true)", "x=$(false; echo 1)"],
        ["source ./good.sh"],
        ["exec 3>&1", "exec 2>&1"],
        ["trap 'false' USR1"],
        ["shopt -s nullglob extglob", "set -f -u", "IFS=/"],
    ],
)
def test_what_does_not_fail_starts_the_tasks(runner: ScriptRunner, setup: list[str]) -> None:
    (runner.directory / "good.sh").write_text("false\ntrue\n")
    code, _ = run(runner, *setup)
    assert code == 0
    assert runner.words("srun") != []


@pytest.mark.parametrize(
    "line", ["source ./file.sh", ". ./file.sh", 'source "$PWD/file.sh" argument', "source <(false)"]
)
def test_a_file_that_ends_with_a_false_test_is_a_warning(
    runner: ScriptRunner, golden: GoldenMessages, line: str
) -> None:
    (runner.directory / "file.sh").write_text(FALSE_FILE)
    code, errors = run(runner, line if "<(" not in line else "source <(echo \"[ -n '' ]\")")
    assert code == 0
    assert golden.message(errors).startswith("hpcddp: warning: environment.setup: ")
    assert any(word.startswith("--warning=environment.setup: ") for word in runner.words("begin"))


def test_the_users_exit_trap_runs_last_and_does_not_change_the_exit_code(runner: ScriptRunner) -> None:
    code, errors = run(runner, "trap 'echo cleaned >&2; exit 9' EXIT", END_CODE="75")
    assert code == 75
    assert errors.splitlines()[-1] == "cleaned"
    assert runner.words("end") != []


def test_the_users_exit_trap_runs_after_a_failing_command_too(runner: ScriptRunner) -> None:
    code, errors = run(runner, "trap 'echo cleaned >&2' EXIT", "false")
    assert code == 70
    assert errors.splitlines()[-1] == "cleaned"


def test_an_exit_with_0_is_still_no_job_that_has_trained(runner: ScriptRunner) -> None:
    code, errors = run(runner, "trap 'true' EXIT INT TERM", "exit 0")
    assert code == 70
    assert "environment.setup ended the script with exit code 0" in errors


def test_set_v_prints_no_value_of_the_environment(runner: ScriptRunner) -> None:
    script = script_of(runner, environment={"setup": ("set -v -x",), "env": {"SECRET": "my own value"}})
    code, errors = runner.run(script)
    assert code == 0
    assert "my own value" not in errors


@pytest.mark.parametrize("line", ["exec bash", "true\n  exec /bin/zsh -l", "exec -a x sh"])
def test_an_exec_that_replaces_the_script_is_refused(line: str, golden: GoldenMessages) -> None:
    with pytest.raises(JobFileError) as refused:
        load_job({"name": "a", "command": ["true"], "environment": {"setup": [line]}})
    assert "replaces the script" in golden.message(refused.value)


@pytest.mark.parametrize("line", ["exec 2>&1", "exec >log", "exec {fd}>x", "exec 3<&0", "# exec bash", "docker exec x"])
def test_an_exec_that_redirects_is_allowed(line: str) -> None:
    load_job({"name": "a", "command": ["true"], "environment": {"setup": [line]}})
