from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hpcddp.jobfile.slurm_flags import SBATCH
from hpcddp.script.directives import Flag
from hpcddp.script.parse import parse_script


def flags_of(*lines: str) -> list[tuple[str, str | None]]:
    return [(flag.name, flag.value) for flag in parse_script("#!/bin/bash\n" + "\n".join(lines)).flags]


# The options that "sbatch -vv" prints for each of them.
READ = [
    ("#SBATCH -N2", {"nodes": "2"}),
    ("#SBATCH -N 2", {"nodes": "2"}),
    ("#SBATCH --nodes=2", {"nodes": "2"}),
    ("#SBATCH --nodes 2", {"nodes": "2"}),
    ('#SBATCH --job-name="a b" -n 4', {"job-name": "a b", "ntasks": "4"}),
    ("#SBATCH -HN2", {"hold": "set", "nodes": "2"}),
    ("#SBATCH --cpus-per-t 3", {"cpus-per-task": "3"}),
    ("#SBATCH --nodes\n#SBATCH 2", {"nodes": "2"}),
    ("#SBATCH --nodes=2 # --ntasks=3", {"nodes": "2"}),
    ("#SBATCH --ntasks-per-node=4\n\n# text\n#SBATCH -c3", {"ntasks-per-node": "4", "cpus-per-task": "3"}),
    ("#SBATCH --nodes=2\necho\n#SBATCH --ntasks=3", {"nodes": "2"}),
    ("#SBATCH --nodes=2\n#SBATCH --nodes=3", {"nodes": "3"}),
]
REFUSED = [
    ("#SBATCH foo -N2", "has the word 'foo', which is no flag"),
    ("#SBATCH --exclusive user", "has the word 'user', which is no flag"),
    ("#SBATCH --nonsense=3", "has --nonsense, which is no flag"),
    ("#SBATCH --ntasks_per_node=3", "has --ntasks_per_node, which is no flag"),
    ("#SBATCH -y3", "has -y, which is no flag"),
    ("#SBATCH --hold=4", "gives --hold a value, and it takes none"),
    ("#SBATCH --nodes", "gives --nodes no value"),
    ('#SBATCH --comment="a', "has a quote that does not close"),
]


def sbatch(folder: Path, directives: str) -> str:
    """Return what sbatch says about a script. It parses its options before it asks a controller."""
    configuration = folder / "slurm.conf"
    configuration.write_text("ClusterName=none\nSlurmctldHost=127.0.0.1\nSlurmctldPort=1\nMessageTimeout=1\n")
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{directives}\n")
    answer = subprocess.run(
        ["sbatch", "-vv", "--test-only", str(script)],
        env={"SLURM_CONF": str(configuration), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stderr + answer.stdout


@pytest.mark.parametrize(("lines", "options"), READ)
def test_flags_are_read_as_getopt_reads_them(lines: str, options: dict[str, str]) -> None:
    read = {name: "set" if value is None else value for name, value in flags_of(lines)}
    assert read == options


@pytest.mark.slurm
@pytest.mark.parametrize(("lines", "options"), READ)
def test_the_real_sbatch_reads_the_same_flags(tmp_path: Path, lines: str, options: dict[str, str]) -> None:
    printed = dict(re.findall(r"^sbatch: ([a-z-]+) +: (.*)$", sbatch(tmp_path, lines), re.MULTILINE))
    del printed["test-only"], printed["verbose"]
    assert printed == options


@pytest.mark.parametrize(("line", "problem"), REFUSED)
def test_what_sbatch_refuses_is_a_problem_of_the_line(line: str, problem: str) -> None:
    (read,) = parse_script(f"#!/bin/bash\n{line}\n").directive_lines
    assert read.problem == problem


@pytest.mark.slurm
@pytest.mark.parametrize(("line", "problem"), REFUSED)
def test_the_real_sbatch_refuses_it(tmp_path: Path, line: str, problem: str) -> None:
    del problem
    assert "end of defined options" not in sbatch(tmp_path, line)


# Whether these may have a value has changed: get-user-env may until 24.11, requeue may since 26.05.
VARYING = {"get-user-env", "requeue"}


@pytest.mark.slurm
@pytest.mark.parametrize(
    "flag", sorted((SBATCH.without_value | SBATCH.with_optional_value | SBATCH.with_value) - VARYING)
)
def test_the_real_sbatch_knows_the_flag_and_whether_it_takes_a_value(tmp_path: Path, flag: str) -> None:
    said = sbatch(tmp_path, f"#SBATCH --{flag}")
    if "unrecognized option" in said:
        pytest.skip("this version of Slurm does not have the flag")
    assert ("requires an argument" in said) == (flag in SBATCH.with_value)
    said = sbatch(tmp_path, f"#SBATCH --{flag}=x")
    assert ("doesn't allow an argument" in said) == (flag in SBATCH.without_value)


def test_an_ambiguous_beginning_names_the_flags_that_it_could_be() -> None:
    (line,) = parse_script("#!/bin/sh\n#SBATCH --no 2\n").directive_lines
    assert line.problem is not None
    for flag in ("--no-kill", "--no-requeue", "--nodefile", "--nodelist", "--nodes"):
        assert flag in line.problem


def test_directives_after_the_first_command_are_ignored_and_still_read() -> None:
    script = parse_script("#!/bin/sh\n#SBATCH -N2\n\ncd /tmp\n#SBATCH --time=5 # five\n")
    assert script.first_command == 4
    assert script.flags == (Flag(line=2, name="nodes", value="2"),)
    ignored = script.directive_lines[1]
    assert ignored.is_ignored
    assert ignored.flags == (Flag(line=5, name="time", value="5"),)
    assert ignored.comment == "# five"


def test_a_here_document_holds_no_directives_of_the_script() -> None:
    script = parse_script("#!/bin/sh\n#SBATCH -N2\ncat > x.sh <<EOF\n#SBATCH -N3\nEOF\n#SBATCH -N4\n")
    assert [line.number for line in script.directive_lines] == [2, 6]


def test_the_components_of_a_heterogeneous_job_are_separated() -> None:
    assert flags_of("#SBATCH -N1", "#SBATCH hetjob", "#SBATCH -N2") == [
        ("nodes", "1"),
        ("hetjob", None),
        ("nodes", "2"),
    ]
