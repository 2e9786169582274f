from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.script.launch import kind_of, launch_of
from hpcddp.script.parse import Script, ScriptError, parse_script, read_script
from hpcddp.script.shell import Command


def commands(text: str) -> list[Command]:
    return list(parse_script(text).commands)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("module load cuda/12", "module"),
        ("ml purge", "module"),
        ("source .venv/bin/activate", "activate"),
        (". /etc/profile", "activate"),
        ("conda activate x", "activate"),
        ('eval "$(conda shell.bash hook)"', "activate"),
        ("export A=1 B=2", "export"),
        ("A=1 B=2", "assignment"),
        ("set -euo pipefail", "set"),
        ("cd $HOME", "directory"),
        ('echo "hi"', "print"),
        ("trap 'x' USR1", "trap"),
        ("for h in a b; do echo; done", "control"),
        ("srun -n 4 python x.py", "srun"),
        ("exec srun python x.py", "srun"),
        ("time -p srun python x.py", "srun"),
        ("OMP_NUM_THREADS=1 torchrun x.py", "torchrun"),
        ("python -m torch.distributed.run x.py", "torchrun"),
        ("python3 -u -m torch.distributed.launch --nproc_per_node $N x.py", "torchrun"),
        ("accelerate launch --num_processes 4 x.py", "accelerate"),
        ("python -m accelerate.commands.launch x.py", "accelerate"),
        ("deepspeed --hostfile h x.py", "deepspeed"),
        ("mpirun -np 4 python x.py", "mpirun"),
        ("ibrun python x.py", "mpirun"),
        ("ssh $host 'cd x'", "ssh"),
        ("/opt/python3.11 -u x.py", "python"),
        ("env A=1 python x.py", "python"),
        ("env -u B A=1 python x.py", "python"),
        ("uv run train.py", "python"),
        ("./a.out", "other"),
        ("wait", "other"),
    ],
)
def test_a_command_has_a_kind(text: str, kind: str) -> None:
    assert kind_of(commands(text)[0]) == kind


def test_words_say_whether_the_shell_would_expand_them() -> None:
    (command,) = commands(
        """python a.py "$A" '$A' \\$A ${A:-"x y"} $(cmd "a b" ')') `id` x{1,2} {run_dir} *.py [ ~/x a~b "\\$A" $"""
    )
    assert [(word.text, word.expands) for word in command.words[2:]] == [
        ("$A", True),
        ("$A", False),
        ("$A", False),
        ('${A:-"x y"}', True),
        ("""$(cmd "a b" ')')""", True),
        ("`id`", True),
        ("x{1,2}", True),
        ("{run_dir}", False),
        ("*.py", True),
        ("[", False),
        ("~/x", True),
        ("a~b", False),
        ("$A", False),
        ("$", False),
    ]


def test_a_command_goes_on_over_lines() -> None:
    script = parse_script("#!/bin/sh\ntorchrun \\\n  --nnodes 2 \\\n  train.py  # a comment\necho\n")
    launch, echo = script.statements
    assert (launch.line, launch.last_line) == (2, 4)
    assert launch.text == "torchrun \\\n  --nnodes 2 \\\n  train.py"
    assert launch.command is not None
    assert launch.command.texts == ("torchrun", "--nnodes", "2", "train.py")
    assert (echo.line, echo.text) == (5, "echo")


def test_commands_of_one_line_are_statements_of_their_own_but_for_lists() -> None:
    script = parse_script("module purge; module load a && conda activate b\nx | tee log &\n")
    assert [statement.text for statement in script.statements] == [
        "module purge",
        "module load a && conda activate b",
        "x | tee log &",
    ]
    assert [statement.command is not None for statement in script.statements] == [True, False, False]
    assert [command.end for command in script.commands] == [";", "&&", "", "|", "&"]


COMPOUND = """
for h in $(scontrol show hostnames); do
    ssh $h "cd x && torchrun a.py" &
done
if [[ -n $X ]]; then python a.py; else
  srun python b.py
fi
function go() {
  cd x
}
stop() { kill $!; }
case $1 in
  a|b) echo a ;;
  (*) exit 1 ;;
esac
( cd x; make )
both() ( cd y )
while read -r line; do echo "$line"; done < hosts
"""


def test_compound_commands_are_one_statement_with_their_commands() -> None:
    script = parse_script(COMPOUND)
    assert [statement.compound for statement in script.statements] == [
        "for", "if", "function", "function", "case", "(", "function", "while",
    ]  # fmt: skip
    assert [command.texts[:2] for command in script.commands] == [
        ("for", "h"),
        ("ssh", "$h"),
        ("[[", "-n"),
        ("python", "a.py"),
        ("srun", "python"),
        ("cd", "x"),
        ("kill", "$!"),
        ("case", "$1"),
        ("echo", "a"),
        ("exit", "1"),
        ("cd", "x"),
        ("make",),
        ("cd", "y"),
        ("read", "-r"),
        ("echo", "$line"),
    ]


def test_a_here_document_belongs_to_its_statement() -> None:
    script = parse_script("cat <<'A' <<-B > x\nit's\nA\n\t(\n\tB\npython x.py\n")
    cat, python = script.statements
    assert cat.text == "cat <<'A' <<-B > x\nit's\nA\n\t(\n\tB"
    assert (cat.line, cat.last_line, python.line) == (1, 5, 6)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo a\necho 'b\n", "a ' does not close (line 2)"),
        ('echo "$(b\n', "a ( does not close (line 1)"),
        ("if true; then\n echo\n", "a if does not close (line 1)"),
        ("cat <<EOF\na\n", "a here-document does not end with EOF (line 1)"),
        (")\n", "a ) was not opened (line 1)"),
    ],
)
def test_what_does_not_close_is_the_problem_of_the_last_statement(text: str, problem: str) -> None:
    last = parse_script(text).statements[-1]
    assert last.problem == problem
    assert text.rstrip().endswith(last.text)


def test_srun_is_split_into_its_flags_and_its_program() -> None:
    (command,) = commands("srun -n 4 --cpu-bind=none -l --ntasks-per-node 2 -- python -u x.py -n 3\n")
    launch = launch_of(command)
    assert [(flag.name, flag.value) for flag in launch.srun] == [
        ("ntasks", "4"), ("cpu-bind", "none"), ("label", None), ("ntasks-per-node", "2"),
    ]  # fmt: skip
    assert [word.text for word in launch.words] == ["python", "-u", "x.py", "-n", "3"]


PIECES = st.sampled_from(
    ["a", " ", "\n", "'", '"', "\\", "$", "(", ")", "{", "}", "`", ";", "&", "|", "<", ">", "<<E\n", "E\n", "#", "if ",
     "then ", "fi", "for ", "do ", "done", "case ", "in ", "esac", "A=", "#SBATCH ", "--time=", "f()", "function "]
)  # fmt: skip


@given(st.lists(PIECES, max_size=25).map("".join))
def test_any_text_is_read_and_no_line_of_it_is_lost(text: str) -> None:
    script = parse_script(text)
    assert lost_lines(script) == []


def lost_lines(script: Script) -> list[str]:
    covered = {comment.line for comment in script.comments}
    for statement in script.statements:
        covered.update(range(statement.line, statement.last_line + 1))
    lost = [line for number, line in enumerate(script.lines, 1) if number not in covered]
    return [line for line in lost if line.strip(" \t\r\v\f\\;")]


@pytest.mark.parametrize(
    ("data", "fact"),
    [(b"", "is empty"), (b" \n", "is empty"), (b"\x7fELF\0", "NUL"), (b"#!/bin/sh\n\xe4", ":2: is not UTF-8")],
)
def test_a_file_that_is_no_script_is_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, fact: str) -> None:
    file = tmp_path_factory.mktemp("scripts") / "job.sh"
    file.write_bytes(data)
    with pytest.raises(ScriptError, match=fact):
        read_script(file)
