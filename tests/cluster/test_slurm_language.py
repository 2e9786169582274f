"""Slurm's language as the real Slurm speaks it: directives, host lists, the environment of a step, its commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcddp.script.directives import UnreadableLineError, split_directive_line
from hpcddp.slurm import commands
from hpcddp.slurm.hostlist import expand
from hpcddp.slurm.rank_env import RankEnv
from tests.cluster.sandbox import Sandbox
from tests.slurm.job_records import comment_in
from tests.slurm.measured_lines import MEASURED, MEASURED_SINCE_24_05
from tests.slurm_version import numbers, slurm_version

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
FIRST = r"#SBATCH --comment="
PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def stored(sandbox: Sandbox, directory: Path, line: str) -> tuple[str | None, str] | str:
    """Return the comment and the time limit that sbatch took from a line, or its complaint."""
    script = directory / "script"
    script.write_bytes(f"#!/bin/bash\n{line}\ntrue\n".encode())
    done = sandbox.run("sbatch", "--parsable", "--hold", "--output=/dev/null", script, check=False)
    if done.returncode != 0:
        return done.stderr
    job_id = done.stdout.strip()
    record = sandbox.run("scontrol", "show", "job", job_id).stdout
    sandbox.run("scancel", job_id)
    limit = re.search(r"TimeLimit=(\S+)", record)
    assert limit is not None
    return comment_in(record), limit[1]


def escapes_blanks() -> bool:
    """Return whether this Slurm takes a backslash before a blank as a part of the word."""
    version = slurm_version()
    assert version is not None
    return numbers(version) >= (24, 5)


@pytest.mark.parametrize(("line", "words"), MEASURED)
def test_sbatch_takes_from_a_line_what_our_reader_takes(
    sandbox: Sandbox, tmp_path: Path, line: str, words: list[str] | None
) -> None:
    if escapes_blanks():
        words = MEASURED_SINCE_24_05.get(line, words)
    comment = next((word.partition("=")[2] for word in words or () if word.startswith("--comment=")), None)
    limit = "00:05:00" if "--time=5" in (words or ()) else "UNLIMITED"
    assert stored(sandbox, tmp_path, line) == (comment, limit)


@SHARED
@given(st.text(st.sampled_from(" \t\v\f\\\"'#ab=,"), min_size=1, max_size=12))
def test_sbatch_reads_any_value_as_our_reader_does(sandbox: Sandbox, tmp_path: Path, text: str) -> None:
    found = stored(sandbox, tmp_path, FIRST + text)
    try:
        words, _ = split_directive_line(FIRST + text, escapes_blanks=escapes_blanks())
    except UnreadableLineError:
        assert "Unmatched" in found
        return
    if len(words) > 1:
        # Every further word of these letters is a name, which sbatch does not want among its options.
        assert f"Invalid directive found in batch script: {words[1]}" in found
    else:
        assert found == (words[0].removeprefix("--comment="), "UNLIMITED")


@pytest.mark.parametrize(
    ("before", "comment"),
    [
        ("\n  \n\t\v\f\n   # a comment\n", "x"),
        ("# " + "y" * 100_000 + "\n", "x"),
        (":\n", None),
        (" umask 077\n", None),
        ("\xa0\n", None),
    ],
)
def test_the_first_line_that_is_no_comment_ends_the_directives(
    sandbox: Sandbox, tmp_path: Path, before: str, comment: str | None
) -> None:
    assert stored(sandbox, tmp_path, f"{before}#SBATCH --comment=x") == (comment, "UNLIMITED")


def test_a_line_may_be_as_long_as_it_likes(sandbox: Sandbox, tmp_path: Path) -> None:
    line = f"#SBATCH --comment=x{' ' * 100_000}--time=5"
    assert stored(sandbox, tmp_path, line) == ("x", "00:05:00")


def host_lists() -> st.SearchStrategy[str]:
    """Return host lists that Slurm takes: no text follows the last bracket of a name."""
    number = st.integers(0, 120)
    width = st.integers(1, 4)
    span = st.tuples(number, st.integers(0, 5), width).map(lambda t: f"{t[0]:0{t[2]}d}-{t[0] + t[1]:0{t[2]}d}")
    single = st.tuples(number, width).map(lambda t: f"{t[0]:0{t[1]}d}")
    bracket = st.lists(span | single, min_size=1, max_size=3).map(lambda items: f"[{','.join(items)}]")
    prefix = st.sampled_from(["n", "r", "gpu-", "a0", "x.y", "node"])
    name = st.lists(st.tuples(prefix, bracket).map("".join), min_size=1, max_size=3).map("".join)
    return st.lists(name | prefix.map(lambda text: f"{text}1"), min_size=1, max_size=4).map(",".join)


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The least that scontrol wants to see; it asks no controller about a host list."""
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    return path


@SHARED
@given(host_lists())
def test_a_host_list_stands_for_the_names_that_scontrol_prints(configuration: Path, text: str) -> None:
    printed = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={"SLURM_CONF": str(configuration), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expand(text) == printed.stdout.splitlines()


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        (["--nodes=3", "--ntasks=5", "--distribution=block"], 5),
        (["--nodes=3", "--ntasks=5", "--distribution=cyclic"], 5),
        (["--nodes=3", "--ntasks=7"], 7),
        (["--nodes=3", "--ntasks=3"], 3),
        (["--nodes=2", "--ntasks=6", "--ntasks-per-node=3"], 6),
        (["--nodes=1", "--ntasks=1"], 1),
    ],
)
def test_every_task_of_a_step_knows_who_it_is_and_where(
    sandbox: Sandbox, tmp_path: Path, options: list[str], tasks: int
) -> None:
    sandbox.run("srun", *options, f"--output={tmp_path}/%t.json", sys.executable, "-c", PRINT_ENVIRONMENT)
    environments = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    envs = {env.rank: (env, found["SLURMD_NODENAME"]) for found in environments for env in [RankEnv.from_env(found)]}
    assert sorted(envs) == list(range(tasks))
    for env, host in envs.values():
        assert env.tasks_per_node[env.node_rank] == [found for _, found in envs.values()].count(host)
        assert env.host_of(env.rank) == host
        assert env.host_of(0) == envs[0][1]
        assert all(env.host_of(rank) in {None, envs[rank][1]} for rank in envs)


def test_slurms_commands_answer(sandbox: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/bash\n#SBATCH --output=/dev/null --comment='a JobState=X'\nsleep 30\n")
    job_id = commands.sbatch(script, environment=sandbox.environment)
    job = commands.show_job(job_id, environment=sandbox.environment)
    assert job is not None
    assert (job["JobId"], job["JobName"], job["Comment"]) == (job_id, "script", "a JobState=X")
    assert job["JobState"] in {"PENDING", "CONFIGURING", "RUNNING"}
    assert commands.show_job("4294967", environment=sandbox.environment) is None
    assert commands.controller_answers(sandbox.environment)


def test_a_refused_job_carries_the_reason_of_the_real_sbatch(sandbox: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/bash\n#SBATCH --partition=nowhere\ntrue\n")
    with pytest.raises(commands.SlurmCommandError) as caught:
        commands.sbatch(script, environment=sandbox.environment)
    assert str(caught.value) == (
        "sbatch refused the job: the cluster has no partition 'nowhere'; sinfo --summarize lists them"
    )
