from __future__ import annotations

from typing import Any

import pytest

from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.slurm.directives import Directive, UnwritableValueError, directives_for
from hpcddp.submission.render import RunIdError, render_script
from tests.messages import GoldenMessages
from tests.submission.requests import request_of


def job(**fields: Any) -> ResolvedJob:
    spec = {
        "name": "example",
        "batch": {"global_batch_size": 8},
        "train": {"model": "resnet18", "dataset": "digits"},
        **fields,
    }
    return ResolvedJob(spec=JobSpec.model_validate(spec), origins={})


def flags(run_id: str | None = "r1", **fields: Any) -> list[str]:
    return [str(directive) for directive in directives_for(job(**fields).spec, run_id=run_id)]


def test_a_small_job_asks_for_little() -> None:
    assert flags(run_id=None) == [
        "--job-name=example",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--output=%x-%j.out",
        "--error=%x-%j.out",
        "--open-mode=append",
        "--requeue",
        "--signal=USR2@120",
    ]


def test_gpus_are_one_task_each() -> None:
    asked = flags(resources={"nodes": 2, "gpus_per_node": 4, "gpu_type": "a100"})
    assert asked[1:4] == ["--nodes=2", "--ntasks-per-node=4", "--gres=gpu:a100:4"]


@pytest.mark.parametrize("field", ["mem", "mem_per_cpu", "mem_per_gpu"])
def test_memory_is_asked_for_as_it_was_said(field: str) -> None:
    assert f"--{field.replace('_', '-')}=64G" in flags(resources={field: "64G", "gpus_per_node": 1})


@pytest.mark.parametrize(
    ("causes", "flag"),
    [
        (("preemption",), "--requeue"),
        (("node_failure", "time_limit"), "--requeue"),
        (("time_limit",), "--no-requeue"),
        ((), "--no-requeue"),
    ],
)
def test_slurm_requeues_by_itself_only_for_causes_that_it_sees_itself(causes: tuple[str, ...], flag: str) -> None:
    assert flag in flags(requeue={"causes": causes})


def test_without_a_lead_there_is_no_signal() -> None:
    assert not any(flag.startswith("--signal") for flag in flags(requeue={"signal_lead": None}))


@pytest.mark.parametrize(
    ("run_root", "log"),
    [
        ("runs", "runs/example/r1/batch.log"),
        ("/scratch/me/", "/scratch/me/example/r1/batch.log"),
        ("/", "/example/r1/batch.log"),
        ("50%j", "50%%j/example/r1/batch.log"),
    ],
)
def test_the_output_of_a_run_lies_in_its_directory(run_root: str, log: str) -> None:
    asked = directives_for(job(run_root=run_root).spec, run_id="r1")
    assert [directive.value for directive in asked if directive.flag in {"output", "error"}] == [log, log]


def test_a_script_by_hand_writes_its_log_beside_it_wherever_runs_live() -> None:
    assert "--output=%x-%j.out" in flags(run_id=None, run_root="a\\b")


def test_a_run_root_with_a_backslash_is_refused_where_slurm_would_write_a_log(golden: GoldenMessages) -> None:
    with pytest.raises(UnwritableValueError) as caught:
        directives_for(job(run_root="a\\b").spec, run_id="r1")
    message = golden.message(caught.value)
    assert message.startswith("run_root is 'a\\\\b', which holds a backslash; ")
    assert message.endswith(": rename it")


def with_field(field: str, value: str) -> ResolvedJob:
    """Return a job that its own types would have refused: whoever builds one in Python may do so."""
    made = job(environment={"env": {"X": "x"}, "modules": ("m",), "setup": ("s",)}).spec
    section, _, name = field.partition(".")
    if not name:
        return ResolvedJob(spec=made.model_copy(update={section: value}), origins={})
    part = getattr(made, section).model_copy(update={name: value} if name != "env" else {"env": {"X": value}})
    if name in {"modules", "setup"}:
        part = part.model_copy(update={name: (value,)})
    return ResolvedJob(spec=made.model_copy(update={section: part}), origins={})


@pytest.mark.parametrize("name", ["partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude"])
def test_a_line_break_in_a_directive_is_refused_by_the_name_of_its_field(golden: GoldenMessages, name: str) -> None:
    with pytest.raises(UnwritableValueError) as caught:
        render_script(request_of(with_field(f"resources.{name}", "a\nb"), python="python", run_id=None))
    message = golden.message(caught.value)
    assert message.startswith(f"resources.{name} is 'a\\nb', which holds a line break; ")
    assert message.endswith(": remove it")


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("environment.env", "environment.env.X"),
        ("environment.modules", "environment.modules[0]"),
        ("environment.setup", "environment.setup[0]"),
        ("run_root", "run_root"),
        ("train.data_dir", "train.data_dir"),
    ],
)
@pytest.mark.parametrize(
    ("value", "holds"),
    [("a\0b", "a NUL character"), ("a\ud800", "half of a character (a lone surrogate)")],
    ids=["NUL", "surrogate"],
)
def test_what_no_script_carries_is_refused_by_the_name_of_its_field(
    golden: GoldenMessages, field: str, named: str, value: str, holds: str
) -> None:
    with pytest.raises(UnwritableValueError) as caught:
        render_script(request_of(with_field(field, value), python="python", run_id=None))
    message = golden.message(caught.value)
    assert message.startswith(f"{named} is {value!r}, which holds {holds}; ")
    assert message.endswith(": remove it")


def test_a_word_of_a_command_that_is_not_utf8_is_refused(golden: GoldenMessages) -> None:
    spec = JobSpec(name="example", command=("python", "caf\udce9"))
    with pytest.raises(UnwritableValueError) as caught:
        render_script(request_of(ResolvedJob(spec=spec, origins={}), python="python", run_id=None))
    message = golden.message(caught.value)
    assert message.startswith("command[1] is 'caf\\udce9', which is not UTF-8 (byte 0xe9); ")
    assert message.endswith(": rename the file, or write the text in UTF-8")


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "-x", "a b", "a\n", "x" * 65, "é"])
def test_a_run_id_that_cannot_name_a_directory_is_refused(golden: GoldenMessages, run_id: str) -> None:
    with pytest.raises(RunIdError) as caught:
        render_script(request_of(job(), python="python", run_id=run_id))
    message = golden.message(caught.value)
    assert message.startswith(f"the run id is {run_id!r}, ")
    assert "; write 1 to 64 letters, digits, '.', '_' and '-', " in message


def test_a_document_that_holds_the_delimiter_gets_another_one() -> None:
    # A line of the document can only be the delimiter if the document is not ours: setup lines are quoted there.
    from hpcddp.submission.render import _delimiter

    assert _delimiter("a\nb") == "HPCDDP_JOB"
    assert _delimiter("a\nHPCDDP_JOB\nb\nHPCDDP_JOB_1") == "HPCDDP_JOB_2"


def test_values_of_the_environment_are_in_no_part_of_the_document() -> None:
    script = render_script(request_of(job(environment={"env": {"X": "a-value"}}), python="python", run_id=None)).text
    assert script.count("a-value") == 1
    assert "export X=a-value\n" in script


def test_a_rendered_script_tells_its_directives() -> None:
    rendered = render_script(request_of(job(resources={"account": "a b"}), python="python", run_id=None))
    assert Directive("account", "a b", "resources.account") in rendered.directives
