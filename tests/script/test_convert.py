from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpcddp.errors import UserError
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.resources import FIELDS_WRITTEN_UNCHANGED
from hpcddp.script.convert import Conversion, ConversionError, convert
from hpcddp.script.parse import Script, parse_script
from hpcddp.script.request import Row
from hpcddp.slurm.directives import directives_for
from tests.script.published import SCRIPTS

ENVIRONMENT = {"HOME": "/home/me"}


def made_from(text: str, name: str = "job") -> Conversion:
    return convert(parse_script(text), name=name, environment=ENVIRONMENT)


def job_with(*lines: str) -> Conversion:
    return made_from("\n".join(["#!/bin/bash", *lines, "srun python train.py", ""]))


def rows_of(conversion: Conversion, outcome: str) -> list[str]:
    return [row.text for row in conversion.rows if row.outcome == outcome]


def to_do_of(conversion: Conversion) -> str:
    """Return why one part of a script is left to the user."""
    (row,) = (row for row in conversion.rows if row.outcome == "to do")
    return row.reason


def row_of(conversion: Conversion, text: str) -> Row:
    (row,) = (row for row in conversion.rows if row.text == text)
    return row


@pytest.mark.parametrize("file", SCRIPTS, ids=[file.stem for file in SCRIPTS])
def test_the_job_file_and_the_table_are_as_a_person_last_read_them(file: Path, request: pytest.FixtureRequest) -> None:
    conversion = made_from(file.read_text(), file.stem)
    table = [f"{row.line}: {row.outcome}: {' '.join(row.text.split())} -> {row.reason}" for row in conversion.rows]
    text = "\n".join([conversion.text, *table, ""])
    golden = file.with_suffix(".txt")
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("file", SCRIPTS, ids=[file.stem for file in SCRIPTS])
def test_no_line_of_a_script_is_dropped_without_a_row(file: Path) -> None:
    script = parse_script(file.read_text())
    assert lines_without_row(script, made_from(file.read_text())) == []


def lines_without_row(script: Script, conversion: Conversion) -> list[int]:
    """Return the lines with a directive or a command that no row is about."""
    told = {row.line for row in conversion.rows}
    needed = {line.number for line in script.directive_lines}
    needed |= {statement.line for statement in script.statements if not statement.commands}
    for statement in script.statements:
        # One row may be about a whole loop, condition or function.
        if statement.line not in told:
            needed |= {command.line for command in statement.commands}
    return sorted(needed - told)


@pytest.mark.parametrize("file", SCRIPTS, ids=[file.stem for file in SCRIPTS])
def test_each_flag_of_a_script_has_a_row(file: Path) -> None:
    assert flags_without_row(file.read_text()) == []


def flags_without_row(text: str) -> list[str]:
    """Return the flags of sbatch in a script that no row is about."""
    told = {(row.line, row.text) for row in made_from(text).rows}
    return [
        flag.name
        for flag in parse_script(text).flags
        if not any(line == flag.line and flag.name.removeprefix("n") in shown for line, shown in told)
    ]


@pytest.mark.parametrize("file", SCRIPTS, ids=[file.stem for file in SCRIPTS])
def test_the_text_is_a_job_file_of_the_same_job(file: Path, tmp_path: Path) -> None:
    conversion = made_from(file.read_text(), file.stem)
    job_file = tmp_path / "job.yaml"
    job_file.write_text(conversion.text)
    assert load_job(job_file).spec == conversion.job.spec


def test_a_flag_that_is_given_twice_counts_once_and_mail_types_add_up() -> None:
    conversion = job_with("#SBATCH -N2", "#SBATCH --mail-type=BEGIN", "#SBATCH --mail-type=END", "#SBATCH -N3")
    assert conversion.job.spec.resources.nodes == 3
    assert conversion.job.spec.resources.mail_type == "BEGIN,END"
    assert row_of(conversion, "--nodes=2").outcome == "dropped"


@pytest.mark.parametrize(
    ("lines", "numbers"),
    [
        (["#SBATCH --ntasks-per-node=4 --gres=gpu:4 -c 8"], (1, 4, 4, 8)),
        (["#SBATCH -N2 -n8 -c2"], (2, 0, 4, 2)),
        (["#SBATCH -n6 --ntasks-per-node=3"], (2, 0, 3, 1)),
        (["#SBATCH -N2 --gpus=8 --ntasks-per-node=4"], (2, 4, 4, 1)),
        (["#SBATCH -N2 --gpus-per-task=1 --ntasks-per-node=4 --cpus-per-gpu=6"], (2, 4, 4, 6)),
        (["#SBATCH --gres=gpu:v100 --ntasks=1"], (1, 1, 1, 1)),
        (["#SBATCH --gres=nvme:100,gpu:2 --ntasks-per-node=2"], (1, 2, 2, 1)),
        # One task with all GPUs of its node starts its ranks itself.
        (["#SBATCH -N2 --ntasks-per-node=1 --gpus-per-node=4 -c 32"], (2, 4, 1, 32)),
    ],
)
def test_numbers_are_taken_whatever_states_them(lines: list[str], numbers: tuple[int, int, int, int]) -> None:
    spec = job_with(*lines).job.spec
    assert (spec.resources.nodes, spec.resources.gpus_per_node, spec.tasks_per_node, spec.cpus_per_task) == numbers


@pytest.mark.parametrize(
    ("flags", "gpu_request"),
    [
        ("--gpus-per-node=a100:4", "gpus-per-node"),
        ("--gpus-per-node=4 --gres=nvme:100", "gpus-per-node"),
        ("--gres=gpu:4", "gres"),
        ("--gpus-per-task=1 --ntasks-per-node=4", "gres"),
        ("--nodes=2 --ntasks=8\nsrun --gpus-per-task=h100:1 ./a", "none"),
        ("--gpus=8 --nodes=2\nsrun --gpus-per-task=1 -n 8 ./a", "gres"),
    ],
)
def test_gpus_are_requested_as_the_script_does(flags: str, gpu_request: str) -> None:
    resources = job_with(f"#SBATCH {flags}").job.spec.resources
    assert (resources.gpus_per_node, resources.gpu_request) == (4, gpu_request)


@pytest.mark.parametrize(
    ("flags", "launch", "kept"),
    [
        ("-N2 --ntasks-per-node=4 --gpus-per-task=1", "srun ./a", {"gpus-per-task": "1"}),
        ("-n 4 -N1 --gpus-per-task=h100:1", "srun ./a", {"gpus-per-task": "h100:1"}),
        ("-n 4 -N1 --gpus-per-task=1", "srun --gpus-per-task=h100:1 ./a", {"gpus-per-task": "h100:1"}),
        # Each of these starts its ranks itself, with all GPUs.
        ("-N2 --ntasks-per-node=1 --gpus-per-task=4", "srun torchrun ./a.py", {}),
        ("-n 4 -N1 --gpus-per-task=1", "mpirun ./a", {}),
    ],
)
def test_srun_gives_each_task_the_gpus_that_sbatch_is_asked_for(
    flags: str, launch: str, kept: dict[str, object]
) -> None:
    resources = made_from(f"#!/bin/bash\n#SBATCH {flags}\n{launch}\n").job.spec.resources
    assert (resources.gpus_per_node, resources.srun) == (4, kept)


def test_cpus_that_the_script_does_not_state_are_left_out() -> None:
    assert "cpus_per_task" not in job_with("#SBATCH --ntasks-per-node=4 --gres=gpu:4").text
    assert "cpus_per_task: 1\n" in job_with("#SBATCH --ntasks-per-node=4 --gres=gpu:4 -c1").text


@pytest.mark.parametrize("nodes", ["2-4", "1-4"])
def test_a_range_of_nodes_is_taken(nodes: str) -> None:
    conversion = job_with(f"#SBATCH --nodes={nodes}", "#SBATCH --ntasks-per-node=2")
    row = row_of(conversion, f"--nodes={nodes}")
    assert (str(conversion.job.spec.resources.nodes), row.outcome, row.reason) == (nodes, "taken", "resources.nodes")


@pytest.mark.parametrize(
    ("lines", "nodes", "reason"),
    [
        (["--nodes=2-8:2"], "1", "resources.nodes is '2-8:2'"),
        (["--nodes=2,4"], "1", "resources.nodes is '2,4'"),
        (["--nodes=1-100"], "1", "a range has at most 64 numbers"),
        (["--ntasks=8", "--nodes=2-4"], "2-4", "a number for all nodes, and the job file has 4 ranks on a node"),
        (["--gpus=8", "--nodes=2-4"], "2-4", "a number for all nodes, and the job file has 4 ranks on a node"),
    ],
)
def test_nodes_that_the_job_file_cannot_express_are_to_do(lines: list[str], nodes: str, reason: str) -> None:
    conversion = job_with(*(f"#SBATCH {line}" for line in lines))
    row = row_of(conversion, lines[0])
    assert (str(conversion.job.spec.resources.nodes), row.outcome) == (nodes, "to do")
    assert reason in row.reason


def test_tasks_that_do_not_divide_over_the_nodes_have_one_row() -> None:
    assert row_of(job_with("#SBATCH --nodes=2", "#SBATCH --ntasks=5"), "--ntasks=5").outcome == "to do"


# Of each type that a field may have, in the spelling of the job file.
CANDIDATES = ("a", "010", "4G", "END,FAIL", "01:30:00", "user", 2, True)


@pytest.mark.parametrize("name", FIELDS_WRITTEN_UNCHANGED.values())
def test_a_value_that_a_field_accepts_comes_back_from_the_directive_that_it_makes(name: str) -> None:
    accepted = [job for value in CANDIDATES if (job := job_with_field(name, value)) is not None]
    assert accepted
    for job in accepted:
        (directive,) = (
            directive for directive in directives_for(job, run_id=None) if directive.field == f"resources.{name}"
        )
        converted = job_with("#SBATCH --gpus-per-node=1", f"#SBATCH {directive}").job.spec
        assert getattr(converted.resources, name) == getattr(job.resources, name)


def job_with_field(name: str, value: object) -> JobSpec | None:
    """Return a job with a GPU and a value of a field of ``resources``; None if the field does not accept the value."""
    job = {"name": "job", "command": ["true"], "resources": {"gpus_per_node": 1, name: value}}
    try:
        return load_job(job).spec
    except JobFileError:
        return None


def test_without_srun_the_program_is_one_task_with_the_cpus_of_all() -> None:
    conversion = made_from("#!/bin/bash\n#SBATCH --ntasks=4 --nodes=1 -c 2\npython train.py\n")
    assert (conversion.job.spec.tasks, conversion.job.spec.cpus_per_task) == (1, 8)


def test_without_srun_on_several_nodes_the_table_says_what_is_different() -> None:
    conversion = made_from("#!/bin/bash\n#SBATCH --nodes=2\npython train.py\n")
    assert any("first node alone" in row.reason for row in conversion.rows if row.outcome == "to do")


def test_a_value_that_no_field_can_have_is_left_open_with_the_reason() -> None:
    conversion = job_with("#SBATCH --mail-type=START,END", "#SBATCH --time=soon")
    assert row_of(conversion, "--mail-type=START,END").outcome == "to do"
    assert "no type of mail 'START'" in row_of(conversion, "--mail-type=START,END").reason
    assert "resources.time_limit" in row_of(conversion, "--time=soon").reason
    assert conversion.job.spec.resources.time_limit is None


def test_a_container_without_an_image_is_left_open() -> None:
    conversion = made_from("#!/bin/bash\nsrun --container-mounts=/a --container-workdir=/a python train.py\n")
    assert conversion.job.spec.environment.container is None
    assert "environment.container.image is missing" in row_of(conversion, "srun --container-mounts=/a").reason


def test_directives_behind_the_first_command_are_left_open() -> None:
    conversion = made_from("#!/bin/bash\nset -e\n#SBATCH --nodes=8\nsrun python train.py\n")
    row = row_of(conversion, "#SBATCH --nodes=8")
    assert (row.outcome, conversion.job.spec.resources.nodes) == ("to do", 1)
    assert "after the first command (line 2)" in row.reason


def test_a_variable_of_the_command_is_expanded_by_a_shell_in_the_task() -> None:
    conversion = made_from('#!/bin/bash\nLR=0.1\nN=$(count)\nsource more.sh\nsrun python train.py --lr $LR "$N $M"\n')
    assert conversion.job.spec.command == ("bash", "-c", 'exec python train.py --lr $LR "$N $M"')
    assert conversion.job.spec.environment.setup == ("set -a", "LR=0.1", "N=$(count)", "source more.sh")


def test_an_array_in_the_command_is_to_do() -> None:
    conversion = made_from("#!/bin/bash\nX=(a 'b c')\nsrun python t.py \"${X[@]}\"\n")
    assert "an array does not reach the tasks" in to_do_of(conversion)


def test_a_program_in_a_variable_that_is_not_known_runs_in_a_shell() -> None:
    conversion = made_from('#!/bin/bash\nCMD=$(make_command)\nsrun bash -c "$CMD"\n')
    assert conversion.job.spec.command == ("bash", "-c", 'exec bash -c "$CMD"')
    assert conversion.job.spec.environment.setup == ("set -a", "CMD=$(make_command)")


def test_the_input_of_a_program_is_to_do() -> None:
    conversion = made_from("#!/bin/bash\nsrun ./x < input >log\n")
    assert to_do_of(conversion).partition(":")[0] == "the standard input of a task is empty"


def test_a_program_may_have_an_option_c_of_its_own() -> None:
    conversion = made_from("#!/bin/bash\npython --version\npython train.py -c fast.yaml\n")
    assert conversion.job.spec.command == ("python", "train.py", "-c", "fast.yaml")


@pytest.mark.parametrize(
    ("launch", "command"),
    [
        ('srun bash -c "$LAUNCHER train.py"', ("bash", "-c", 'exec bash -c "$LAUNCHER train.py"')),
        ("srun $LAUNCHER train.py", ("bash", "-c", "exec $LAUNCHER train.py")),
        ("srun torchrun --tee $TEE train.py", ("bash", "-c", "exec torchrun --tee $TEE train.py")),
        ("srun bash -c 'torchrun --tee $TEE train.py'", ("bash", "-c", "torchrun --tee $TEE train.py")),
    ],
)
def test_a_launcher_that_a_shell_has_to_expand_starts_the_ranks_itself(launch: str, command: tuple[str, ...]) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:2\nLAUNCHER=$(launcher) TEE=3\n{launch}\n"
    spec = made_from(text).job.spec
    assert (spec.command, spec.launcher, spec.tasks_per_node, spec.ranks_per_node) == (command, "own", 1, 2)
    assert spec.environment.setup == ("set -a", "LAUNCHER=$(launcher) TEE=3")


def test_the_other_lines_in_front_of_the_program_are_kept_as_they_are_in_their_order() -> None:
    lines = (
        "export ROOT=/opt",
        "source $ROOT/env.sh",
        ': "${DATA:?name the data in DATA}"',
        "f() {\n  echo 'x'; }",
        "trap f EXIT",
        "date >>log",
        "[ -d out ] || mkdir out",
    )
    assert job_with(*lines).job.spec.environment.setup == lines
    assert made_from("#!/bin/bash\nE=$(x)\nconda activate $E\n./a\n").job.spec.environment.conda is None


def test_words_that_a_shell_expands_get_a_shell_in_the_task() -> None:
    conversion = made_from("#!/bin/bash\nsrun python train.py --out $SLURM_JOB_ID 'a b'\n")
    assert conversion.job.spec.command == ("bash", "-c", "exec python train.py --out $SLURM_JOB_ID 'a b'")
    launched = made_from("#!/bin/bash\n#SBATCH --gres=gpu:2\nsrun torchrun --nnodes=1 -m app.train ~/x\n")
    assert launched.job.spec.command == ("torchrun", "--no-python", "bash", "-c", "exec python -u -m app.train ~/x")
    assert launched.job.spec.launcher_command is not None


def test_a_loop_or_a_condition_around_the_program_is_left_open() -> None:
    text = "#!/bin/bash\nX=1\nif [ -d /data ]; then X=2; fi\nfor s in 1 2; do srun python t.py $s $X; done\n"
    conversion = made_from(text)
    assert rows_of(conversion, "to do") == ["for s in 1 2; do srun python t.py $s $X; done"]
    assert conversion.job.spec.environment.setup == ("set -a", "X=1", "if [ -d /data ]; then X=2; fi")


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"])
def test_a_secret_is_passed_and_not_written(name: str) -> None:
    conversion = job_with(f"export {name}=hunter2")
    assert conversion.job.spec.environment.pass_env == (name,)
    assert "hunter2" not in conversion.text
    assert not any("hunter2" in f"{row.text}{row.reason}" for row in conversion.rows)


@pytest.mark.parametrize(
    ("lines", "passed"),
    [
        ("WANDB_API_KEY=hunter2 srun python train.py", ("WANDB_API_KEY",)),
        ("export A=1 HF_TOKEN='hunter2' B=$A\nsrun python train.py", ("HF_TOKEN",)),
        ("HF_TOKEN=hunter2\nsrun python train.py", ("HF_TOKEN",)),
        ("if true; then export HF_TOKEN=hunter2; fi\nsrun python train.py", ()),
    ],
)
def test_a_secret_is_written_nowhere(lines: str, passed: tuple[str, ...]) -> None:
    conversion = made_from(f"#!/bin/bash\n{lines}\n")
    assert conversion.job.spec.environment.pass_env == passed
    assert "hunter2" not in conversion.text
    assert not any("hunter2" in f"{row.text}{row.reason}" for row in conversion.rows)


def test_an_assignment_in_front_of_the_program_is_exported_to_the_tasks() -> None:
    assert made_from("#!/bin/bash\nSEED=3 srun python train.py\n").job.spec.environment.setup == ("export SEED=3",)


def test_a_line_for_another_scheduler_is_to_do() -> None:
    assert rows_of(job_with("#PBS -l nodes=2", "# PBS", "#SLURM --nodes=2"), "to do") == [
        "#PBS -l nodes=2", "#SLURM --nodes=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("starter", "setup", "to_do"),
    [
        ("env SEED=1", ("export SEED=1",), []),
        ("timeout 23h", (), ["timeout 23h"]),
        ("nice -n 5", (), ["nice -n 5"]),
    ],
)
def test_srun_is_found_behind_the_program_that_starts_it(
    starter: str, setup: tuple[str, ...], to_do: list[str]
) -> None:
    conversion = made_from(f"#!/bin/bash\n#SBATCH -n 2\n{starter} srun python t.py\n")
    spec = conversion.job.spec
    assert (spec.command, spec.tasks, spec.environment.setup) == (("python", "t.py"), 2, setup)
    assert [text for text in rows_of(conversion, "to do") if text != "--ntasks=2"] == to_do


@pytest.mark.parametrize(
    "launcher",
    ["ibrun", "ibrun -n 2 -o 0 task_affinity", "mpirun -np 2 --map-by ppr:1:node -mca btl tcp", "mpiexec -genv A 1"],
)
def test_the_tasks_of_an_mpi_launcher_are_those_of_srun(launcher: str) -> None:
    conversion = made_from(f"#!/bin/bash\n#SBATCH -N 2 -n 2\n{launcher} python t.py\n")
    assert conversion.job.spec.command == ("python", "t.py")
    assert rows_of(conversion, "to do") == []


def test_a_script_that_submits_itself_again_does_not_from_its_job() -> None:
    assert rows_of(job_with("sbatch --dependency=afterany:$SLURM_JOB_ID $0"), "dropped")


def test_another_directory_is_that_of_the_program_and_of_later_setup_lines() -> None:
    conversion = made_from("#!/bin/bash\ncd /project\nsource env.sh\nsrun python train.py\n")
    assert conversion.job.spec.command == ("env", "-C", "/project", "python", "train.py")
    assert conversion.job.spec.environment.setup == ("cd /project", "source env.sh")
    launched = made_from("#!/bin/bash\ncd $SCRATCH/x\nsrun torchrun train.py\n")
    assert launched.job.spec.command == (
        "torchrun", "--no-python", "bash", "-c", 'cd "$PROGRAM_DIRECTORY" && exec python -u train.py',
    )  # fmt: skip
    assert launched.job.spec.environment.setup[-2:] == ("cd $SCRATCH/x", "export PROGRAM_DIRECTORY=$PWD")
    assert made_from("#!/bin/bash\ncd $PWD\nsrun ./a\n").job.spec.command == ("./a",)
    assert made_from("#!/bin/bash\n#SBATCH -D /project\nsrun python t.py\n").job.spec.command == (
        "env", "-C", "/project", "python", "t.py",
    )  # fmt: skip


def test_the_directory_of_sbatch_is_that_of_the_program_and_of_the_setup_lines() -> None:
    conversion = made_from("#!/bin/bash\n#SBATCH --chdir=/project\nsource env.sh\nsrun python t.py\n")
    assert conversion.job.spec.command == ("env", "-C", "/project", "python", "t.py")
    assert conversion.job.spec.environment.setup == ("cd /project", "source env.sh")
    rows = [(row.outcome, row.reason) for row in conversion.rows if row.text == "--chdir=/project"]
    assert rows == [("setup line", "environment.setup; a line changes the directory")]


@pytest.mark.parametrize(
    ("lines", "command", "setup"),
    [
        (["make", "cd /other"], ("env", "-C", "/other"), ("cd /project", "make", "cd /other")),
        (["cd $SLURM_SUBMIT_DIR", "make"], (), ("cd /project", "cd $SLURM_SUBMIT_DIR", "make")),
        (["cd ."], ("env", "-C", "/project"), ("cd /project", "cd .")),
        (["source env/bin/activate"], ("env", "-C", "/project"), ("cd /project", "source env/bin/activate")),
    ],
)
def test_a_directory_that_the_script_names_is_that_of_the_program(
    lines: list[str], command: tuple[str, ...], setup: tuple[str, ...]
) -> None:
    job = job_with("#SBATCH --chdir=/project", *lines).job.spec
    assert (job.command, job.environment.setup) == ((*command, "python", "train.py"), setup)


@pytest.mark.parametrize("line", ["cd sub", "cd $DATA || exit", "if [ -d sub ]; then cd sub; fi", "cd"])
def test_the_program_starts_in_the_directory_where_the_setup_lines_end(line: str) -> None:
    job = job_with("#SBATCH --chdir=/project", line).job.spec
    assert job.command == ("bash", "-c", 'cd "$PROGRAM_DIRECTORY" && exec python train.py')
    assert job.environment.setup == ("set -a", "cd /project", line, "export PROGRAM_DIRECTORY=$PWD")


@pytest.mark.parametrize(("directory", "line"), [("sub", "cd sub"), ("$DATA", 'cd "$DATA"')])
def test_the_directory_of_srun_is_a_setup_line(directory: str, line: str) -> None:
    conversion = made_from(f"#!/bin/bash\ncd /project\nsrun --chdir={directory} python t.py\n")
    setup = ("set -a", "cd /project", line, "export PROGRAM_DIRECTORY=$PWD")
    assert conversion.job.spec.environment.setup == setup
    assert row_of(conversion, f"srun --chdir={directory}").outcome == "setup line"


@pytest.mark.parametrize(
    ("flags", "outcomes", "variables", "kept"),
    [
        ("--export=ALL,SEED=3", ["dropped", "taken"], {"SEED": "3"}, {}),
        ("--cpu-bind=cores -W 60 -l", ["taken", "dropped", "dropped"], {}, {"cpu-bind": "cores"}),
        ("--network=x --hint=y --exact", ["taken"] * 3, {}, {"network": "x", "hint": "y", "exact": True}),
        ("--mpi=$M --export=ALL,A=$B -C a100", ["to do"] * 3, {}, {}),
        ("--gpus-per-task=2 -n 2", ["to do", "dropped"], {}, {}),
    ],
)
def test_each_flag_of_srun_has_a_row(
    flags: str, outcomes: list[str], variables: dict[str, str], kept: dict[str, object]
) -> None:
    conversion = made_from(f"#!/bin/bash\nsrun {flags} ./a\n")
    assert [
        row.outcome for row in conversion.rows if not row.text.startswith("srun -") or "./a" not in row.text
    ] == outcomes
    assert conversion.job.spec.environment.env == variables
    assert conversion.job.spec.resources.srun == kept


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        (["M=0x1,0x2"], "v,mask_cpu:0x1,0x2"),
        (['export M="0x1,0x2"'], "v,mask_cpu:0x1,0x2"),
        (["M=0x1", "M=0x2"], None),
        (["M=0x1", "[ -e x ] && M=0x2"], None),
        (["# M=0x1"], None),
        (["M=0x1", "M+=,0x2"], None),
        (["M=$(masks)"], None),
        ([], None),
    ],
)
def test_a_value_that_the_script_assigns_once_is_that_of_a_flag_of_srun(lines: list[str], value: str | None) -> None:
    for variable in ("$M", "${M}"):
        conversion = made_from("\n".join(["#!/bin/bash", *lines, f"srun --cpu-bind=v,mask_cpu:{variable} ./a", ""]))
        assert conversion.job.spec.resources.srun.get("cpu-bind") == value


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("#SBATCH --ntasks-per-node=x", "--ntasks-per-node=x"),
        ("#SBATCH --ntasks=$N", "--ntasks=$N"),
        ("#SBATCH --cpus-per-task=all", "--cpus-per-task=all"),
        ("srun -n python a.py", "srun --ntasks=python"),
        ("srun -N python a.py", "srun --nodes=python"),
    ],
)
def test_a_flag_without_its_number_is_to_do(line: str, text: str) -> None:
    assert rows_of(made_from(f"#!/bin/bash\n{line}\nsrun python train.py\n"), "to do")[0] == text


@pytest.mark.parametrize("value", ['"--mpi=none --cpu-bind=cores"', '" \\\n --wait=60 \\\n"', "(--mpi=none)"])
def test_a_variable_with_flags_of_srun_is_to_do(value: str) -> None:
    row = row_of(made_from(f"#!/bin/bash\nFLAGS={value}\nsrun $FLAGS -l python3 train.py\n"), "$FLAGS")
    assert (row.outcome, row.reason.partition(":")[0]) == ("to do", "it holds flags, and no program")


@pytest.mark.parametrize("value", ["${M[0]}", "${M:-cores}", "${M%,*}", "${#M}", "`masks`"])
def test_what_a_shell_makes_of_a_variable_is_to_do(value: str) -> None:
    conversion = made_from(f"#!/bin/bash\nM=0x1\nsrun --cpu-bind=mask_cpu:{value} ./a\n")
    assert conversion.job.spec.resources.srun == {}
    assert row_of(conversion, f"srun --cpu-bind=mask_cpu:{value}").outcome == "to do"


def test_environments_are_fields_unless_a_setup_line_comes_first() -> None:
    environment = job_with("module load cuda", "ml load gcc", "source $HOME/env/bin/activate").job.spec.environment
    assert (environment.modules, environment.venv, environment.setup) == (("cuda", "gcc"), "/home/me/env", ())
    environment = job_with("module purge", "module load cuda", "conda activate x").job.spec.environment
    assert environment.setup == ("module purge", "module load cuda", "conda activate x")


def test_a_word_that_is_no_flag_is_shown_as_it_stands_there() -> None:
    conversion = made_from('#!/bin/bash\n#SBATCH --job-name= "two words"\nsrun python x.py\n')
    assert row_of(conversion, "two words").outcome == "to do"


@pytest.mark.parametrize("pipe", ["|", "2>&1 |", "|&"])
def test_a_copy_of_the_output_into_a_file_is_not_needed(pipe: str) -> None:
    conversion = made_from(f"#!/bin/bash\nsrun python x.py {pipe} tee x.log\n")
    assert row_of(conversion, "tee x.log").reason == "each rank has a log of its own"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("#!/bin/bash\n#SBATCH -N2\necho hi\n", "no line starts a program"),
        ("#!/bin/bash\nfor h in a b; do ssh $h 'torchrun x.py' & done\nwait\n", "no line starts a program.*not ssh"),
        ("#!/bin/bash\nf() {\n srun ./a\n}\nf\n", "line 3 starts the program in a function of the shell"),
        ("#!/bin/bash\n#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N2\nsrun ./a\n", "a heterogeneous job"),
        ("#!/bin/bash\npython -c 'import x'\n", "line 2 gives Python its code in the script itself.*python FILE.py"),
        ("#!/bin/bash\nsrun python3 -u - <<E\nimport x\nE\n", "line 2 gives Python its code in the script itself"),
        ("#!/bin/bash\necho\nuv run python -c 'import x'\n", "line 3 gives Python its code in the script itself"),
        ("#!/bin/bash\r\n#SBATCH -N2\r\nsrun python x.py\r\n", "as on Windows.*check --fix"),
        ("\ufeff#!/bin/bash\n#SBATCH -N2\nsrun python x.py\n", "byte order mark.*check --fix"),
        ("#SBATCH -N2\nsrun python x.py\n", "#!/bin/bash"),
        ((Path(__file__).parents[1] / "golden" / "quickstart-by-hand.sh").read_text(), "hpcddp wrote this script"),
    ],
)
def test_a_script_that_cannot_become_a_job_is_refused(text: str, fact: str) -> None:
    with pytest.raises(ConversionError, match=fact):
        made_from(text)


LINES = st.sampled_from(
    ["#SBATCH -N2", "#SBATCH --gres=gpu:4", "#SBATCH --time=x", "#SBATCH --image=a", "#SBATCH -n 3", "#SBATCH --mem=1",
     "#SBATCH --nodes", "#SBATCH hetjob", "#SBATCH --exclusive=user", "#SBATCH --signal=B:10@x", "export A='x y'",
     "B=$(date)", "C=($B 1)", "cd $A", "if true; then", "fi", "for i in 1 2; do", "done", "f() {", "}", "f",
     "srun python x.py $A", "torchrun --nnodes", "accelerate launch", "ssh h 'torchrun x.py'", "bash -c", "mpirun -np",
     "cat <<E", "E", "echo 'a", "module load", "conda activate", "export HPCDDP_X=1", "exec ./a", "python y.py ${A:-b}"]
)  # fmt: skip


@example(["#SBATCH --image=a", "#SBATCH --image=a", "srun python x.py"])
@example(["cd $A", "accelerate launch"])
@given(st.lists(LINES, max_size=12))
def test_any_script_becomes_a_job_with_a_row_for_every_line_or_is_refused(lines: list[str]) -> None:
    text = "\n".join(["#!/bin/bash", *lines, ""])
    try:
        conversion = made_from(text)
    except UserError:
        return
    assert lines_without_row(parse_script(text), conversion) == []
    assert flags_without_row(text) == []
