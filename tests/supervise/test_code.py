"""The comparison of the code at the start of every attempt."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpcddp.errors import HpcddpError
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.write import dump_for_script
from hpcddp.run.code import CodeError
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import Event, append_event, read_events
from hpcddp.run.files import read_json
from hpcddp.run.job_records import Rank, write_ranks
from hpcddp.run.record import RecordError
from hpcddp.submission.code import take_code
from hpcddp.supervise.begin import begin
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.submission.git_projects import make_project, request_in, write_files
from tests.supervise.attempts import SLURM, Scenario
from tests.supervise.fake_slurm import FakeSlurm

FILES = {".gitignore": "*.pt\nruns/\n", "train.py": "version 0\n", "log.csv": "step\n", "conf.yaml": "lr: 1\n"}


@pytest.fixture(autouse=True)
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    # No start of a script is one of more requeues than that.
    return FakeSlurm(monkeypatch, Restarts="1000")


class Submitted:
    """A run that was submitted from a project, and its attempts; each is a requeue of its job."""

    def __init__(self, directory: Path, code: str) -> None:
        self.project = make_project(directory / "project", FILES)
        self.run = RunDirectory(directory / "project" / "runs" / "demo" / "r1")
        self.run.path.mkdir(parents=True, mode=0o700)
        self.request = request_in(
            self.project, code, requeue={"max_preemptions": 100, "max_attempts_without_progress": 99}
        )
        take_code(self.request).write(self.run)
        self.restarts = 0

    @property
    def spec(self) -> JobSpec:
        return self.request.job.spec

    def begin(self) -> AttemptDirectory:
        environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(self.restarts)}
        self.restarts += 1
        text = begin(
            run_root=str(self.run.path.parent.parent),
            name="demo",
            run_id="r1",
            job_text=dump_for_script(self.spec),
            environment=environment,
        )
        return AttemptDirectory.from_text(text)

    def edit(self, text: str) -> None:
        (self.project / "train.py").write_text(f"{text}\n")

    def work(self, attempt: AttemptDirectory) -> None:
        """Write what jobs write."""
        with (self.project / "log.csv").open("a") as log:
            log.write(f"{attempt.number}\n")
        write_files(
            self.project,
            {
                "last.pt": f"{attempt.number}", f"checkpoints/{attempt.number}/model.bin": "x",
                "outputs/config.yaml": f"attempt: {attempt.number}\n", "metrics.json": f"{attempt.number}",
                "__pycache__/train.pyc": f"{attempt.number}",
            },
        )  # fmt: skip

    def events(self, kind: str) -> list[Event]:
        return [event for event in read_events(self.run.events) if event.kind == kind]


def test_code_that_has_not_changed_is_told_nothing_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for code in ("live", "frozen", "snapshot"):
        submitted = Submitted(tmp_path / code, code)
        submitted.work(submitted.begin())
        submitted.begin()
        assert not submitted.events("code")
    assert "since the submission" not in capfd.readouterr().err


def test_an_edit_is_an_event_and_a_warning_of_every_later_attempt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    submitted = Submitted(tmp_path, "live")
    submitted.begin()
    submitted.edit("version 1")
    for number in (1, 2):
        assert submitted.begin().number == number
        assert [event.attempt for event in submitted.events("code")] == [*range(1, number + 1)]
    event = submitted.events("code")[0]
    assert event.reason == "train.py changed since the submission; this attempt runs the new one"
    golden.message(capfd.readouterr().err)


def test_frozen_code_that_has_changed_does_not_run(tmp_path: Path, golden: GoldenMessages) -> None:
    submitted = Submitted(tmp_path, "frozen")
    submitted.begin()
    submitted.edit("version 1")
    with pytest.raises(CodeError, match="frozen") as error:
        submitted.begin()
    assert_facts(golden.message(error.value, {str(submitted.run.path): "RUN"}), "train.py changed", "--code now")
    assert submitted.run.newest_attempt() == 0
    result = read_json(submitted.run.result)
    assert (result["status"], result["exit_code"]) == ("stopped", 2)
    assert result["resume"].endswith("--code now")
    assert len(submitted.events("refusal")) == 1
    submitted.edit("version 0")
    assert submitted.begin().number == 1


def test_code_that_cannot_be_compared_is_told_and_frozen_code_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], golden: GoldenMessages, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, frozen, copied = (Submitted(tmp_path / code, code) for code in ("live", "frozen", "snapshot"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for submitted in (live, copied):
        assert submitted.begin().number == 0
        assert_facts(capfd.readouterr().err, "warning:", "cannot be compared", "git was not found")
    with pytest.raises(CodeError, match="git was not found") as error:
        frozen.begin()
    golden.message(f"{error.value} {error.value.hint}")


def test_an_edit_does_not_reach_a_copy_and_is_told(tmp_path: Path) -> None:
    submitted = Submitted(tmp_path, "snapshot")
    submitted.edit("version 1")
    submitted.begin()
    (event,) = submitted.events("code")
    assert event.reason == "train.py changed since the submission; this attempt runs the copy of the submission"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 99}', "\0" * 100])
def test_a_damaged_record_is_told_where_the_job_does_not_depend_on_it(
    content: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    live, frozen, copied = (Submitted(tmp_path / code, code) for code in ("live", "frozen", "snapshot"))
    for submitted in (live, frozen, copied):
        submitted.run.code.write_text(content)
    live.begin()
    assert_facts(capfd.readouterr().err, "warning:", str(live.run.code))
    for submitted in (frozen, copied):
        with pytest.raises(RecordError, match=str(submitted.run.code)):
            submitted.begin()
        assert submitted.run.newest_attempt() is None


@pytest.mark.parametrize(
    "field", [{"root": "relative"}, {"directory": "a/../../x"}, {"copy": "../../x"}, {"changes": {"a": 1}}]
)
def test_a_record_that_names_another_place_is_damaged(field: dict[str, object], tmp_path: Path) -> None:
    submitted = Submitted(tmp_path, "snapshot")
    document = json.loads(submitted.run.code.read_text())
    submitted.run.code.write_text(json.dumps({**document, **field}))
    with pytest.raises(RecordError, match="is damaged"):
        submitted.begin()


@pytest.mark.parametrize("code", ["frozen", "snapshot"])
def test_a_script_that_was_submitted_by_hand_has_no_code_to_depend_on(
    code: str, tmp_path: Path, golden: GoldenMessages
) -> None:
    submitted = Submitted(tmp_path, code)
    submitted.run.code.unlink()
    with pytest.raises(HpcddpError, match="submit the job with hpcddp submit") as error:
        submitted.begin()
    golden.message(error.value)


@pytest.mark.parametrize("code", ["live", "frozen", "snapshot"])
def test_tasks_that_are_started_again_in_their_job_are_compared_too(
    code: str, tmp_path: Path, slurm: FakeSlurm
) -> None:
    slurm.become("RUNNING", Restarts="0")
    project = make_project(tmp_path / "project", FILES)
    run = RunDirectory(tmp_path / "runs" / "demo" / "r1")
    run.path.mkdir(parents=True, mode=0o700)
    take_code(request_in(project, code)).write(run)
    scenario = Scenario(tmp_path, SLURM, f"requeue: {{max_failures: 3}}\nenvironment: {{code: {code}}}\n")
    write_files(project, {"train.py": "version 1\n"})
    write_ranks(scenario.attempt, [Rank(host="n1"), Rank(host="n2")])
    scenario.attempt.step.write_text("7.0\n")
    append_event(run.events, kind="train", time=time.time(), attempt=0, step=0)
    scenario.fail(0, exit_code=71, secondary=True)
    ending = scenario.end()
    if code == "frozen":
        assert (ending.exit_code, ending.next_attempt) == (2, None)
        assert_facts(ending.text, "train.py changed since the submission", f"{scenario.resume} --code now")
        assert scenario.result is not None
        assert scenario.result["status"] == "stopped"
    else:
        assert ending.next_attempt is not None
        assert [event.attempt for event in read_events(run.events) if event.kind == "code"] == [1]


@pytest.mark.long
def test_of_twenty_requeues_with_an_edit_each_the_right_ones_are_told_refused_or_run_the_copy(tmp_path: Path) -> None:
    live, frozen, copied, unchanged = (
        Submitted(tmp_path / name, code)
        for name, code in (("a", "live"), ("b", "frozen"), ("c", "snapshot"), ("d", "live"))
    )
    for submitted in (live, frozen, copied, unchanged):
        submitted.work(submitted.begin())
    refused = 0
    for number in range(1, 21):
        for submitted in (live, frozen, copied):
            submitted.edit(f"version {number}")
        for submitted in (live, copied, unchanged):
            submitted.work(submitted.begin())
        try:
            frozen.begin()
        except CodeError:
            refused += 1
    assert len(live.events("code")) == 20
    assert refused == 20
    assert not unchanged.events("code")
    assert (copied.run.code_copies / "0" / "train.py").read_text() == "version 0\n"
