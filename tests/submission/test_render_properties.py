from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.rules import SHELL_VARIABLES
from hpcddp.jobfile.write import dump_for_script, dump_job, parse_from_script
from hpcddp.submission.render import render_script
from hpcddp.submission.template import quote_word
from tests.examples import examples
from tests.slurm.directive_words import directive_words
from tests.submission.hostile_text import LINE, MARKER, TEXT
from tests.submission.requests import request_of
from tests.submission.script_runner import ScriptRunner

HEREDOC = st.sampled_from(["\nHPCDDP_JOB\n", "HPCDDP_JOB", "\nHPCDDP_JOB_1\n) || touch marker-of-a-payload\n"])
NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
VARIABLE = st.from_regex(r"V_[A-Za-z0-9_]{0,8}", fullmatch=True)
# No field of the job file will ever be for one of them, and each may be bare.
FLAG = st.sampled_from(["nice", "image", "uenv", "view"])

PLACE = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude")


@st.composite
def jobs(draw: st.DrawFn) -> ResolvedJob:
    """Draw a job whose every text is hostile."""
    resources: dict[str, Any] = {name: draw(LINE) for name in PLACE if draw(st.booleans())}
    for command in ("sbatch", "srun"):
        resources[command] = draw(st.dictionaries(FLAG, LINE | st.just(value=True), max_size=3))
    environment = {
        "modules": tuple(draw(st.lists(LINE, max_size=2))),
        "env": draw(st.dictionaries(VARIABLE, TEXT, max_size=4)),
    }
    spec = JobSpec.model_validate(
        {
            "name": draw(NAME),
            "run_root": draw(LINE.filter(lambda text: "\\" not in text)),
            "resources": resources,
            "environment": environment,
            "batch": {"global_batch_size": 8},
            "train": {
                "model": "resnet18",
                "dataset": "digits",
                "data_dir": draw(LINE),
                "model_args": {draw(LINE): draw(TEXT | HEREDOC)},
            },
        }
    )
    return ResolvedJob(spec=spec, origins={})


def expected_words(job: ResolvedJob) -> list[str]:
    """Return what sbatch must read, from the job alone."""
    spec, resources = job.spec, job.spec.resources
    words = [f"--job-name={spec.name}", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1"]
    words += [f"--{name}={getattr(resources, name)}" for name in PLACE if getattr(resources, name) is not None]
    extras = sorted(resources.sbatch.items())
    words += [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in extras]
    log = f"{spec.run_root.rstrip('/')}/{spec.name}/r1/batch.log".replace("%", "%%")
    return [*words, f"--output={log}", f"--error={log}", "--open-mode=append", "--requeue", "--signal=USR2@120"]


@given(jobs())
def test_sbatch_reads_every_field_as_the_user_wrote_it(job: ResolvedJob) -> None:
    script = render_script(request_of(job, python="/usr/bin/python3", run_id="r1")).text
    assert directive_words(script) == expected_words(job)


@examples(0.3)
@given(job=jobs(), python=LINE)
def test_bash_sees_every_field_as_the_user_wrote_it(job: ResolvedJob, python: str) -> None:
    spec = job.spec
    with tempfile.TemporaryDirectory() as directory:
        runner = ScriptRunner(Path(directory))
        interpreter = runner.directory / ("p" + python.replace("/", "_")[:40])
        runner.set_up(interpreter)
        script = render_script(request_of(job, python=str(interpreter), run_id="r1")).text

        assert runner.run(script) == (0, "")

        loaded = [["load", module] for module in spec.environment.modules]
        assert runner.words("module") == [word for words in loaded for word in words]
        begin = ["begin", f"--run-root={spec.run_root}", f"--name={spec.name}", "--run-id=r1"]
        assert runner.words("begin") == ["-P", "-m", "hpcddp.supervise", *begin]
        document = (runner.record / "job.yaml").read_bytes().decode()
        assert document == dump_for_script(spec)
        assert dump_job(parse_from_script(document), environment_values=False) == dump_job(
            spec, environment_values=False
        )
        environment = dict(entry.partition("=")[::2] for entry in runner.words("environment"))
        assert {name: environment.get(name) for name in spec.environment.env} == spec.environment.env
        flags = [f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in spec.resources.srun.items()]
        assert set(flags) <= set(runner.words("srun"))
        assert runner.words("task") == ["-P", "-u", "-m", "hpcddp.task"]
        assert runner.end_options() == ["--code", "0"]
        assert not list(runner.directory.rglob(MARKER))


@given(st.lists(TEXT, min_size=1, max_size=60))
def test_bash_exports_every_quoted_value_as_it_was(values: list[str]) -> None:
    lines = [f"export V{number}={quote_word(value)}" for number, value in enumerate(values)]
    script = "\n".join([*lines, "exec env -0"])
    done = subprocess.run(["/bin/bash", "-s"], input=script.encode(), env={}, capture_output=True, check=True)
    found = dict(entry.partition("=")[::2] for entry in done.stdout.decode().split("\0"))
    assert [found[f"V{number}"] for number in range(len(values))] == values


def test_the_names_that_a_job_file_may_not_set_are_those_that_bash_does_not_export() -> None:
    def lines_of(script: str) -> set[str]:
        command = ["/bin/bash", "-c", script]
        done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
        return set(done.stdout.splitlines())

    usual = {"HOME", "IFS", "LC_ALL", "LD_PRELOAD", "PATH", "TMPDIR"}
    # compgen names what is set in this place; some names of the table are set in others only, such as a function.
    names = lines_of("compgen -v") | SHELL_VARIABLES | usual
    kept = {name for name in names if f"{name}=7x" not in lines_of(f"export {name}=7x\nexec /usr/bin/env")}
    assert kept == SHELL_VARIABLES
