"""What is checked and reported: job files, scripts, comments that ignore a finding, repairs, the cluster's absence."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.check.check import LAYERS, Report, check_file, repaired
from hpcddp.check.finding import Example
from hpcddp.errors import UserError
from hpcddp.script.parse import read_script
from tests.check.examples import report_of

REPOSITORY = Path(__file__).parents[2]
HERE = {"PATH": os.environ["PATH"]}
TEXT_RULES = {rule.code for layer in ("script", "job") for rule in LAYERS[layer]}


def check_script(directory: Path, *lines: str, environment: Mapping[str, str] = HERE) -> Report:
    file = directory / "job.sh"
    file.write_text("\n".join(("#!/bin/bash", *lines, "")))
    return check_file(file, None, environment)


def codes(report: Report) -> list[str]:
    return [finding.rule.code for finding in report.findings]


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("job", sorted((REPOSITORY / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_nothing_is_found_in_the_text_of_our_jobs_and_of_their_scripts(job: Path) -> None:
    report = check_file(job, None, HERE)
    assert TEXT_RULES.isdisjoint(codes(report))


@pytest.mark.parametrize("script", sorted((REPOSITORY / "tests" / "golden").glob("*.sh")), ids=lambda path: path.stem)
def test_nothing_but_the_missing_run_directory_is_found_in_our_scripts(script: Path) -> None:
    assert set(codes(check_file(script, None, HERE))) <= {"output-directory"}


def test_a_finding_names_its_line_and_its_file(tmp_path: Path) -> None:
    (finding,) = check_script(tmp_path, "", "export MASTER_PORT=29500", "srun python train.py").findings
    assert (finding.rule.code, finding.file, finding.line) == ("fixed-port", str(tmp_path / "job.sh"), 3)
    assert "29500" in finding.hit.problem
    assert finding.fails


@pytest.mark.parametrize(
    "lines",
    [
        ("export MASTER_PORT=29500  # hpcddp: ignore fixed-port",),
        ("# hpcddp: ignore fixed-port", "export MASTER_PORT=29500"),
        ("# hpcddp: ignore srun-cpus, fixed-port", "export MASTER_PORT=29500"),
    ],
)
def test_a_comment_ignores_a_finding(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert codes(check_script(tmp_path, *lines, "srun python train.py")) == []


@pytest.mark.parametrize(
    "lines",
    [
        ("# hpcddp: ignore srun-cpus", "export MASTER_PORT=29500"),
        ("# hpcddp: ignore fixed-port", "", "export MASTER_PORT=29500"),
        ("export MASTER_PORT=29500", "# hpcddp: ignore fixed-port"),
    ],
)
def test_a_comment_elsewhere_or_for_another_rule_ignores_nothing(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert codes(check_script(tmp_path, *lines, "srun python train.py")) == ["fixed-port"]


def test_a_comment_in_a_job_file_ignores_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "name: a\nresources:\n  gpus_per_node: 4\n  cpus_per_task: 1{}\ncommand: [python, -V]\n"
    found = report_of(Example(text.format("")), tmp_path, monkeypatch, HERE).findings
    assert [(finding.rule.code, finding.line) for finding in found] == [("cpus-for-loader", 4)]
    ignored = text.format("  # hpcddp: ignore cpus-for-loader")
    assert report_of(Example(ignored), tmp_path, monkeypatch, HERE).findings == ()


def test_every_problem_of_a_job_file_is_a_finding_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Example("name: a\nresources: {nodes: 0}\nbatsch: {}\ncommand: [python, -V]\n")
    found = report_of(example, tmp_path, monkeypatch, HERE).findings
    assert [(finding.rule.code, finding.line, finding.hit.key) for finding in found] == [
        ("job-file", 2, "resources.nodes"),
        ("job-file", 3, "batsch"),
    ]


def test_all_obstacles_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example("name: a\nenvironment: {pass_env: [NO_SUCH]}\ncommand: [python, no_such.py, $A]\n")
    assert codes(report_of(example, tmp_path, monkeypatch, HERE)) == [
        "submit-refuses",
        "submit-refuses",
        "submit-warns",
    ]


def test_a_batch_that_cannot_be_split_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example(
        "name: a\nresources: {tasks_per_node: 3}\nbatch: {global_batch_size: 64, split: error}\n"
        "train: {model: resnet18, dataset: digits}\n"
    )
    assert "submit-refuses" in codes(report_of(example, tmp_path, monkeypatch, HERE))


def test_an_element_of_a_sweep_that_cannot_run_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Example("name: a\nsweep: {script: [a.py, b.py]}\ncommand: [python, '{script}']\n", files={"a.py": ""})
    (finding,) = report_of(example, tmp_path, monkeypatch, HERE).findings
    assert finding.rule.code == "submit-refuses"
    assert "b.py" in finding.hit.problem


def test_the_answer_says_that_the_cluster_was_not_asked(tmp_path: Path) -> None:
    report = check_script(tmp_path, "srun python train.py", environment={"PATH": "/nowhere"})
    assert report.not_checked == ("the cluster was not asked: there is no Slurm on this machine",)
    assert not report.fails


def test_the_variables_of_sbatch_mean_nothing_for_a_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**HERE, "SBATCH_TIMELIMIT": "5"}
    assert codes(report_of(Example("name: a\ncommand: [python, -V]\n"), tmp_path, monkeypatch, environment)) == []
    wrong = Example("name: a\ncommnd: [python, -V]\n")
    assert set(codes(report_of(wrong, tmp_path, monkeypatch, environment))) == {"job-file"}


def test_a_script_in_python_has_no_shell_lines(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text("#!/usr/bin/env python\n#SBATCH --cpus-per-task=4\nsrun = 1\nsrun\n")
    assert codes(check_file(file, None, HERE)) == []


BROKEN = """\
#SBATCH --nodes=2
#SBATCH --time=90  # minutes
#SBATCH --cpus-per-task=8
#SBATCH --requeue

export MASTER_PORT=29500
#SBATCH --mem=64G
# a comment stays
srun   python train.py --resume
"""
REPAIRED = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --time=90  # minutes
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --mem=64G

export MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))
# a comment stays
srun --cpus-per-task="$SLURM_CPUS_PER_TASK"   python train.py --resume
"""


def test_all_repairs_together_leave_nothing_to_repair(tmp_path: Path) -> None:
    assert repaired(BROKEN, tmp_path, HERE) == REPAIRED
    assert repaired(REPAIRED, tmp_path, HERE) == REPAIRED


def test_repaired_line_breaks_are_those_of_unix(tmp_path: Path) -> None:
    assert repaired("#!/bin/bash\r\nsrun python train.py\r\n", tmp_path, HERE) == "#!/bin/bash\nsrun python train.py\n"
    assert repaired("\ufeff#!/bin/bash\nsrun python a.py\n", tmp_path, HERE) == "#!/bin/bash\nsrun python a.py\n"


def test_a_byte_order_mark_in_front_of_a_script_is_found_and_no_harm_to_a_job_file(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("\ufeff#!/bin/bash\n#SBATCH --nodes=1\nsrun python a.py\n")
    (finding,) = check_file(script, None, HERE).findings
    assert (finding.rule.code, finding.line) == ("refused-text", 1)
    job_file = tmp_path / "job.yaml"
    job_file.write_text('\ufeffname: a\ncommand: ["true"]\n')
    assert check_file(job_file, None, HERE).findings == ()


def test_a_script_whose_directives_follow_a_byte_order_mark_is_no_job_file(tmp_path: Path) -> None:
    script = tmp_path / "job"
    script.write_text("\ufeff#SBATCH --nodes=1\nsrun python a.py\n")
    assert {finding.rule.code for finding in check_file(script, None, HERE).findings} == {"refused-text"}


def test_a_file_with_nothing_but_a_byte_order_mark_is_empty(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("\ufeff\n")
    with pytest.raises(UserError, match="is empty"):
        check_file(script, None, HERE)
    with pytest.raises(UserError, match="is empty"):
        read_script(script)


def test_an_ignored_finding_is_not_repaired(tmp_path: Path) -> None:
    script = "#!/bin/bash\nexport MASTER_PORT=29500  # hpcddp: ignore fixed-port\nsrun python train.py\n"
    assert repaired(script, tmp_path, HERE) == script


def test_a_repaired_script_is_valid_bash(tmp_path: Path) -> None:
    file = tmp_path / "repaired.sh"
    file.write_text(repaired(BROKEN, tmp_path, HERE))
    subprocess.run(["bash", "-n", file], check=True)


PIECES = st.sampled_from(
    [
        "'", '"', "\\\n", "$(", "`", "()", "{", "}", "|", "&", "\n", "\r\n", "<<EOF\n", "trap USR1\n", "set\n",
        "exec\n",
        "trap 'x' USR1\n", "srun", " python a.py", "set -x\n", "export HF_TOKEN=abcdefgh1\n", "MASTER_PORT=29500\n",
        "#SBATCH", "#SBATCH -c 4\n", "#SBATCH --time=5\n", "#SBATCH --signal=B:USR1@5\n", "#SBATCH --output=%\n",
        "#SBATCH --requeue=expedite\n", "#SBATCH --requeue\n", "# hpcddp: ignore ", "--", "=", "\x0c",
    ]
)  # fmt: skip


@given(st.lists(PIECES, max_size=20))
def test_any_script_is_checked_and_a_second_repair_changes_nothing(pieces: list[str]) -> None:
    once = repaired("".join(pieces), Path("/nowhere"), {})
    assert repaired(once, Path("/nowhere"), {}) == once
