"""What a shell text or a script of a command calls is told before the job queues."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcddp.jobfile.read import load_job
from hpcddp.submission.checks import check_submittable
from hpcddp.submission.request import SubmissionError
from tests.messages import GoldenMessages
from tests.submission.requests import request_of

IN_A_BRANCH = 'if [ "$1" = local ]; then\n  srun python train.py\nfi\npython train.py\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("python", "bash", "env", "sbatch", "torchrun", "deepspeed"):
        (tmp_path / name).touch(mode=0o700)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def notes(*command: str, tasks: int = 2, nodes: int = 2, launcher: str | None = None) -> tuple[str, ...]:
    document = {
        "name": "a",
        "command": list(command),
        "resources": {"nodes": nodes, "tasks_per_node": tasks},
        "launcher": launcher,
    }
    spec = load_job(document).spec
    return check_submittable(request_of(spec, environment={"PATH": str(Path.cwd())}))


def refusal(*command: str, tasks: int = 2) -> str:
    with pytest.raises(SubmissionError) as refused:
        notes(*command, tasks=tasks)
    return refused.value.message


@pytest.mark.parametrize(
    ("script", "way_out"),
    [
        ("srun python train.py --lr 1\n", "then -- python train.py --lr 1, or add --overlap"),
        ("# srun\nset -e\nsrun --ntasks=4 -N 2 python train.py\n", "then -- python train.py"),
        ("export A=1\nOMP_NUM_THREADS=2 srun \\\n  --unbuffered python train.py\n", "then -- python train.py"),
        ("cd src; exec srun ./run\n", "then -- ./run"),
        ("salloc -N 2 ./run\n", "then -- ./run"),
    ],
)
def test_a_script_that_calls_srun_is_refused_with_the_line_to_type(
    golden: GoldenMessages, script: str, way_out: str
) -> None:
    Path("run.sh").write_text(f"#!/bin/bash\n{script}")
    assert way_out in golden.message(refusal("bash", "-e", "run.sh"))


@pytest.mark.parametrize(
    "command",
    [
        ("bash", "-c", "srun python train.py"),
        ("env", "A=1", "srun", "python", "train.py"),
        ("bash", "-lc", "module load x; srun python train.py"),
        ("bash", "-ce", "srun python train.py"),
        ("bash", "-eo", "pipefail", "-c", "srun python train.py"),
    ],
)
def test_srun_behind_env_and_in_a_shell_text_is_refused(command: tuple[str, ...], golden: GoldenMessages) -> None:
    assert "starts the tasks with srun itself" in golden.message(refusal(*command))


@pytest.mark.parametrize(
    "script",
    ["srun --overlap hostname\n", "# srun python train.py\npython train.py\n", "echo 'srun is not called'\n"],
)
def test_a_step_that_shares_and_words_that_are_no_commands_are_not_told(script: str) -> None:
    Path("run.sh").write_text(f"#!/bin/bash\n{script}")
    assert notes("bash", "run.sh") == ()


def test_a_branch_that_cannot_be_decided_gets_a_note(golden: GoldenMessages) -> None:
    Path("run.sh").write_text(IN_A_BRANCH)
    (note,) = notes("bash", "run.sh")
    assert "run.sh calls srun python train.py" in golden.message(note)


@pytest.mark.parametrize(
    "text",
    [
        "if true; then srun python train.py; fi",
        "f() { srun python train.py; }; f",
        "for i in 1 2; do srun python train.py; done",
        "[ -e x ] || srun python train.py",
        "if srun python train.py; then echo; fi",
    ],
)
def test_srun_in_a_statement_gets_a_note(text: str) -> None:
    (note,) = notes("bash", "-c", text)
    assert "calls srun python train.py" in note


def test_directives_that_are_ignored_are_listed(golden: GoldenMessages) -> None:
    Path("old.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH -t 2:00:00\n\npython train.py\n")
    (note,) = notes("bash", "old.sbatch")
    assert "ignored here: --nodes=4 -t 2:00:00" in golden.message(note)


@pytest.mark.parametrize("command", [("sbatch", "old.sbatch"), ("env", "A=1", "sbatch", "--wait", "old.sbatch")])
def test_sbatch_as_the_command_is_refused(command: tuple[str, ...], golden: GoldenMessages) -> None:
    assert "each of the 4 tasks would submit another job" in golden.message(refusal(*command))


@pytest.mark.parametrize(
    "script",
    [
        "torchrun --nnodes $SLURM_NNODES --nproc_per_node 2 --node_rank $SLURM_NODEID train.py\n",
        "python -m torch.distributed.run --nproc-per-node=gpu train.py\n",
        "accelerate launch train.py\n",
    ],
)
def test_a_launcher_for_the_ranks_of_a_node_needs_one_task_on_each(script: str, golden: GoldenMessages) -> None:
    Path("run.sh").write_text(f"#!/bin/bash\n{script}")
    (note,) = notes("bash", "run.sh")
    assert "add --set launcher=own" in golden.message(note)
    assert notes("bash", "run.sh", launcher="own") == ()
    assert notes("bash", "run.sh", tasks=1) == ()


@pytest.mark.parametrize(
    "command",
    [
        ("torchrun", "--node_rank", "--master_addr", "n1", "train.py"),
        ("torchrun", "--node-rank=", "train.py"),
        ("python", "train.py", "--machine_rank", ""),
        ("python", "train.py", "--node_rank"),
        ("python", "train.py", "--nnodes", "--node_rank", "1"),
    ],
)
def test_a_rank_that_the_shell_has_expanded_to_nothing_is_refused(
    command: tuple[str, ...], golden: GoldenMessages
) -> None:
    assert "in single quotes" in golden.message(refusal(*command))


def test_a_program_that_starts_its_ranks_is_one_task_on_each_node_with_all_that_the_node_has() -> None:
    resources = {"nodes": 2, "gpus_per_node": 4, "cpus_per_task": 6}
    document = {"name": "a", "command": ["python", "train.py"], "launcher": "own", "resources": resources}
    spec = load_job(document).spec
    assert (spec.tasks, spec.tasks_per_node, spec.world_size, spec.cpus_per_task) == (2, 1, 8, 24)
    assert load_job({**document, "resources": {**resources, "tasks_per_node": 1}}).spec.world_size == 8


def test_deepspeed_is_recognised() -> None:
    document = {"name": "a", "command": ["deepspeed", "train.py"], "resources": {"gpus_per_node": 4}}
    spec = load_job(document).spec
    assert (spec.tasks_per_node, spec.ranks_per_node) == (1, 4)


def test_a_script_that_is_a_pipe_or_large_is_not_read() -> None:
    os.mkfifo("pipe.sh")
    Path("large.sh").write_text("#!/bin/bash\nsrun x\n" + "# comment\n" * 50_000)
    assert notes("bash", "pipe.sh") == ()
    assert notes("bash", "large.sh") == ()


@pytest.mark.parametrize(
    ("command", "script", "fact"),
    [
        (("bash", "-e", "run.sh"), "#!/bin/bash\nif true; then\n  echo\n", "run.sh is not valid bash (line 3: "),
        (("bash", "-eo", "pipefail", "run.sh"), "fi\n", "run.sh is not valid bash (line 1: "),
        (("./run.sh",), "#!/bin/sh\nfi\n", "./run.sh is not valid bash (line 2: syntax error near unexpected token"),
        (("./run.sh",), "#!/usr/bin/env -S LANG=C bash -e\nfi\n", "./run.sh is not valid bash (line 2: "),
        (("./run.sh",), "#!/usr/bin/env -S nice -n 5 bash -e\nfi\n", "./run.sh is not valid bash (line 2: "),
        (("env", "-u", "A", "B=1", "bash", "run.sh"), "fi\n", "run.sh is not valid bash (line 1: "),
        (("/bin/nice", "-n", "5", "/bin/bash", "-c", "fi"), "", "the text of /bin/bash -c is not valid bash (line 1: "),
        (("./run.sh",), "#!/usr/bin/busybox sh\nfi\n", "./run.sh is not valid bash (line 2: "),
        (("bash", "run.sh"), 'exec > log\nexec "$@"\nexec ""\nfi\n', "run.sh is not valid bash (line 4: "),
        (("bash", "run.sh"), "cd . || exit 1\nif [ -d a ]; then\nexit 1\n", "run.sh is not valid bash (line 3: "),
        (("bash", "run.sh"), "cat <<END\nexit 0\nEND\necho 'a\n", "run.sh is not valid bash (line 4: "),
        (("bash", "-ce", 'echo "a'), "", "the text of bash -c is not valid bash (line 1: "),
    ],
)
def test_shell_text_with_a_syntax_error_is_refused(command: tuple[str, ...], script: str, fact: str) -> None:
    Path("run.sh").write_text(script)
    Path("run.sh").chmod(0o700)
    # The rest is in the words of this version of bash.
    assert refusal(*command).startswith(fact)


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (("bash", "run.sh"), "shopt -s extglob\nls !(a)\nexit 0\nif this is a note\n"),
        (("bash", "run.sh"), "exec > log\nexec ./train.py 1\nthis isn't shell\n"),
        (("bash", "run.sh"), "if !(test -d data) then\n  echo\nfi\n"),
        (("bash", "run.sh"), "(( n = 1 << 2 ))\ntrue; exit $?\nthis isn't shell\n"),
        (("bash", "run.sh"), "x=$(ls # it's here\n)\nexit 0\nthis isn't shell\n"),
        (("zsh", "run.sh"), "for i (1 2) echo $i\n"),
        (("./run.sh",), "#!/data/bash/bin/python3\nprint('it is no shell' if 1 else 0)\n"),
        (("bash", "-c", "f() { echo {run_dir}; }; f"), ""),
    ],
)
def test_shell_text_that_bash_does_not_read_is_accepted(command: tuple[str, ...], script: str) -> None:
    Path("run.sh").write_text(script)
    Path("run.sh").chmod(0o700)
    Path("zsh").touch(mode=0o700)
    assert notes(*command) == ()
