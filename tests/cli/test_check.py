"""``hpcddp check``: what it prints, its exit codes, its repairs, and the lines that ``submit`` prints."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path

import pytest

from tests.command_line import hpcddp

BROKEN = "#!/bin/bash\n#SBATCH --requeue\nexport MASTER_PORT=29500\nsrun python train.py --resume\n"
RIGHT = "#!/bin/bash\n#SBATCH --nodes=1\nsrun python train.py\n"
ONE_CPU = "name: a\nresources: {gpus_per_node: 1, cpus_per_task: 1}\ncommand: [python, -V]\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "job.sh"
    file.write_text(BROKEN)
    return file


def check(directory: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return hpcddp(directory, "check", *words)


def test_a_finding_is_four_lines_and_exit_code_2(script: Path) -> None:
    done = check(script.parent, script.name)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.splitlines()[4:9] == [
        "job.sh:3: warning fixed-port",
        "    the ranks meet at port 29500 in every job",
        "    otherwise: the second job on a node ends with EADDRINUSE, or joins the ranks of the first",
        "    instead: write MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000)), another port in each job (--fix does it)",
        "job.sh: 2 warnings",
    ]


def test_nothing_found_is_exit_code_0(script: Path) -> None:
    script.write_text(RIGHT)
    done = check(script.parent, script.name)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "job.sh: nothing found")


def test_notes_alone_are_exit_code_0(script: Path) -> None:
    script.write_text("#!/bin/bash\n#SBATCH --time=90\nsrun python train.py\n")
    done = check(script.parent, script.name)
    assert (done.returncode, "job.sh: 1 note" in done.stdout) == (0, True)


def test_json_is_one_document(script: Path) -> None:
    done = check(script.parent, script.name, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 2
    assert [(one["code"], one["line"], one["can_fix"]) for one in document["findings"]] == [
        ("requeue-truncates-log", 2, True),
        ("fixed-port", 3, True),
    ]
    assert document["change"] is None
    assert document["not_checked"]


def test_fix_prints_the_change_keeps_the_mode_and_leaves_nothing(script: Path) -> None:
    script.chmod(0o750)
    done = check(script.parent, script.name, "--fix")
    assert done.returncode == 0
    assert "+#SBATCH --open-mode=append\n" in done.stdout
    assert "-export MASTER_PORT=29500\n" in done.stdout
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert script.read_text().endswith("srun python train.py --resume\n")
    assert [path.name for path in script.parent.iterdir()] == ["job.sh"]
    before = script.read_bytes()
    assert check(script.parent, script.name, "--fix").returncode == 0
    assert script.read_bytes() == before


def test_fix_repairs_the_file_that_a_link_names(script: Path) -> None:
    link = script.with_name("link.sh")
    link.symlink_to(script)
    assert check(script.parent, link.name, "--fix").returncode == 0
    assert link.is_symlink()
    assert "open-mode" in script.read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("no-such.sh",), "does not exist"),
        (("jib.sh",), "did you mean job.sh?"),
        ((".",), "is a directory"),
        (("empty.sh",), "is empty"),
        (("binary.sh",), "NUL"),
        (("job.sh", "--set", "resources.nodes=2"), "is a script; change the script"),
        (("job.yaml", "--fix"), "is a job file"),
        (("train.py",), "is a Python program; check the job file or the script that starts it"),
    ],
)
def test_a_file_that_cannot_be_checked_is_one_sentence(script: Path, words: tuple[str, ...], sentence: str) -> None:
    script.with_name("empty.sh").write_text("\n")
    script.with_name("binary.sh").write_bytes(b"#!/bin/bash\n\0")
    script.with_name("job.yaml").write_text(ONE_CPU)
    script.with_name("train.py").write_text("#!/usr/bin/env python\nprint(1)\n")
    done = check(script.parent, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr


def test_a_job_file_takes_overrides(script: Path) -> None:
    script.with_name("job.yaml").write_text(ONE_CPU)
    assert check(script.parent, "job.yaml").returncode == 2
    assert check(script.parent, "job.yaml", "--set", "resources.cpus_per_task=4").returncode == 0


def test_submit_prints_a_line_for_each_finding_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: a\nbatch: {global_batch_size: 2}\nresources: {tasks_per_node: 2}\n"
        "train: {model: resnet18, dataset: digits}\n"
    )
    done = hpcddp(tmp_path, "submit", "job.yaml", "--dry-run", "--cluster", "local")
    assert done.returncode == 0
    assert "check: job.yaml:2: error batch-norm-one-sample: " in done.stderr
    assert done.stdout.startswith("#!/bin/bash")


def test_submit_reads_the_comments_of_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: a\n# hpcddp: ignore batch-norm-one-sample\nbatch: {global_batch_size: 2}\n"
        "resources: {tasks_per_node: 2}\ntrain: {model: resnet18, dataset: digits}\n"
    )
    done = hpcddp(tmp_path, "submit", "job.yaml", "--dry-run", "--cluster", "local")
    assert (done.returncode, "check:" in done.stderr) == (0, False)


def test_the_batch_of_a_sweep_is_that_of_its_elements(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: a\nbatch: {global_batch_size: 2}\nresources: {tasks_per_node: 2}\n"
        "train: {model: resnet18, dataset: digits}\nsweep: {batch.global_batch_size: [32, 64]}\n"
    )
    done = hpcddp(tmp_path, "submit", "job.yaml", "--dry-run", "--cluster", "local")
    assert (done.returncode, "check:" in done.stderr) == (0, False)
