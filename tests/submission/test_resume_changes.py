"""Continuing a run with its own job, some values of which the command line changes."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.read import ResolvedJob, change_job, load_job
from hpcddp.jobfile.write import parse_resolved
from hpcddp.manage.run_files import read_run_files
from hpcddp.run.checkpoints import FileRecord, Manifest, read_manifest
from hpcddp.run.directory import RunDirectory
from hpcddp.run.events import read_events
from hpcddp.run.files import read_json
from hpcddp.run.job_file import read_exported_values, read_job_file
from hpcddp.run.job_records import Start, read_submission, write_start, write_submission_record
from hpcddp.run.ownership import RunDirectoryError
from hpcddp.run.record import write_record
from hpcddp.run.result import Result
from hpcddp.slurm import commands
from hpcddp.slurm.commands import SlurmCommandError
from hpcddp.submission.render import render_script
from hpcddp.submission.request import SubmissionError, SubmitRequest
from hpcddp.submission.resume import prepare_resumption, request_to_resume, resume
from hpcddp.submission.submit import prepare, submission_record, write_run
from hpcddp.submission.sweep import submit_sweep
from hpcddp.submission.sweep_element import begin_element
from tests.command_line import hpcddp
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import FakeSlurm, make_fake_slurm
from tests.submission.local_training import metrics_of, run_of, start, steps_of, submit, wait_for_step, write_job
from tests.submission.requests import request_of

TRAIN = """
name: again
resources: {tasks_per_node: 2, time_limit: 2h, partition: short, sbatch: {comment: "a 'word' of mine"}}
environment:
  env: {TOKEN: "it's\\n$HOME \\"x\\"", EMPTY: "", PLAIN: "4"}
  setup: ["echo ready"]
batch: {global_batch_size: 64}
learning_rate: {base: 0.1, schedule: cosine}
train: {model: resnet18, dataset: digits, epochs: 10}
requeue: {signal_lead: 3min}
"""
COMMAND = """
name: again
batch: {global_batch_size: 64}
command: [python3, train.py, --depth, "3"]
"""
ENTRYPOINT = """
name: again
batch: {global_batch_size: 64}
entrypoint: "mine:main"
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_job(tmp_path)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "show_job", lambda _: None)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "mine.py").write_text("def main(context): ...\ndef other(context): ...\n")
    return make_fake_slurm(tmp_path / "slurm")


def submitted(text: str, *, template: str | None = None) -> RunDirectory:
    """Lay down what a submission leaves, of a run whose job has ended."""
    Path("job.yaml").write_text(text)
    request = request_of(load_job(Path("job.yaml")), template=template)
    run = request.run
    run.path.mkdir(parents=True, mode=0o700)
    write_run(run, prepare(request))
    write_submission_record(run, submission_record(request, "7"))
    return run


def changing(
    run: RunDirectory,
    slurm: FakeSlurm,
    *overrides: str,
    command: list[str] | None = None,
    template: str | None = None,
) -> SubmitRequest:
    def change(spec: Any) -> ResolvedJob:
        from hpcddp.jobfile.overrides import read_options

        options = read_options({}, command)
        return change_job(spec, file=str(run.job_file), overrides=overrides, options=options, environment={})

    return request_to_resume(run, change, environment=slurm.environment(), template=template)


def saved(run: RunDirectory, step: int, **contract: Any) -> None:
    """Lay down the manifest of a checkpoint of a training on 1437 samples."""
    document = {"samples": 1437, "unit": "sample", "global_batch_size": 64, **contract}
    manifest = Manifest(step=step, attempt=0, time=0, contract=document, progress={}, information={}, files={})
    path = run.checkpoints / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(manifest.to_text())


def refusal_of(request: SubmitRequest, run: RunDirectory) -> str:
    with pytest.raises((RunDirectoryError, SubmissionError)) as caught:
        prepare_resumption(run, request)
    return str(caught.value).replace(str(run.path), "RUN")


def test_another_time_limit_is_all_that_changes_in_the_script(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(TRAIN)
    assert "#SBATCH --time=02:00:00" in run.script.read_text()
    overrides = ["resources.time_limit=20min", f"run_root={tmp_path}/runs"]
    expected = render_script(request_of(load_job(Path("job.yaml"), overrides=overrides))).text
    monkeypatch.chdir("/")
    resume(run, changing(run, slurm, "resources.time_limit=20min"))
    assert run.script.read_text() == expected
    record = read_submission(run)
    assert record is not None
    assert (record.job_id, record.directory, record.python, record.changes) == ("101", str(tmp_path), "python3", ())


def test_a_range_of_nodes_is_asked_for_again(slurm: FakeSlurm) -> None:
    run = submitted(TRAIN.replace("{tasks_per_node: 2,", "{nodes: 2-4, tasks_per_node: 2,"))
    run.attempt(0).path.mkdir(parents=True)
    write_start(run.attempt(0), Start(job_id="7", host="n1", time=1.0, is_local=False, nodes=3, run_dir=str(run.path)))
    assert read_job_file(run).world_size == 6
    resume(run, changing(run, slurm, "resources.time_limit=20min"))
    assert "#SBATCH --nodes=2-4\n" in run.script.read_text()
    assert 'nodes: "2-4"' in run.job_file.read_text()


def test_another_range_of_nodes_may_follow(slurm: FakeSlurm) -> None:
    run = submitted(TRAIN.replace("{tasks_per_node: 2,", "{nodes: 2-4, tasks_per_node: 2,"))
    resume(run, changing(run, slurm, "resources.nodes=3-8"))
    assert "#SBATCH --nodes=3-8\n" in run.script.read_text()


def test_values_of_environment_variables_are_kept_for_a_resumption(slurm: FakeSlurm) -> None:
    run = submitted(TRAIN)
    assert "TOKEN" not in run.job_file.read_text()
    values = {"TOKEN": 'it\'s\n$HOME "x"', "EMPTY": "", "PLAIN": "4"}
    assert read_exported_values(run) == values
    # What a person writes into the script counts only for the script itself.
    run.script.write_text(run.script.read_text().replace("export PLAIN=4", "export PLAIN=7"))
    request = changing(run, slurm, "environment.env.PLAIN=5", "environment.env.NEW=6")
    assert request.job.spec.environment.env == {**values, "PLAIN": "5", "NEW": "6"}
    resume(run, request)
    assert read_exported_values(run) == {**values, "PLAIN": "5", "NEW": "6"}
    assert "\nexport PLAIN=5\nexport NEW=6\n" in run.script.read_text()


@pytest.mark.usefixtures("slurm")
def test_only_its_owner_can_read_the_file_of_values() -> None:
    before = os.umask(0o022)
    try:
        run = submitted(TRAIN)
    finally:
        os.umask(before)
    holders = {path.name for path in run.path.rglob("*") if path.is_file() and b"$HOME" in path.read_bytes()}
    assert holders == {"environment.json", "job.sbatch"}
    assert stat.S_IMODE(run.exported_values.stat().st_mode) == 0o600


@pytest.mark.usefixtures("slurm")
def test_a_job_without_variables_has_no_values() -> None:
    assert read_exported_values(submitted(COMMAND)) == {}


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("damage", ["missing", "torn", "a number"])
def test_damaged_values_are_one_sentence_and_nothing_is_changed(
    tmp_path: Path, golden: GoldenMessages, damage: str
) -> None:
    run = submitted(TRAIN)
    if damage == "missing":
        run.exported_values.unlink()
    if damage == "torn":
        run.exported_values.write_text(run.exported_values.read_text()[:-9])
    if damage == "a number":
        run.exported_values.write_text('{"format": 1, "env": {"PLAIN": 31337}}')
    before = run.script.read_bytes()
    code, out, error = submit(tmp_path, "--resume", "r1", "--time", "20min")
    assert (code, out) == (2, "")
    message = golden.message(error)
    assert message.startswith(f"hpcddp: {run.exported_values} ")
    # A value may be a secret.
    assert "31337" not in message
    assert message.endswith("; restore a copy of it, or give the job file too: hpcddp submit JOB --resume RUN\n")
    assert (run.script.read_bytes(), read_events(run.events)) == (before, [])


@pytest.mark.usefixtures("slurm")
def test_a_job_file_replaces_damaged_values(tmp_path: Path) -> None:
    run = submitted(TRAIN)
    run.exported_values.write_text("")
    request = request_of(load_job(Path("job.yaml"), overrides=[f"run_root={tmp_path}/runs"]))
    resumption = prepare_resumption(run, request)
    write_run(run, resumption.job)
    assert read_exported_values(run) == request.job.spec.environment.env


@pytest.mark.usefixtures("slurm")
def test_default_settings_of_today_do_not_change_a_run(tmp_path: Path) -> None:
    run = submitted(COMMAND)
    Path("hpcddp.yaml").write_text('resources: {partition: other}\nenvironment: {env: {NEW: "1"}}\n')
    code, out, error = submit(tmp_path, "--resume", "r1", "--time", "20min", "--dry-run", "--cluster", "local")
    assert code == 0, error
    assert "NEW" not in out
    assert "partition" not in out
    assert parse_resolved(run.job_file.read_text()).resources.time_limit is None


@pytest.mark.usefixtures("slurm")
def test_a_dry_run_changes_nothing(tmp_path: Path, golden: GoldenMessages) -> None:
    run = submitted(COMMAND)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    words = ["--resume", "r1", "--dry-run", "--json", "--cluster", "local", "--", "python3", "train.py", "--depth", "4"]
    code, out, error = submit(tmp_path, *words)
    assert code == 0, error
    change, restoring = json.loads(out)["changes"]
    assert golden.message(change).startswith("command python3 train.py --depth 3 -> python3 train.py --depth 4, ")
    assert golden.message(restoring).startswith("the program restores its own state; ")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("job", "override", "change", "advice"),
    [
        (TRAIN, "train.seed=3", "train.seed is 0 there and 3 here, ", "submit a new run"),
        (
            TRAIN.replace("epochs: 10", "epochs: 10, optimizer: {momentum: 0.9}"),
            "train.optimizer.name=adamw",
            'train.optimizer.name is "sgd" there and "adamw" here, ',
            "submit a new run",
        ),
        (TRAIN, "batch.tail=drop", 'batch.tail is "keep" there and "drop" here, ', "submit a new run"),
        (TRAIN, "train.epochs=9", "train.epochs is 10 there and 9 here, ", "submit a new run"),
        (
            TRAIN,
            "learning_rate={base: 0.2, schedule: cosine}",
            "learning_rate.base is 0.1 there and 0.2 here, ",
            ": hpcddp submit --resume RUN --set learning_rate.base=0.2",
        ),
        (
            ENTRYPOINT,
            "entrypoint=mine:other",
            'entrypoint is "mine:main" there and "mine:other" here, ',
            "submit a new run",
        ),
    ],
    ids=lambda value: value if "=" in value and "\n" not in value else "",
)
def test_a_change_that_is_refused_names_the_key_and_the_way_out(
    slurm: FakeSlurm, golden: GoldenMessages, job: str, override: str, change: str, advice: str
) -> None:
    run = submitted(job)
    message = golden.message(refusal_of(changing(run, slurm, override), run))
    assert message.startswith("the run RUN ")
    assert f": {change}" in message
    assert message.endswith(advice)


def test_the_same_optimizer_keeps_its_constants(slurm: FakeSlurm) -> None:
    run = submitted(TRAIN.replace("epochs: 10", "epochs: 10, optimizer: {momentum: 0.9}"))
    assert prepare_resumption(run, changing(run, slurm, "train.optimizer.name=sgd")).changes == ()


@pytest.mark.parametrize(
    ("line", "other", "request_"),
    [
        ("epochs: 10", "epochs: 20", "--set train.epochs=20"),
        ("base: 0.1", "base: 0.2", "--set learning_rate.base=0.2"),
        ("schedule: cosine", "schedule: constant", "--set learning_rate.schedule=constant"),
        ("global_batch_size: 64", "global_batch_size: 128", "--set batch.global_batch_size=128"),
    ],
)
def test_a_job_file_alone_changes_nothing_and_the_refusal_says_how_to_ask(
    slurm: FakeSlurm, golden: GoldenMessages, line: str, other: str, request_: str
) -> None:
    run = submitted(TRAIN)
    Path("job.yaml").write_text(TRAIN.replace(line, other))
    job = load_job(Path("job.yaml"))
    refused = refusal_of(request_of(job, environment=slurm.environment()), run)
    assert golden.message(refused).endswith(f": hpcddp submit --resume RUN {request_}")
    # What the refusal says is what works.
    override = request_.removeprefix("--set ")
    assert prepare_resumption(run, changing(run, slurm, override)).changes


def test_another_command_in_the_job_file_is_asked_for_after_two_dashes(
    slurm: FakeSlurm, golden: GoldenMessages
) -> None:
    run = submitted(COMMAND)
    Path("job.yaml").write_text(COMMAND.replace('"3"', '"4"'))
    refused = refusal_of(request_of(load_job(Path("job.yaml")), environment=slurm.environment()), run)
    assert golden.message(refused).endswith(": hpcddp submit --resume RUN -- python3 train.py --depth 4")


def test_a_value_that_the_command_line_names_counts_with_a_job_file_too(slurm: FakeSlurm) -> None:
    run = submitted(TRAIN)
    job = load_job(Path("job.yaml"), overrides=["train.epochs=20"])
    (change,) = prepare_resumption(run, request_of(job, environment=slurm.environment())).changes
    assert (change.key, change.before, change.after) == ("train.epochs", 10, 20)


def test_changes_are_stated_with_what_follows_from_them(slurm: FakeSlurm, golden: GoldenMessages) -> None:
    run = submitted(TRAIN)
    saved(run, 115)
    overrides = ["train.epochs=20", "learning_rate.base=0.2"]
    resumption = prepare_resumption(run, changing(run, slurm, *overrides))
    golden.message("\n".join(resumption.consequences))
    rate, epochs, end, next_rate = resumption.consequences
    assert rate.startswith("learning_rate.base 0.1 -> 0.2, after step 115, ")
    assert epochs.startswith("train.epochs 10 -> 20, after step 115, ")
    assert end.endswith(" step 460 instead of step 230")
    assert "step 116 is 0.170711 instead of 0.05; " in next_rate
    assert next_rate.endswith("cosine, 20 epochs")


def test_changes_follow_the_newest_checkpoint_whose_files_are_there(slurm: FakeSlurm) -> None:
    run = submitted(TRAIN)
    saved(run, 46)
    saved(run, 115)
    newest = run.checkpoints / "step-000115"
    manifest = replace(read_manifest(newest), files={"model.pt": FileRecord(size=9, sha256="")})
    (newest / "manifest.json").write_text(manifest.to_text())
    (newest / "model.pt").write_text("cut")
    resumption = prepare_resumption(run, changing(run, slurm, "train.epochs=20"))
    assert resumption.consequences[0].startswith("train.epochs 10 -> 20, after step 46, ")


@pytest.mark.parametrize(
    ("step", "samples", "end", "rate"),
    [
        (
            30,
            ("epoch 2 ", " 989 of 1437 samples, in the same order, in 8 batches of 128; ", " 12 steps instead of 23"),
            " step 134 instead of step 230",
            " step 31 is 0.0959396 instead of 0.0958606; ",
        ),
        (
            46,
            ("epoch 3 begins with batches of 128, ", " 12 steps instead of 23"),
            " step 142 instead of step 230",
            " step 47 stays 0.0904508; ",
        ),
    ],
    ids=["in an epoch", "between epochs"],
)
def test_another_global_batch_is_stated_with_the_order_from_here_on(
    slurm: FakeSlurm, golden: GoldenMessages, step: int, samples: tuple[str, ...], end: str, rate: str
) -> None:
    run = submitted(TRAIN)
    saved(run, step)
    consequences = prepare_resumption(run, changing(run, slurm, "batch.global_batch_size=128")).consequences
    golden.message("\n".join(consequences))
    _, order, last_step, next_rate, kappa = consequences
    assert [fact for fact in samples if fact not in order] == []
    assert last_step.endswith(end)
    assert rate in next_rate
    assert kappa.startswith("kappa is 1, because learning_rate.base_global_batch_size is null: ")
    assert "--set learning_rate.base_global_batch_size=64 --set learning_rate.rule=linear or sqrt" in kappa


@pytest.mark.parametrize(
    ("job", "where"),
    [(COMMAND, "from the next start "), (ENTRYPOINT, "no step is saved")],
    ids=["command", "entrypoint"],
)
def test_a_program_gets_another_global_batch_and_must_find_its_samples(
    slurm: FakeSlurm, golden: GoldenMessages, job: str, where: str
) -> None:
    run = submitted(job)
    change, data = prepare_resumption(run, changing(run, slurm, "batch.global_batch_size=128")).consequences
    assert golden.message(change).startswith("batch.global_batch_size 64 -> 128, ")
    assert where in change
    assert "must find the next sample itself" in golden.message(data)


@pytest.mark.parametrize("job", [COMMAND, ENTRYPOINT], ids=["command", "entrypoint"])
def test_a_resumption_gives_a_program_no_learning_rate_that_its_job_does_not_state(slurm: FakeSlurm, job: str) -> None:
    run = submitted(job)
    resume(run, changing(run, slurm, "resources.time_limit=20min"))
    assert "base:" not in run.script.read_text()
    assert "base:" not in run.job_file.read_text()
    assert read_json(run.plan)["learning_rate"] is None


def test_a_program_without_a_global_batch_gets_one(slurm: FakeSlurm, golden: GoldenMessages) -> None:
    run = submitted(COMMAND.replace("batch: {global_batch_size: 64}\n", ""))
    change, *_ = prepare_resumption(run, changing(run, slurm, "batch.global_batch_size=128")).consequences
    assert golden.message(change).startswith("batch.global_batch_size null -> 128, from the next start ")


def test_kappa_and_the_rule_are_stated_where_the_job_scales_its_rate(slurm: FakeSlurm, golden: GoldenMessages) -> None:
    run = submitted(TRAIN)
    overrides = [
        "batch.global_batch_size=128",
        "learning_rate.base_global_batch_size=64",
        "learning_rate.rule=linear",
    ]
    *_, kappa = prepare_resumption(run, changing(run, slurm, *overrides)).consequences
    assert golden.message(kappa).startswith("kappa is 2 instead of 1, ")
    assert " rule linear " in kappa
    assert kappa.endswith(" 0.2 instead of 0.1")


def test_changes_are_recorded_and_shown(slurm: FakeSlurm) -> None:
    run = submitted(TRAIN)
    resume(run, changing(run, slurm, "train.epochs=20"))
    run.attempt(0).path.mkdir(parents=True, mode=0o700)
    write_start(run.attempt(0), Start(job_id="101", host="n1", time=0.0, is_local=False))
    resume(run, changing(run, slurm, "learning_rate.base=0.05"))
    # A resumption without changes keeps what is recorded.
    resume(run, request_to_resume(run, environment=slurm.environment()))
    record = read_submission(run)
    assert record is not None
    assert [(change.key, change.before, change.after, change.attempt) for change in record.changes] == [
        ("train.epochs", 10, 20, 0),
        ("learning_rate.base", 0.1, 0.05, 1),
    ]
    named = [event.facts.get("changes") for event in read_events(run.events) if event.kind == "resume"]
    assert named == [["train.epochs 10 -> 20"], ["learning_rate.base 0.1 -> 0.05"], None]
    assert list(map(str, read_run_files(run).changes)) == ["train.epochs 10 -> 20", "learning_rate.base 0.1 -> 0.05"]


def test_a_submission_that_fails_leaves_the_job_as_it_was(slurm: FakeSlurm) -> None:
    run = submitted(TRAIN)
    files = (run.job_file, run.plan, run.exported_values, run.script)
    before = [path.read_bytes() for path in files]
    request = changing(run, slurm, "train.epochs=20")
    environment = slurm.environment(REFUSED_CALL="1", REFUSAL="no")
    with pytest.raises(SlurmCommandError, match="no"):
        resume(run, SubmitRequest(**{**_fields(request), "environment": environment}))
    assert [path.read_bytes() for path in files] == before


def _fields(request: SubmitRequest) -> dict[str, Any]:
    names = ("job", "run_id", "cluster", "python", "template", "directory", "environment", "dependency")
    return {name: getattr(request, name) for name in names}


@pytest.mark.parametrize(
    ("job", "overrides", "command"),
    [(TRAIN, ["train.epochs=20"], None), (COMMAND, [], ["python3", "train.py", "--depth", "4"])],
)
def test_a_run_that_has_finished_goes_on_if_it_gets_more_to_do(
    slurm: FakeSlurm, job: str, overrides: list[str], command: list[str] | None
) -> None:
    run = submitted(job)
    write_record(run.result, Result(status="finished"))
    resume(run, changing(run, slurm, *overrides, command=command))
    assert not run.result.exists()


@pytest.mark.parametrize("overrides", [["learning_rate.base=0.2"], ["train.epochs=10"], []])
def test_a_run_that_has_finished_has_nothing_to_do_at_another_rate(
    slurm: FakeSlurm, golden: GoldenMessages, overrides: list[str]
) -> None:
    run = submitted(TRAIN)
    write_record(run.result, Result(status="finished"))
    assert "has finished, " in golden.message(refusal_of(changing(run, slurm, *overrides), run))


def test_a_run_of_a_template_of_its_own_goes_on_with_it_and_with_its_values(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = '{% extends "hpcddp/sbatch.sh.j2" %}{% block before_tasks %}\necho mine\n{% endblock %}\n'
    Path("mine.sh.j2").write_text(template)
    run = submitted(TRAIN, template="./mine.sh.j2")
    monkeypatch.chdir("/")
    resume(run, request_to_resume(run, environment=slurm.environment()))
    script = run.script.read_text()
    assert ("echo mine" in script, "export PLAIN=4\n" in script) == (True, True)
    resume(run, changing(run, slurm, "resources.time_limit=20min", template="sbatch"))
    assert "echo mine" not in run.script.read_text()


@pytest.mark.usefixtures("slurm")
def test_a_sweep_option_is_refused_with_a_run(tmp_path: Path, golden: GoldenMessages) -> None:
    submitted(TRAIN)
    code, out, error = submit(tmp_path, "--resume", "r1", "--sweep", "train.seed=0..4")
    assert (code, out) == (2, "")
    assert golden.message(error).startswith("hpcddp: --resume continues one run, ")
    assert error.endswith("; leave one of them out\n")


@pytest.mark.usefixtures("slurm")
def test_a_wrong_value_is_one_sentence_and_nothing_is_changed(tmp_path: Path) -> None:
    run = submitted(TRAIN)
    before = run.job_file.read_bytes()
    code, out, error = submit(tmp_path, "--resume", "r1", "--set", "train.epochs=many")
    assert (code, out) == (2, "")
    assert "--set train.epochs" in error
    assert "'many'" in error
    assert (run.job_file.read_bytes(), read_events(run.events)) == (before, [])


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("work", "ending"),
    [
        (COMMAND, "arguments: hpcddp submit --resume r1 -- COMMAND\n"),
        (ENTRYPOINT, "entrypoint; leave it out\n"),
    ],
    ids=["command", "entrypoint"],
)
def test_a_field_of_a_training_is_refused_for_a_run_that_is_none(
    tmp_path: Path, golden: GoldenMessages, work: str, ending: str
) -> None:
    submitted(work)
    code, out, error = submit(tmp_path, "--resume", "r1", "--set", "train.epochs=35")
    assert (code, out) == (2, "")
    assert golden.message(error).startswith("hpcddp: train.epochs (--set) ")
    assert error.endswith(ending)


def test_a_training_goes_on_with_more_epochs_and_another_rate(directory: Path) -> None:
    follower = start(directory, "job.yaml", "--cluster", "local", "--follow", "--set", "resources.tasks_per_node=1")
    run = wait_for_step(directory, 5)
    follower.terminate()
    follower.communicate(timeout=120)
    stopped = steps_of(run)[-1]
    words = ["--resume", run.run_id, "--set", "train.epochs=7", "--set", "learning_rate.base=0.05"]
    code, out, error = submit(directory, *words, "--follow", "--json")
    assert code == 0, error
    assert json.loads(out)["status"] == "finished"
    assert steps_of(run) == list(range(1, 162))
    rates = [json.loads(line).get("lr") for line in metrics_of(run).splitlines()]
    assert [rate for rate in rates if rate is not None] == [0.1] * stopped + [0.05] * (161 - stopped)
    assert f"change: train.epochs 6 -> 7, after step {stopped}, " in error
    assert f" step {stopped + 1} is 0.05 instead of 0.1;" in error
    # It has finished, and goes on all the same.
    code, out, error = submit(directory, "--resume", run.run_id, "--set", "train.epochs=8", "--follow", "--json")
    assert code == 0, error
    assert steps_of(run_of(directory)) == list(range(1, 185))


def test_a_training_goes_on_with_another_global_batch_and_other_resources(directory: Path) -> None:
    follower = start(directory, "job.yaml", "--cluster", "local", "--follow")
    run = wait_for_step(directory, 5)
    # To end the follower means the same as Ctrl-C.
    follower.terminate()
    follower.communicate(timeout=120)
    stopped = steps_of(run)[-1]
    epochs, step_in_epoch = divmod(stopped, 23)
    left = 1437 - 64 * step_in_epoch
    # 128 samples are 12 steps of a whole epoch.
    total = stopped + -(-left // 128) + 12 * (5 - epochs)
    words = ["--resume", run.run_id, "--global-batch-size", "128", "--tasks-per-node", "1"]
    code, out, error = submit(directory, *words, "--follow", "--json")
    assert code == 0, error
    assert f"change: epoch {epochs + 1} " in error
    assert f" {left} of 1437 samples, in the same order" in error
    assert f" step {total} instead of step 138\n" in error
    assert steps_of(run) == list(range(1, total + 1))
    document = json.loads(out)["result"]
    assert (document["steps"], document["samples_seen"], document["world_size"]) == (total, 6 * 1437, 1)
    assert "tasks_per_node: 1" in run.job_file.read_text()
    assert f"epoch 6/6  step {total}/{total}  " in error
    explained = hpcddp(directory, "why", run.run_id)
    assert ", batch.global_batch_size 64 -> 128\n" in explained.stdout
    shown = hpcddp(directory, "status", run.run_id, "--json")
    assert '"batch.global_batch_size 64 -> 128"' in shown.stdout


def test_an_element_of_a_sweep_takes_a_value_that_the_command_line_names(slurm: FakeSlurm) -> None:
    text = COMMAND + "sweep: {learning_rate.base: [0.1, 0.2], environment.env.SIDE: [left, right]}\n"
    Path("job.yaml").write_text(text + "environment: {env: {TOKEN: secret}}\n")
    sweep = submit_sweep(request_of(load_job(Path("job.yaml")), run_id="s1", environment=slurm.environment())).sweep
    run = begin_element(sweep, 1)
    request = changing(run, slurm, "learning_rate.base=0.3", "resources.time_limit=20min")
    resume(run, request)
    spec = parse_resolved(run.job_file.read_text())
    assert (spec.learning_rate.base, spec.sweep) == (0.3, None)
    assert read_exported_values(sweep.directory) == {"TOKEN": "secret"}
    assert read_exported_values(run) == {"TOKEN": "secret", "SIDE": "right"}
    assert "#SBATCH --array" not in run.script.read_text()


def test_an_element_keeps_the_value_of_its_last_resumption(slurm: FakeSlurm) -> None:
    text = COMMAND + "sweep: {learning_rate.base: [0.1, 0.2], environment.env.SIDE: [left, right]}\n"
    Path("job.yaml").write_text(text)
    sweep = submit_sweep(request_of(load_job(Path("job.yaml")), run_id="s1", environment=slurm.environment())).sweep
    run = begin_element(sweep, 1)
    resume(run, changing(run, slurm, "learning_rate.base=0.3", "environment.env.SIDE=up"))
    assert list(map(str, read_run_files(run).changes)) == [
        "learning_rate.base 0.1 -> 0.3", 'environment.env.SIDE "right" -> "up"',
    ]  # fmt: skip
    resume(run, changing(run, slurm, "resources.time_limit=20min"))
    assert parse_resolved(run.job_file.read_text()).learning_rate.base == 0.3
    assert read_exported_values(run) == {"SIDE": "up"}
    assert "\nexport SIDE=up\n" in run.script.read_text()
    assert len(read_run_files(run).changes) == 2


@pytest.mark.long("test_api.py resumes a run with another command")
def test_a_command_goes_on_with_other_arguments(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint('arguments', sys.argv[1:])\nsys.exit('x' in sys.argv)\n")
    words = ["--cluster", "local", "--name", "again", "--follow", "--set", "environment.env.KEPT=1", "--"]
    code, _, error = submit(tmp_path, *words, sys.executable, str(program), "x")
    assert code == 1, error
    run = run_of(tmp_path)
    again = partial(submit, tmp_path, "--resume", run.run_id, "--follow")
    code, out, error = again("--", sys.executable, str(program), "y")
    assert code == 0, out + error
    assert "arguments ['y']" in run.attempt(1).path.joinpath("rank-0.log").read_text()
    assert "change: command " in error
    assert "export KEPT=1\n" in run.script.read_text()


@pytest.mark.parametrize("damage", ["directory", "pipe"])
def test_a_damaged_plan_does_not_hold_up_a_resumption(slurm: FakeSlurm, golden: GoldenMessages, damage: str) -> None:
    run = submitted(TRAIN)
    script = run.script.read_text()
    run.plan.unlink()
    if damage == "pipe":
        # It is replaced; reading it would never end.
        os.mkfifo(run.plan)
        resume(run, changing(run, slurm, "resources.time_limit=3h"))
        assert run.plan.is_file()
        return
    run.plan.mkdir()
    with pytest.raises(SubmissionError, match=r"plan\.json cannot be replaced \(Is a dir") as caught:
        resume(run, changing(run, slurm, "resources.time_limit=3h"))
    golden.message(caught.value)
    assert run.script.read_text() == script
    assert slurm.calls == []


def test_a_resumption_that_slurm_refuses_leaves_the_result(slurm: FakeSlurm) -> None:
    run = submitted(TRAIN)
    request = changing(run, slurm, "train.epochs=20")
    environment = slurm.environment(REFUSED_CALL="1", REFUSAL="Invalid qos specification")
    refused = SubmitRequest(**{**_fields(request), "environment": environment})
    for status, submit_again in (
        ("finished", partial(resume, run, refused)),
        ("failed", partial(resume, run, request_to_resume(run, environment=environment))),
    ):
        (slurm.directory / "calls").unlink(missing_ok=True)
        write_record(run.result, Result(status=status, reason="x"))
        with pytest.raises(SlurmCommandError, match="Invalid qos"):
            submit_again()
        assert json.loads(run.result.read_text())["status"] == status
