"""What the real Slurm makes of a rendered script: every value arrives as it was written, and nothing else happens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.write import dump_for_script
from hpcddp.slurm.job import ENDED_STATES
from hpcddp.submission.render import render_script
from tests.cluster.sandbox import Sandbox
from tests.slurm.job_records import comment_in
from tests.submission.requests import request_of
from tests.submission.script_runner import ScriptRunner

MARKER = "marker-of-a-payload"
VALUES = (
    f"$(touch {MARKER})",
    f"`touch {MARKER}`",
    f"'; touch {MARKER}; '",
    f'"; touch {MARKER}; "',
    f"a; touch {MARKER} #",
    f"& touch {MARKER} &",
    f"x | touch {MARKER}",
    f"x && touch {MARKER}",
    f"'$(touch {MARKER})'",
    f'"$(touch {MARKER})"',
    f"${{x:=$(touch {MARKER})}}",
    f"\\'; touch {MARKER} #",
    f'\\"; touch {MARKER} #',
    f"\\\\'; touch {MARKER} #",
    f">{MARKER}",
    f"<(touch {MARKER})",
    f"HPCDDP_JOB ) ; touch {MARKER}",
    f"}}; touch {MARKER}; {{",
    f"--wrap=touch {MARKER}",
    "#SBATCH --comment=injected",
    "--comment=injected",
    'a" --comment="injected',
    "a' --comment='injected",
    "a#b",
    " #",
    "#",
    "\\",
    "\\\\",
    "ends with a backslash\\",
    "a\\ b",
    "a\\#b",
    "'",
    '"',
    'it\'s "both"',
    "'a b'",
    '"a b"',
    "  leading and trailing  ",
    "a  b",
    "tab\there",
    "a\vb\fc",
    "%j %x %% %t",
    "%",
    "~root",
    "*",
    "$HOME ${PATH} $$ $?",
    "!! !$ ^a^b",
    "a=b",
    "ünïcödé - 日本語 🚀",
    "x\u2028y\x85z\xa0",
    "\x01\x1b[31m\x7f",
)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One job whose every text is one hostile value.

    Attributes:
        value: the value.
        directory: where it was submitted from.
        job: what the user wrote.
        record: where its programs wrote down how they were called.
        python: its interpreter.
        job_id: Slurm's id.
    """

    value: str
    directory: Path
    job: ResolvedJob
    record: Path
    python: Path
    job_id: str

    def words(self, name: str) -> list[str]:
        return ScriptRunner(self.directory).words(name)


def send(sandbox: Sandbox, directory: Path, value: str) -> Sent:
    """Submit a job with ``value`` wherever one can stand, with small programs in place of Python's."""
    runner = ScriptRunner(directory)
    as_name = value.replace("/", "_")
    python = directory / f"p{as_name}"
    runner.set_up(python)
    # Slurm takes no backslash in the path of a log.
    run_root = directory / f"r{as_name}".replace("\\", "_")
    spec = JobSpec.model_validate(
        {
            "name": "hostile",
            "run_root": str(run_root),
            "resources": {"account": value, "sbatch": {"comment": value}},
            "environment": {"env": {"VALUE": value, "TWO_LINES": f"{value}\n{value}"}, "modules": (value,)},
            "batch": {"global_batch_size": 8},
            "train": {"model": "resnet18", "dataset": "digits", "data_dir": value, "model_args": {value: value}},
        }
    )
    job = ResolvedJob(spec=spec, origins={})
    run = run_root / "hostile" / "r1"
    attempt = run / "attempts" / "0"
    attempt.mkdir(parents=True)
    script = directory / "job.sh"
    script.write_bytes(render_script(request_of(job, python=str(python), run_id="r1")).text.encode())
    environment = {"RECORD": str(runner.record), "MODULESHOME": str(directory), "ATTEMPT": str(attempt)}
    job_id = sandbox.submit(script, cwd=directory, env=environment)
    return Sent(value=value, directory=directory, job=job, record=runner.record, python=python, job_id=job_id)


@pytest.fixture(scope="module")
def sent(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> list[Sent]:
    """Submit all of them, and wait until all have ended."""
    made = []
    for number, value in enumerate(VALUES):
        directory = tmp_path_factory.mktemp(f"job{number}")
        made.append(send(sandbox, directory, value))
    for job in made:
        sandbox.wait(job.job_id, states=ENDED_STATES)
    return made


def record_of(sandbox: Sandbox, sent: Sent) -> str:
    return sandbox.run("scontrol", "show", "job", sent.job_id).stdout


def test_there_are_fifty_values() -> None:
    assert len(set(VALUES)) == 50


def test_slurm_stores_what_the_user_wrote(sandbox: Sandbox, sent: list[Sent]) -> None:
    for job in sent:
        record = record_of(sandbox, job)
        assert comment_in(record) == job.value
        # Slurm itself writes accounts in small letters.
        assert re.findall(r" Account=(.*) QOS=", record) == [job.value.lower()]
        assert f"\n   WorkDir={job.directory}\n" in record


def test_every_job_ends_well(sandbox: Sandbox, sent: list[Sent]) -> None:
    for job in sent:
        fields = sandbox.job(job.job_id)
        assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), job.value


def test_the_tasks_see_what_the_user_wrote(sent: list[Sent]) -> None:
    for job in sent:
        environment = dict(entry.partition("=")[::2] for entry in job.words("environment"))
        assert environment["VALUE"] == job.value
        assert environment["TWO_LINES"] == f"{job.value}\n{job.value}"
        assert environment["SLURM_STEP_NUM_TASKS"] == "1"
        assert job.words("task") == ["-P", "-u", "-m", "hpcddp.task"]
        # The program that wrote this down lies at the path that the user gave.
        assert job.words("program") == [str(job.python)]


def test_the_batch_script_passes_on_what_the_user_wrote(sent: list[Sent]) -> None:
    for job in sent:
        begin = ["begin", f"--run-root={job.job.spec.run_root}", "--name=hostile", "--run-id=r1"]
        assert job.words("begin") == ["-P", "-m", "hpcddp.supervise", *begin]
        assert (job.record / "job.yaml").read_bytes().decode() == dump_for_script(job.job.spec)
        assert job.words("module") == ["load", job.value]
        assert job.words("end") == ["-P", "-m", "hpcddp.supervise", "end", "--may-restart", "--code", "0"]


def test_the_logs_lie_where_the_user_said(sent: list[Sent]) -> None:
    for job in sent:
        run = Path(job.job.spec.run_root) / "hostile" / "r1"
        assert sorted(str(path.relative_to(run)) for path in run.rglob("*.log")) == [
            "attempts/0/rank-0.log",
            "batch.log",
        ]
        assert (run / "attempts" / "0" / "rank-0.log").read_text() == "this is the task\n"


def test_no_payload_ran(sent: list[Sent]) -> None:
    assert not [path for job in sent for path in job.directory.rglob(MARKER)]
    assert not list(Path.home().glob(MARKER))
