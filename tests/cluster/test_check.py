"""What the rules of ``hpcddp check`` say about sbatch and Slurm, as the real Slurm does it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.check.check import RULES, Report, check_file
from tests.check.examples import report_of
from tests.cluster.sandbox import Sandbox
from tests.slurm_version import numbers, slurm_version
from tests.waiting import wait_until

pytestmark = pytest.mark.depends_on("hpcddp/check", "tests/cluster/test_check.py")
# What ends a job by itself, however it ends.
ENDED = frozenset({"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"})


def write(directory: Path, *lines: str) -> Path:
    file = directory / "job.sh"
    file.write_text("\n".join(("#!/bin/bash", *lines, "")))
    return file


def version_here() -> tuple[int, ...]:
    version = slurm_version()
    assert version is not None
    return numbers(version)


def codes(report: Report) -> list[str]:
    return [finding.rule.code for finding in report.findings]


def held(sandbox: Sandbox, script: Path, **env: str) -> dict[str, str]:
    """Return what Slurm has read from a script, in the record of a job that never starts."""
    job_id = sandbox.submit("--hold", script, cwd=script.parent, env=env)
    record = sandbox.job(job_id)
    sandbox.run("scancel", job_id)
    return record


@pytest.mark.parametrize("code", ["slurm-refuses", "beyond-the-cluster"])
def test_a_rule_about_the_cluster_finds_its_bad_example(
    sandbox: Sandbox, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = RULES[code]
    (tmp_path / "train.py").touch()
    bad = report_of(rule.bad, tmp_path, monkeypatch, sandbox.environment)
    assert code in codes(bad)
    assert bad.start is None
    good = report_of(rule.good, tmp_path, monkeypatch, sandbox.environment)
    assert (codes(good), good.not_checked) == ([], ())
    assert good.start is not None
    assert "to start at" in good.start
    assert sandbox.run("squeue", "--noheader").stdout == ""


@pytest.mark.parametrize(
    "lines",
    [
        ("#SBATCH --nodes=1 two", "true"),
        ("#SBATCH --comment='open", "true"),
        ("#SBATCH --ntask-per-node=2", "true"),
    ],
)
def test_sbatch_refuses_what_refused_text_finds(sandbox: Sandbox, tmp_path: Path, lines: tuple[str, ...]) -> None:
    script = write(tmp_path, *lines)
    assert codes(check_file(script, None, sandbox.environment))[:1] == ["refused-text"]
    assert sandbox.run("sbatch", "--test-only", script, check=False).returncode != 0


def test_sbatch_refuses_a_script_without_a_shell_and_one_of_windows(sandbox: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    for text in ("#SBATCH --nodes=1\ntrue\n", "#!/bin/bash\r\ntrue\r\n"):
        script.write_bytes(text.encode())
        assert "refused-text" in codes(check_file(script, None, sandbox.environment))
        assert sandbox.run("sbatch", "--test-only", script, check=False).returncode != 0


@pytest.mark.parametrize(
    ("lines", "field", "value"),
    [
        (("true", "#SBATCH --comment=lost"), "Comment", None),
        ((" #SBATCH --comment=lost", "true"), "Comment", None),
        (("#SBATCh --comment=lost", "true"), "Comment", None),
        (("#SBATCH --comment=run#3", "true"), "Comment", "run"),
        (("#SBATCH --job-name=$HOME", "true"), "JobName", "$HOME"),
        (("#SBATCH --time=90", "true"), "TimeLimit", "01:30:00"),
        (("#SBATCH --time=48:00", "true"), "TimeLimit", "00:48:00"),
    ],
)
def test_sbatch_reads_a_line_as_the_finding_says(
    sandbox: Sandbox, tmp_path: Path, lines: tuple[str, ...], field: str, value: str | None
) -> None:
    script = write(tmp_path, *lines)
    assert codes(check_file(script, None, sandbox.environment)) != []
    found = held(sandbox, script).get(field)
    assert (found or None) == value or (found or "").strip() == value


def test_the_elements_of_an_array_share_an_output_without_a_pattern(sandbox: Sandbox, tmp_path: Path) -> None:
    script = write(tmp_path, "#SBATCH --array=0-1", "#SBATCH --output=same.out", "true")
    assert codes(check_file(script, None, sandbox.environment)) == ["output-shared"]
    job_id = sandbox.submit(script, cwd=tmp_path)
    outputs = {sandbox.wait(f"{job_id}_{index}")["StdOut"] for index in (0, 1)}
    assert outputs == {str(tmp_path / "same.out")}


@pytest.mark.parametrize(("pattern", "name"), [("a-%d.out", "a-%d.out"), ("a-%a.out", "a-4294967294.out")])
def test_sbatch_names_an_output_file_as_the_finding_says(
    sandbox: Sandbox, tmp_path: Path, pattern: str, name: str
) -> None:
    script = write(tmp_path, f"#SBATCH --output={pattern}", "true")
    assert codes(check_file(script, None, sandbox.environment)) == ["output-pattern"]
    sandbox.wait(sandbox.submit(script, cwd=tmp_path))
    assert (tmp_path / name).exists()


def test_a_job_whose_output_has_no_directory_fails_without_a_log_or_gets_one(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = write(tmp_path, "#SBATCH --output=logs/%j.out", f"touch {tmp_path}/ran")
    is_made = version_here() >= (23, 2)
    assert codes(check_file(script, None, sandbox.environment)) == ([] if is_made else ["output-directory"])
    sandbox.wait(sandbox.submit(script, cwd=tmp_path), {"COMPLETED" if is_made else "FAILED"})
    assert {path.name for path in tmp_path.iterdir()} == ({"job.sh", "logs", "ran"} if is_made else {"job.sh"})


@pytest.mark.parametrize("mode", ["", "#SBATCH --open-mode=append"])
def test_a_requeue_empties_the_log_without_append(sandbox: Sandbox, tmp_path: Path, mode: str) -> None:
    script = write(
        tmp_path,
        "#SBATCH --requeue",
        "#SBATCH --output=log",
        mode,
        "# resume",
        'echo "restart ${SLURM_RESTART_COUNT:-0}"',
        '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || sleep 120',
    )
    assert codes(check_file(script, None, sandbox.environment)) == ([] if mode else ["requeue-truncates-log"])
    job_id = sandbox.submit(script, cwd=tmp_path)
    log = tmp_path / "log"
    wait_until(lambda: log.exists() and "restart 0" in log.read_text(), "the first start")
    sandbox.run("scontrol", "requeue", job_id)
    sandbox.wait(job_id)
    text = log.read_text()
    assert "restart 1" in text
    assert ("restart 0" in text) == bool(mode)


def test_srun_takes_the_cpus_of_the_job_but_in_the_versions_that_the_finding_names(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    is_lost = version_here() < (23, 11)
    # With --exact the step has the CPUs that srun counts for its tasks, and no others.
    step = "srun --exact sh -c 'scontrol show step $SLURM_JOB_ID.$SLURM_STEP_ID'"
    script = write(tmp_path, "#SBATCH --ntasks=1 --cpus-per-task=2", "#SBATCH --output=log", step)
    assert codes(check_file(script, None, sandbox.environment)) == (["srun-cpus"] if is_lost else [])
    sandbox.wait(sandbox.submit(script, cwd=tmp_path))
    assert f"CPUs={1 if is_lost else 2} Tasks=1" in (tmp_path / "log").read_text()


def test_a_signal_to_the_batch_shell_ends_a_job_that_has_no_trap(sandbox: Sandbox, tmp_path: Path) -> None:
    script = write(tmp_path, "#SBATCH --time=1 --signal=B:USR1@50", "#SBATCH --output=log", "srun sleep 300")
    assert "unheard-signal" in codes(check_file(script, None, sandbox.environment))
    record = sandbox.wait(sandbox.submit(script, cwd=tmp_path), {"FAILED"})
    assert record["ExitCode"] == "0:10"


def test_bash_runs_a_trap_after_the_command_in_the_foreground(sandbox: Sandbox, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "#SBATCH --signal=B:USR1@60",
        "#SBATCH --output=log",
        "trap 'echo caught' USR1",
        f"srun sh -c 'touch {tmp_path}/began; sleep 8; echo ended'",
    )
    assert codes(check_file(script, None, sandbox.environment)) == ["unheard-signal"]
    job_id = sandbox.submit(script, cwd=tmp_path)
    wait_until((tmp_path / "began").exists, "the start of the step")
    sandbox.run("scancel", "--batch", "--signal=USR1", job_id)
    sandbox.wait(job_id, ENDED)
    assert (tmp_path / "log").read_text().split() == ["ended", "caught"]


def test_slurm_ends_what_the_script_does_not_wait_for(sandbox: Sandbox, tmp_path: Path) -> None:
    script = write(tmp_path, "#SBATCH --output=log", f"srun sh -c 'sleep 20; touch {tmp_path}/done' &")
    assert codes(check_file(script, None, sandbox.environment)) == ["no-wait"]
    sandbox.wait(sandbox.submit(script, cwd=tmp_path))
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    "lines",
    [("srun sh -c 'exit 1'", "echo done"), ("srun sh -c 'exit 1' | cat",), ("srun sh -c 'exit 1' &", "wait")],
)
def test_a_job_that_forgets_an_exit_code_is_completed(sandbox: Sandbox, tmp_path: Path, lines: tuple[str, ...]) -> None:
    script = write(tmp_path, "#SBATCH --output=log", *lines)
    assert codes(check_file(script, None, sandbox.environment)) == ["lost-exit-code"]
    assert sandbox.wait(sandbox.submit(script, cwd=tmp_path))["ExitCode"] == "0:0"


def test_slurm_shows_a_secret_that_stands_in_the_script(sandbox: Sandbox, tmp_path: Path) -> None:
    script = write(tmp_path, "export HF_TOKEN=hf_0123456789", "srun true")
    assert codes(check_file(script, None, sandbox.environment)) == ["secret-in-script"]
    job_id = sandbox.submit("--hold", script, cwd=tmp_path)
    assert "hf_0123456789" in sandbox.run("scontrol", "write", "batch_script", job_id, "-").stdout
    sandbox.run("scancel", job_id)


def test_a_variable_overrides_a_directive(sandbox: Sandbox, tmp_path: Path) -> None:
    script = write(tmp_path, "#SBATCH --time=0:10:00", "true")
    environment = {**sandbox.environment, "SBATCH_TIMELIMIT": "5"}
    assert codes(check_file(script, None, environment)) == ["variable-overrides"]
    assert held(sandbox, script, SBATCH_TIMELIMIT="5")["TimeLimit"] == "00:05:00"


@pytest.mark.parametrize("code", [code for code, rule in RULES.items() if "#!" in rule.good.text])
def test_sbatch_takes_every_good_script(sandbox: Sandbox, code: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    # The hosts of the tests are small, and have no GPUs.
    text = RULES[code].good.text.replace("#SBATCH --gres=gpu:2\n", "").replace("--cpus-per-task=8", "--cpus-per-task=1")
    script.write_text(text.replace("--mem=64G", "--mem=1M"))
    sandbox.run("sbatch", "--test-only", script, cwd=tmp_path)
