"""``hpcddp submit --resume SWEEP``: the elements that did not finish continue, all others stay as they are."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.jobfile.overrides import sweep_overrides
from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.write import dump_for_script
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.job_file import read_submitted_job
from hpcddp.run.job_records import read_submission
from hpcddp.run.ownership import make_private_directory
from hpcddp.run.record import write_record
from hpcddp.run.result import Result, read_result
from hpcddp.run.sweep import Sweep
from hpcddp.slurm import commands
from hpcddp.slurm.commands import QueuedJob
from hpcddp.submission.request import SubmissionError
from hpcddp.submission.resume import request_to_resume, resume
from hpcddp.submission.resume_sweep import resume_sweep
from hpcddp.submission.sweep import submit_sweep
from hpcddp.submission.sweep_element import begin_element
from hpcddp.supervise.begin import begin
from tests.manage.runs import queued
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import FakeSlurm, make_fake_slurm
from tests.submission.requests import request_of

JOB = "name: demo\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: digits}\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    made = make_fake_slurm(tmp_path / "slurm")
    for name, value in made.environment(HOME=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(commands, "show_job", lambda _: None)
    squeue(monkeypatch)
    return made


def squeue(monkeypatch: pytest.MonkeyPatch, *jobs: QueuedJob) -> None:
    monkeypatch.setattr(commands, "queue", lambda _: list(jobs))


def swept(slurm: FakeSlurm, *, count: int = 5, parallel: int | None = None, **results: str) -> Sweep:
    """Submit a sweep; elements with a result have run, the others have not begun."""
    options = sweep_overrides([f"train.seed=0..{count - 1}"], None, parallel)
    environment = slurm.environment(MAX_ARRAY_SIZE=str(commands.DEFAULT_LARGEST_ARRAY))
    request = request_of(load_job(Path("job.yaml"), options=options), run_id="s1", environment=environment)
    sweep = submit_sweep(request).sweep
    for element, status in results.items():
        index = int(element.removeprefix("element_"))
        job_id = str(sweep.job_id(index))
        array, _, place = job_id.partition("_")
        sweep.batch_log(job_id).write_text("the first job\n")
        environment = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": place}
        text = dump_for_script(read_submitted_job(sweep.directory))
        begin(run_root="runs", name="demo", run_id="s1", job_text=text, environment=environment, element=index)
        write_record(sweep.run(index).result, Result(status=status, reason="x"))
    return sweep


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = boundary.run(app, ["submit", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_unfinished_elements_continue_in_one_array(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = swept(slurm, element_0="finished", element_1="failed", element_2="finished", element_4="finished")
    code, out, err = run(capsys, "--resume", "s1")
    assert (code, err) == (0, "")
    assert out == (
        "2 elements continue; 3 finished, 0 alive\n"
        "job id           102\n"
        f"sweep directory  {sweep.path}\n"
        "next             hpcddp status s1\n"
    )
    log = sweep.logs / "101_%a.log"
    assert slurm.calls[1:] == [["--array=1,3", f"--output={log}", f"--error={log}", "first=0"]]
    for index, job_id in ((1, "102_1"), (3, "102_3")):
        element = sweep.run(index)
        submission = read_submission(element)
        assert submission is not None
        assert (submission.job_id, submission.sweep, submission.index) == (job_id, "s1", index)
        assert read_result(element) is None
        assert element.batch_log.resolve() == sweep.logs / f"101_{index}.log"
        assert [event.kind for event in read_events(element.events)][-1] == "resume"
        assert f"\n  seed: {index}\n" in element.job_file.read_text()
    assert sweep.run(1).batch_log.read_text() == "the first job\n"
    finished = read_submission(sweep.run(0))
    assert finished is not None
    assert finished.job_id == "101_0"


def test_what_continues_is_alive_and_stays_when_the_sweep_is_resumed_again(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(
        slurm, element_0="cancelled", element_1="finished", element_2="stopped", element_3="failed", element_4="failed"
    )
    squeue(monkeypatch, queued("101_3"))
    run(capsys, "--resume", "s1")
    squeue(monkeypatch, queued("102_0"), queued("102_2", "PENDING"), queued("102_4"))
    write_record(RunDirectory(Path("runs/demo/s1_3")).result, Result(status="failed", reason="x"))
    code, out, _ = run(capsys, "--resume", "s1", "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["finished"], document["alive"], document["job_ids"]) == (1, 3, ["103"])
    assert [(one["run_id"], one["job_id"]) for one in document["elements"]] == [("s1_3", "103_3")]
    assert document["sweep_id"] == "s1"


def test_elements_that_were_submitted_since_they_were_chosen_are_not_submitted_twice(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    sweep = swept(slurm, count=3, element_0="failed", element_1="failed")
    request = request_to_resume(sweep.directory, environment=slurm.environment())
    first = resume_sweep(sweep, [0, 1], request)
    assert first.job_ids == ["102"]
    squeue(monkeypatch, queued("102_0", "PENDING"), queued("102_1"))
    # Another command has chosen them at the same time.
    with pytest.raises(SubmissionError) as caught:
        resume_sweep(sweep, [0, 1], request)
    assert "the run s1_0 is alive as job 102_0" in golden.message(caught.value)
    assert len(slurm.calls) == 2


def test_an_element_that_two_commands_begin_keeps_its_log(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = swept(slurm, count=2)
    run = sweep.run(1)

    def begin_first(path: Path) -> None:
        make_private_directory(path)
        run.submitit.mkdir(mode=0o700)
        run.batch_log.write_text("the job of the other command\n")

    monkeypatch.setattr("hpcddp.submission.sweep_element.make_private_directory", begin_first)
    assert begin_element(sweep, 1).batch_log.read_text() == "the job of the other command\n"


def test_elements_continue_without_what_only_their_nodes_have_if_forced(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], tmp_path: Path, golden: GoldenMessages
) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("resnet18", "own_models:build"))
    (tmp_path / "own_models.py").write_text("def build(num_classes): ...\n")
    swept(slurm, count=2, element_0="failed")
    (tmp_path / "own_models.py").unlink()
    code, _, err = run(capsys, "--resume", "s1")
    assert code == 2
    message = golden.message(err, {sys.executable: "PYTHON"})
    assert "train.model is own_models:build, " in message
    assert message.endswith(" add --force.\n")
    code, out, _ = run(capsys, "--resume", "s1", "--force")
    assert (code, out.splitlines()[0]) == (0, "2 elements continue; 0 finished, 0 alive")


def test_one_is_said_in_the_singular(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    swept(slurm, count=2, element_0="finished")
    assert run(capsys, "--resume", "s1")[1].startswith("1 element continues; 1 finished, 0 alive\n")


def test_the_path_of_the_sweep_is_as_good_as_its_id(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    swept(slurm, count=2)
    assert run(capsys, "--resume", "runs/demo/s1")[0] == 0
    assert slurm.calls[1][0] == "--array=0-1"


def test_as_many_run_at_once_as_before(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    swept(slurm, parallel=2, element_2="finished")
    run(capsys, "--resume", "s1")
    assert slurm.calls[1][0] == "--array=0-1,3-4%2"


def test_a_long_sweep_continues_in_the_arrays_that_it_had(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "DEFAULT_LARGEST_ARRAY", 11)
    sweep = swept(slurm, count=14, parallel=8, element_0="finished", element_13="failed")
    run(capsys, "--resume", "s1")
    assert [(call[0], call[-1]) for call in slurm.calls[2:]] == [
        ("--array=1-10%8", "first=0"), ("--dependency=afterany:103", "first=11"),
    ]  # fmt: skip
    submission = read_submission(sweep.run(13))
    assert submission is not None
    assert submission.job_id == "104_2"


def test_a_sweep_with_nothing_to_resume_is_refused(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    swept(slurm, count=2, element_0="finished")
    squeue(monkeypatch, queued("101_1", "PENDING"))
    code, out, err = run(capsys, "--resume", "s1")
    assert (code, out) == (2, "")
    assert golden.message(err).startswith("hpcddp: the sweep s1 has no run ")
    assert err.endswith(": 1 finished, 1 alive\n")
    assert len(slurm.calls) == 1


def test_nothing_is_resumed_while_slurm_does_not_answer(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    def away(_: object) -> list[QueuedJob]:
        raise commands.SlurmUnavailableError("squeue failed")

    swept(slurm, count=2, element_0="finished")
    monkeypatch.setattr(commands, "queue", away)
    code, _, err = run(capsys, "--resume", "s1")
    assert code == 2
    assert golden.message(err).startswith("hpcddp: nothing was resumed: ")
    assert err.endswith(" s1_1 is unknown: squeue failed\n")


def test_a_damaged_result_is_named_and_nothing_is_resumed(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    sweep = swept(slurm, count=2, element_0="failed")
    sweep.run(0).result.write_text("{")
    code, _, err = run(capsys, "--resume", "s1")
    assert code == 2
    assert golden.message(err).startswith("hpcddp: nothing was resumed: ")
    assert f" s1_0 is unknown: {sweep.run(0).result} " in err
    assert len(slurm.calls) == 1


def test_an_array_that_slurm_refuses_leaves_the_results_as_they_were(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "DEFAULT_LARGEST_ARRAY", 11)
    sweep = swept(slurm, count=14, element_0="failed", element_13="failed")
    monkeypatch.setenv("REFUSED_CALL", "4")
    code, _, err = run(capsys, "--resume", "s1")
    assert (code, "sbatch refused the job" in err) == (1, True)
    assert slurm.cancelled == ["103"]
    for index in (0, 13):
        result = read_result(sweep.run(index))
        assert result is not None
        assert result.status == "failed"


def test_an_element_that_was_resumed_alone_continues_alone(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = swept(slurm, count=3, element_0="failed")
    alone = begin_element(sweep, 1)
    resume(alone, request_to_resume(alone, environment=dict(os.environ)))
    alone.batch_log.write_text("the log of the job of its own\n")
    write_record(alone.result, Result(status="failed", reason="x"))
    assert run(capsys, "--resume", "s1")[1].startswith("3 elements continue; 0 finished, 0 alive\n")
    assert [call[:1] for call in slurm.calls[2:]] == [["--array=0,2"], ["first=0"]]
    assert alone.batch_log.read_text() == "the log of the job of its own\n"


def test_an_element_goes_on_as_a_chain_and_a_sweep_does_not(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    swept(slurm, count=3, element_0="stopped")
    code, _, err = run(capsys, "--resume", "s1", "--chain", "2")
    assert (code, err.startswith("hpcddp: --chain goes on with one run, ")) == (2, True)
    assert run(capsys, "--resume", "s1_0", "--chain", "2")[0] == 0
    job = ["--dependency=singleton", "--job-name=demo-s1_0", "--no-requeue", "first=0"]
    assert slurm.calls[1:] == [job, job]


def test_a_sweep_that_was_submitted_by_hand_says_how_to_go_on(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    sweep = swept(slurm, count=2)
    sweep.directory.submission.unlink()
    code, _, err = run(capsys, "--resume", "s1")
    assert code == 2
    assert golden.message(err).endswith(f": hpcddp submit JOB --resume {sweep.run(0).path}\n")


def test_a_sweep_is_not_followed(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    swept(slurm, count=2)
    code, _, err = run(capsys, "--resume", "s1", "--follow")
    assert (code, err.startswith("hpcddp: --follow shows one run")) == (2, True)


def test_a_dry_run_says_what_would_continue_and_changes_nothing(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    sweep = swept(slurm, element_0="finished", element_1="failed", element_2="finished", element_4="finished")
    before = sorted(sweep.path.parent.rglob("*"))
    code, out, err = run(capsys, "--resume", "s1", "--dry-run")
    assert (code, out) == (0, "s1_1\ns1_3\n")
    assert golden.message(err).startswith("dry run: would go to slurm, 2 elements ")
    assert err.endswith(f" {sweep.path}; 3 finished, 0 alive\n")
    document = json.loads(run(capsys, "--resume", "s1", "--dry-run", "--json")[1])
    assert document == {
        "sweep_id": "s1",
        "sweep_dir": str(sweep.path),
        "cluster": "slurm",
        "elements": [{"run_id": "s1_1"}, {"run_id": "s1_3"}],
        "finished": 3,
        "alive": 0,
    }
    assert (sorted(sweep.path.parent.rglob("*")), len(slurm.calls)) == (before, 1)


def test_a_dry_run_of_an_element_that_never_began_shows_its_script_and_makes_no_directory(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    Path("job.yaml").write_text(PLACEHOLDERS)
    request = request_of(load_job(Path("job.yaml")), run_id="s1", environment=slurm.environment())
    sweep = submit_sweep(request).sweep
    for words in ((), ("--time", "10"), ("job.yaml",)):
        code, script, err = run(capsys, *words, "--resume", "s1_1", "--dry-run")
        assert (code, commands_of(script)) == (0, ['command: ["true", "--lr=0.2", "{x}"]']), err
        assert err.endswith(f"run directory {sweep.run(1).path}\n")
    pending = {"101_1": {"JobState": "PENDING"}}
    monkeypatch.setattr(commands, "show_job", pending.get)
    code, out, err = run(capsys, "--resume", "s1_1", "--dry-run")
    assert (code, out) == (2, "")
    assert "job 101_1 of the run s1_1 has not ended; " in golden.message(err)
    assert err.endswith(f": hpcddp cancel {sweep.run(1).path}\n")
    assert not sweep.run(1).path.exists()


def test_another_run_root_is_refused_because_a_run_stays_where_it_is(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    sweep = swept(slurm, count=2, element_0="failed")
    for words in (("s1",), ("s1_0",), ("s1_1",), ("s1_0", "--time", "10"), (str(sweep.run(0).path),)):
        code, out, err = run(capsys, "--resume", *words, "--run-root", "other")
        assert (code, out) == (2, "")
        assert f" is in {tmp_path / 'runs'}, " in golden.message(err)
        assert err.endswith("; leave --run-root out\n")
    assert (len(slurm.calls), sweep.run(1).path.exists()) == (1, False)
    assert run(capsys, "--resume", "s1_0", "--run-root", "runs")[0] == 0


PLACEHOLDERS = "name: demo\ncommand: ['true', '--lr={lr}', '{x}']\nsweep: {lr: [0.1, 0.2]}\n"


def commands_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("command: ")]


def test_an_element_with_placeholders_is_resumed_with_options(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text(PLACEHOLDERS)
    request = request_of(load_job(Path("job.yaml")), run_id="s1", environment=slurm.environment())
    sweep = submit_sweep(request).sweep
    element = begin_element(sweep, 1)
    write_record(element.result, Result(status="failed", reason="x"))

    code, _, err = run(capsys, "--resume", "s1_1", "--time", "10")
    assert (code, err) == (0, "")
    assert commands_of(element.script.read_text()) == commands_of(element.job_file.read_text())
    assert "#SBATCH --time=00:10:00\n" in element.script.read_text()
    assert commands_of(element.job_file.read_text()) == ['command: ["true", "--lr=0.2", "{x}"]']

    # A job file has the placeholders; a new command may have them.
    write_record(element.result, Result(status="failed", reason="x"))
    code, script, err = run(capsys, "job.yaml", "--resume", "s1_1", "--dry-run")
    assert (code, commands_of(script)) == (0, ['command: ["true", "--lr=0.2", "{x}"]']), err
    for words, expected in ((["{lr}", "{y}"], '"0.2", "{y}"'), (["${lr}", "7"], '"${lr}", "7"')):
        code, script, err = run(capsys, "--resume", "s1_1", "--dry-run", "--", "true", *words)
        assert (code, commands_of(script)) == (0, [f'command: ["true", {expected}]']), err


def test_an_element_that_cannot_continue_leaves_the_results_of_the_others(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = swept(slurm, count=3, element_0="failed", element_1="failed")
    sweep.run(1).path.chmod(0o770)
    assert run(capsys, "--resume", "s1")[0] == 2
    result = read_result(sweep.run(0))
    assert result is not None
    assert result.status == "failed"
