"""Every example of the help does what it says, on a real Slurm, in a directory that holds the files it names."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcddp.cli.main import app
from hpcddp.run.directory import RunDirectory
from scripts.command_pages import all_commands, examples_of
from tests.cluster.jobs import HPCDDP
from tests.cluster.sandbox import Sandbox
from tests.slurm_version import numbers, slurm_version

ROOT = Path(__file__).parents[2]
EXAMPLES = {example: words for words, command in all_commands(app) for example in examples_of(command)}
# What the commands share.
SHARED = (
    "hpcddp/cli/command_words.py",
    "hpcddp/cli/help.py",
    "hpcddp/cli/job_arguments.py",
    "hpcddp/cli/options.py",
    "tests/cluster/test_examples.py",
)

JOB = """\
name: my-job
batch: {global_batch_size: 256}
train: {model: "small:build", dataset: digits, epochs: 2}
launch: {rendezvous_timeout: 3min}
"""
SMALL = """\
import time
from torch import nn

class Small(nn.Sequential):
    pause_s = 0.0

    def forward(self, images):
        time.sleep(self.pause_s)
        return super().forward(images)

def build(num_classes, pause_s=0.0):
    small = Small(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, num_classes))
    small.pause_s = pause_s
    return small
"""
TRAIN = """\
import os

print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""
SCRIPT = """\
#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=1
#SBATCH --time=10
srun --cpus-per-task=1 python train.py
"""
LOSSES = """\
def dice_loss(outputs, targets):
    scores = outputs.softmax(1).gather(1, targets[:, None])
    return 1 - 2 * scores.sum() / (outputs.shape[0] + scores.sum())
"""
# The run that examples name, by whatever id. It has been stopped after its first epoch.
RUN_ID = "20260314-154412-ab12"
# What must be there before an example of a command.
_LIVE = "hpcddp submit job.yaml --set train.epochs=1000 --set checkpoint.keep=2 --set train.model_args.pause_s=0.2"
BEFORE = {
    "cancel": _LIVE,
    "shell": f"{_LIVE} && until ls runs/my-job/*/metrics.jsonl | grep -v {RUN_ID}; do sleep 0.2; done",
    "stacks": f"{_LIVE} && until ls runs/my-job/*/metrics.jsonl | grep -v {RUN_ID}; do sleep 0.2; done",
    "requeue": f"{_LIVE} && until ls runs/my-job/*/metrics.jsonl | grep -v {RUN_ID}; do sleep 0.2; done",
}
# A rehearsal needs a program that saves and resumes, and steps that leave time for a fault.
_LIGHT_PROGRAM = ROOT / "tests" / "rehearse" / "light_program.py"
FILES_BEFORE = {"rehearse": f"cp {_LIGHT_PROGRAM} train.py && sed -i s/pause_s=0.0/pause_s=0.1/ small.py"}
# A loss that is wrong on several ranks is what these look for.
FINDINGS = frozenset({"doctor", "doctor loss"})
# Slurm 22.05 lets a job wait that asks for more CPUs than a host of the sandbox has; newer ones refuse it.
TOO_LARGE = "CPU count per node can not be satisfied"


@dataclass(frozen=True, kw_only=True)
class Shell:
    """A shell in which the examples are typed.

    Attributes:
        directory: with their files.
        environment: with their Slurm.
    """

    directory: Path
    environment: dict[str, str]

    def type(self, line: str) -> tuple[int, str]:
        """Type a line, press Ctrl-C where it goes on for ever, and return its exit code and what it printed."""
        shell = subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            # A rehearsal is a dozen short runs, each of which imports torch.
            shown, _ = shell.communicate(timeout=5 if "--watch" in line else 600)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGINT)
            shown, _ = shell.communicate(timeout=30)
            assert "--watch" in line, shown
            assert shell.returncode in {-signal.SIGINT, 130}, shown
            return 0, shown
        return shell.returncode, shown


@pytest.fixture(scope="module")
def files(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the files that the examples name, and the run."""
    directory = tmp_path_factory.mktemp("shell")
    texts = {"job.yaml": JOB, "small.py": SMALL, "train.py": TRAIN, "losses.py": LOSSES, "train.sbatch": SCRIPT}
    for name, text in texts.items():
        (directory / name).write_text(text)
    shutil.copytree(ROOT / "jobs", directory / "jobs")
    sandbox.run(*HPCDDP, "submit", "job.yaml", "--follow", cwd=directory, timeout=240)
    (made,) = (directory / "runs" / "my-job").iterdir()
    run = RunDirectory(made.rename(made.with_name(RUN_ID)))
    result = json.loads(run.result.read_text())
    run.result.write_text(json.dumps({**result, "status": "stopped", "reason": "stopped", "exit_code": 75}))
    shutil.rmtree(max(path for path in run.checkpoints.iterdir() if path.is_dir()))
    return directory


@pytest.fixture
def shell(sandbox: Sandbox, files: Path, tmp_path: Path) -> Iterator[Shell]:
    directory = tmp_path / "shell"
    shutil.copytree(files, directory, symlinks=True)
    program = tmp_path / "bin" / "hpcddp"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m hpcddp "$@"\n')
    program.chmod(0o755)
    # Paths of sockets are short, pytest's temporary directories are not.
    state = Path(tempfile.mkdtemp(prefix="hpcddp-"))
    homes = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_STATE_HOME": str(state)}
    path = {"PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    shell = Shell(directory=directory, environment={**sandbox.environment, **homes, **path})
    yield shell
    shell.type("hpcddp sandbox down")
    shutil.rmtree(state, ignore_errors=True)


def file_of(words: Sequence[str]) -> str:
    """Return the file that defines a command and its help."""
    return f"hpcddp/cli/{words[0] if words else 'main'}.py"


def test_the_file_of_every_example_is_there() -> None:
    assert [words for words in EXAMPLES.values() if not (ROOT / file_of(words)).is_file()] == []
    assert [path for path in SHARED if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(
    ("example", "name"),
    [
        pytest.param(example, " ".join(words), marks=pytest.mark.depends_on(file_of(words), *SHARED))
        for example, words in EXAMPLES.items()
    ],
)
def test_example_does_what_it_says(shell: Shell, example: str, name: str) -> None:
    run_id = RUN_ID
    if name in FILES_BEFORE:
        assert shell.type(FILES_BEFORE[name]) == (0, "")
    if name in BEFORE:
        code, shown = shell.type(BEFORE[name])
        found = re.search(r"^run id +(\S+)", shown, re.MULTILINE)
        assert found is not None, shown
        run_id = found[1]
    code, shown = shell.type(re.sub(r"\b[0-9]{8}-[0-9]{4}[0-9a-f-]*", run_id, example))
    codes = {0}
    if name in FINDINGS:
        codes = {0, 1}
    elif name == "submit" and TOO_LARGE in shown and numbers(slurm_version() or "0") >= (24,):
        codes = {1}
    assert code in codes, shown
    assert "Traceback" not in shown
    assert shown or ">" in example
