"""Submitting a chain: how often sbatch is called, with what, and what is recorded."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.errors import HpcddpError
from hpcddp.jobfile.cluster import ClusterFacts, Preemption
from hpcddp.jobfile.overrides import sweep_overrides
from hpcddp.jobfile.read import ResolvedJob, load_job
from hpcddp.run.directory import RunDirectory
from hpcddp.run.find import find_run
from hpcddp.run.job_records import read_submission
from hpcddp.run.result import resume_command
from hpcddp.slurm import commands
from hpcddp.slurm.job_environment import Dependency
from hpcddp.submission.checks import notes_about
from hpcddp.submission.dependencies import dependency_on
from hpcddp.submission.request import SubmissionError, SubmitRequest
from hpcddp.submission.resume import prepare_resumption
from hpcddp.submission.submit import prepare, submit
from hpcddp.submission.sweep import submit_sweep
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import FakeSlurm, make_fake_slurm
from tests.submission.requests import request_of

JOB = "name: demo\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: digits}\n"
WAIT = "resources.sbatch.dependency=afterok:12"
CHAIN = ["--job-name=demo-r1", "--no-requeue", "first=0"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return make_fake_slurm(tmp_path / "slurm")


def chain_request(slurm: FakeSlurm, *overrides: str, chain: int | None = 3, **fields: Any) -> SubmitRequest:
    job = load_job(Path("job.yaml"), overrides=list(overrides))
    return request_of(job, chain=chain, **{"environment": slurm.environment(), **fields})


def submitted(slurm: FakeSlurm, *overrides: str, **fields: Any) -> RunDirectory:
    return submit(chain_request(slurm, *overrides, **fields)).run


def test_a_chain_is_singletons_with_a_name_that_no_other_run_has(slurm: FakeSlurm) -> None:
    run = submitted(slurm)
    assert slurm.calls == [["--dependency=singleton", *CHAIN]] * 3
    submission = read_submission(run)
    assert submission is not None
    assert (submission.job_id, submission.chain) == ("101", ("101", "102", "103"))
    # Each job loads a pickle of its own name.
    assert sorted(path.name for path in run.submitit.glob("*.pkl")) == [
        f"{job}_submitted.pkl" for job in (101, 102, 103)
    ]
    assert resume_command(run).endswith(" --chain 3")
    assert find_run("103", Path("runs")).path == run.path


def test_the_script_of_a_chain_is_that_of_one_job(slurm: FakeSlurm) -> None:
    assert prepare(chain_request(slurm)).script == prepare(chain_request(slurm, chain=None)).script


@pytest.mark.parametrize(
    ("chain", "dependency", "expected"),
    [
        (2, Dependency(conditions=("afterany:7",), runs=("/runs/a",)), "afterany:7,afterok:12,singleton"),
        (None, Dependency(conditions=("afterany:7",)), "afterany:7,afterok:12"),
        (None, Dependency(), "afterok:12"),
    ],
)
def test_a_dependency_of_the_job_file_is_one_condition_more(
    slurm: FakeSlurm, chain: int | None, dependency: Dependency, expected: str
) -> None:
    submitted(slurm, WAIT, chain=chain, dependency=dependency)
    assert {call[0] for call in slurm.calls} == {f"--dependency={expected}"}


def test_a_dependency_of_the_job_file_is_one_condition_more_for_a_sweep(slurm: FakeSlurm) -> None:
    after = Dependency(conditions=("afterany:7",))
    submit_sweep(chain_request(slurm, "sweep={train.seed: 0..2}", WAIT, chain=None, dependency=after))
    assert slurm.calls[0][0] == "--dependency=afterany:7,afterok:12"


def test_when_one_job_of_a_chain_is_refused_nothing_is_left(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    environment = slurm.environment(REFUSED_CALL="3", REFUSAL="no more")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HpcddpError) as caught:
        submitted(slurm, environment=environment)
    golden.message(caught.value)
    # The end of the first would be the turn of the second.
    assert slurm.cancelled == ["102", "101"]
    assert not Path("runs").exists()


def test_a_signal_between_the_jobs_of_a_chain_undoes_it(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = commands.sbatch

    def interrupted(*words: Any, **options: Any) -> str:
        if len(slurm.calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return sbatch(*words, **options)

    monkeypatch.setattr(commands, "sbatch", interrupted)
    monkeypatch.setenv("PATH", slurm.environment()["PATH"])
    monkeypatch.setenv("RECORD", str(slurm.directory))
    with pytest.raises(KeyboardInterrupt, match="nothing was submitted"):
        submitted(slurm)
    assert slurm.cancelled == ["102", "101"]
    assert not Path("runs").exists()


def test_a_chain_of_a_sweep_or_of_this_machine_is_refused(slurm: FakeSlurm, golden: GoldenMessages) -> None:
    sweep = load_job(Path("job.yaml"), options=sweep_overrides(["train.seed=0..2"], None, None))
    for request in (request_of(sweep, chain=3), chain_request(slurm, cluster="local")):
        with pytest.raises(SubmissionError) as caught:
            prepare(request)
        assert golden.message(caught.value).startswith("--chain ")
    assert slurm.calls == []


def test_a_chain_of_which_one_job_waits_is_alive_and_waited_for_to_its_last(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    run = submitted(slurm)
    states = {"101": "COMPLETED", "102": "COMPLETED", "103": "PENDING"}
    monkeypatch.setattr(commands, "show_job", lambda job_id, **_: {"JobState": states[job_id]})
    with pytest.raises(SubmissionError) as caught:
        prepare_resumption(run, chain_request(slurm))
    assert "job 103 of the run r1 has not ended" in golden.message(caught.value, {str(run.path.parents[2]): "DIR"})
    monkeypatch.setattr(commands, "show_array", lambda job_id, **_: [{"JobState": states[job_id]}])
    dependency, _ = dependency_on([str(run.path)], [], Path("runs"), {})
    assert dependency.text == "afterany:103"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1),
        ({"chain": 3}, 0),
        ({"cluster": "local"}, 0),
        ({"causes": []}, 0),
        ({"requeue": True}, 0),
    ],
)
def test_a_site_that_requeues_nothing_by_default_is_told(
    slurm: FakeSlurm, golden: GoldenMessages, fields: dict[str, Any], expected: int
) -> None:
    causes = [f"requeue.causes={fields.pop('causes')}"] if "causes" in fields else []
    facts = ClusterFacts(name="vista", preemption=Preemption(requeue=fields.pop("requeue", False)))
    job = load_job(Path("job.yaml"), overrides=causes)
    known = ResolvedJob(spec=job.spec, origins=job.origins, cluster=facts)
    notes = notes_about(request_of(known, environment=slurm.environment(), **fields))
    assert len(notes) == expected
    for note in notes:
        assert "--chain N" in golden.message(note)


def call(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    for name, value in slurm.environment(SLURM_CONF=str(slurm.directory / "bin" / "sbatch")).items():
        monkeypatch.setenv(name, value)
    return boundary.run(app, ["submit", "job.yaml", "--set", "train.device=cpu", *words])


def test_the_jobs_of_a_chain_are_printed(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(slurm, monkeypatch, "--chain", "2") == 0
    assert "job id         101, 102  (job on slurm)\n" in capsys.readouterr().out
    assert call(slurm, monkeypatch, "--chain", "2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["job_id"], document["chain"]) == ("103", ["103", "104"])


def test_a_dry_run_says_how_many_jobs_it_would_be(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(slurm, monkeypatch, "--chain", "2", "--dry-run") == 0
    assert "would go to slurm as 2 jobs in turn, run directory " in capsys.readouterr().err
    assert slurm.calls == []


@pytest.mark.parametrize("words", [("--chain", "3", "--follow"), ("--chain", "1")], ids=["followed", "of one"])
def test_a_chain_that_is_followed_or_none_is_refused(
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: GoldenMessages,
    words: tuple[str, ...],
) -> None:
    assert call(slurm, monkeypatch, *words) == 2
    assert "chain" in golden.message(capsys.readouterr().err)
    assert slurm.calls == []
