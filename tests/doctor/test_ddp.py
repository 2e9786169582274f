"""What the doctor says of jobs whose ranks train what one process trains, and of those whose ranks do not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import typer

from hpcddp.cli import boundary
from hpcddp.cli.doctor import ddp
from hpcddp.doctor.ddp import rank
from hpcddp.doctor.ddp.compare import (
    DdpDiagnosis,
    DdpFinding,
    ProcessSettings,
    comparison_of,
    examine_job,
    failure,
    run_ranks,
)
from hpcddp.doctor.errors import ComparisonError
from hpcddp.jobfile.job import JobSpec
from hpcddp.slurm.rank_env import RankEnv
from tests.messages import GoldenMessages
from tests.ranks import ForkedProcess

ROOT = Path(__file__).parents[2]
MODELS = "tests.doctor.ddp_models"


def document(model: str, *, size: int = 31, **changes: Any) -> dict[str, Any]:
    train = {"model": f"{MODELS}:{model}", "dataset": "synthetic", **changes.pop("train", {})}
    batch = {"global_batch_size": size, **changes.pop("batch", {})}
    return {"name": "small", "batch": batch, "learning_rate": {"base": 0.1}, "train": train, **changes}


def diagnose(job: Mapping[str, Any], world_size: int | None = 2) -> DdpDiagnosis:
    spec = JobSpec.model_validate(job)
    return examine_job(spec, world_size=world_size, steps=3, directory=ROOT, environment=os.environ, timeout_s=240)


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "clean": (document("with_batch_norm", batch={"max_per_device_batch_size": 4}), 3),
    "complex": (document("turning"), 2),
    "scaled": (document("scaled", train={"batch_norm": "sync"}), 2),
    "centred": (document("centred"), 2),
    "gated": (document("gated"), 2),
    "by_rank": (document("by_rank"), 2),
    "sum": (document("linear", train={"loss": f"{MODELS}:total_loss", "loss_reduction": "sum"}), 3),
    "sum, not declared": (document("linear", train={"loss": f"{MODELS}:total_loss"}), 2),
    "class weights": (document("linear", train={"loss": f"{MODELS}:class_weights"}), 2),
    "unscaled": (document("linear", train={"loss": f"{MODELS}:unscaled", "loss_reduction": "global"}), 2),
    "gather": (document("linear", size=32, train={"loss": f"{MODELS}:repulsion", "loss_reduction": "global"}), 4),
    "by RANK": (document("by_variable"), 2),
    "by WORLD_SIZE": (document("smaller_with_more_ranks"), 2),
    "shard": (
        document("linear", train={"dataset": f"{MODELS}:shard", "num_classes": 10, "epochs": 1}, size=32),
        2,
    ),
    "dead": (document("dead"), 2),
    "noisy": (document("noisy"), 2),
    "other_samples": (document("stubborn", train={"dataset": f"{MODELS}:other_samples", "num_classes": 10}), 2),
}


def start_forked(settings: ProcessSettings, folder: Path, env: RankEnv) -> ForkedProcess:
    """Start a rank as ``hpcddp.doctor.ddp.compare`` does, but for its interpreter, which has imported torch already."""
    return ForkedProcess(
        run_rank,
        (folder, settings.steps, settings.directory, settings.timeout_s),
        environment={**settings.environment, **env.slurm_exports(), **env.exports("127.0.0.1", 29500)},
        directory=settings.directory,
        output=folder / f"rank-{env.rank}.log",
    )


def run_rank(folder: Path, steps: int, directory: Path, timeout_s: float) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.path.insert(0, str(directory))
    return rank.main(folder, steps, timeout_s)


@pytest.fixture(scope="module")
def diagnoses() -> Mapping[str, Future[DdpDiagnosis]]:
    """Most of a comparison is the start of its processes: here they are forked. Other tests start them as users do."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr("hpcddp.doctor.ddp.compare._start", start_forked)
        futures = {name: pool.submit(diagnose, *case) for name, case in CASES.items()}
        wait(futures.values())
        return futures


def kinds(diagnosis: DdpDiagnosis) -> dict[str, str]:
    return {finding.kind: finding.severity for finding in diagnosis.findings}


def finding(diagnosis: DdpDiagnosis, kind: str) -> DdpFinding:
    return next(found for found in diagnosis.findings if found.kind == kind)


def test_what_trains_the_same_has_a_note_on_batch_norm_alone(
    golden: GoldenMessages,
    diagnoses: Mapping[str, Future[DdpDiagnosis]],
) -> None:
    found = diagnoses["clean"].result()
    assert kinds(found) == {"batch_norm": "note"}
    assert not found.defect
    assert found.comparison.grad_accum_steps == 2
    assert found.gradient_error is not None
    assert found.gradient_error <= 1e-12
    assert "BatchNorm (1 layer)" in golden.message(finding(found, "batch_norm").sentence)
    verdict, compared, *_ = found.explain().splitlines()
    assert verdict == "small: THE SAME"
    golden.message(compared)
    assert "3 ranks, 2 micro-steps each" in compared
    assert "3 steps of 31 samples" in compared


@pytest.mark.parametrize("name", ["sum, not declared", "class weights", "unscaled", "gather"])
def test_a_wrong_loss_is_looked_for_in_the_loss(name: str, diagnoses: Mapping[str, Future[DdpDiagnosis]]) -> None:
    assert diagnoses["sum"].result().findings == ()
    found = diagnoses[name].result()
    assert kinds(found) == {"gradient": "defect"}
    assert "(hpcddp doctor loss tests.doctor.ddp_models:" in found.findings[0].way_out


def test_complex_parameters_are_compared_in_both_parts(diagnoses: Mapping[str, Future[DdpDiagnosis]]) -> None:
    found = diagnoses["complex"].result()
    assert kinds(found) == {"gradient": "defect"}
    assert "The gradient of weight is off by" in finding(found, "gradient").sentence
    assert found.comparison.precision == "fp64"


def test_the_parameter_with_the_largest_error_is_named(
    golden: GoldenMessages,
    diagnoses: Mapping[str, Future[DdpDiagnosis]],
) -> None:
    found = diagnoses["scaled"].result()
    # The gradient of 4.weight is half as long at 2 ranks, and that of 4.bias twice as long.
    assert kinds(found) == {"gradient": "defect"}
    sentence = golden.message(found.findings[0].sentence)
    assert sentence == "The gradient of 4.bias and 1 more parameter is off by 100 % in step 1."
    assert found.gradient_error is not None
    assert found.gradient_error >= 1 - 1e-9


@pytest.mark.parametrize("name", ["centred", "gated", "by RANK"])
def test_a_model_that_depends_on_the_rank_or_on_other_samples_is_a_defect(
    name: str, diagnoses: Mapping[str, Future[DdpDiagnosis]]
) -> None:
    assert kinds(diagnoses[name].result()) == {"gradient": "defect"}


def test_replicas_that_diverge_are_a_defect(
    golden: GoldenMessages, diagnoses: Mapping[str, Future[DdpDiagnosis]]
) -> None:
    found = diagnoses["by_rank"].result()
    assert kinds(found) == {"drift": "defect"}
    drift = golden.message(finding(found, "drift").sentence)
    assert "After step 1 " in drift
    assert "body.2.weight on rank 1" in drift


def test_first_weights_that_depend_on_the_number_of_ranks_in_the_environment_are_a_defect(
    diagnoses: Mapping[str, Future[DdpDiagnosis]],
) -> None:
    assert kinds(diagnoses["by WORLD_SIZE"].result()) == {"initial_values": "defect"}


def test_a_data_set_that_shards_by_the_environment_is_a_defect_also_where_ranks_make_fewer_steps(
    diagnoses: Mapping[str, Future[DdpDiagnosis]],
) -> None:
    assert kinds(diagnoses["shard"].result()) == {"samples": "defect"}
    assert diagnoses["shard"].result().steps == 2


def test_a_model_without_any_gradient_leaves_nothing_to_compare(
    golden: GoldenMessages, diagnoses: Mapping[str, Future[DdpDiagnosis]]
) -> None:
    with pytest.raises(ComparisonError) as caught:
        diagnoses["dead"].result()
    message = golden.message(caught.value)
    assert "gradient of every parameter is 0" in message
    assert "in every step" in message


def test_noise_that_hides_whether_gradients_are_right_is_no_all_clear(
    golden: GoldenMessages, diagnoses: Mapping[str, Future[DdpDiagnosis]]
) -> None:
    with pytest.raises(ComparisonError) as caught:
        diagnoses["noisy"].result()
    assert "random numbers other than dropout" in golden.message(caught.value)


def test_every_rank_is_told_who_it_is_and_the_one_process_that_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "7")
    with pytest.raises(
        ComparisonError,
        match="RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 NODE_RANK=0 SLURM_PROCID=0 SLURM_NTASKS=1",
    ):
        diagnose(document("told"))
    job = comparison_of(JobSpec.model_validate(document("told")), world_size=2)
    where = ProcessSettings(
        python=sys.executable,
        directory=ROOT,
        environment=os.environ,
        scratch=tmp_path,
        steps=1,
        timeout_s=240,
    )
    last = run_ranks(where, "ranks", job.document(ranks=2), 2)[1]
    assert last["error"]["message"].endswith(
        "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 NODE_RANK=0 SLURM_PROCID=1 SLURM_NTASKS=2"
    )


def test_samples_that_depend_on_the_rank_are_counted_in_the_precision_that_the_model_takes(
    golden: GoldenMessages,
    diagnoses: Mapping[str, Future[DdpDiagnosis]],
) -> None:
    found = diagnoses["other_samples"].result()
    assert found.comparison.precision == "fp32"
    assert kinds(found) == {"samples": "defect"}
    assert "15 of 31 samples of step 1" in golden.message(found.findings[0].sentence)


def test_the_command_prints_one_document_and_exits_with_2_for_a_job_that_does_not_run(
    golden: GoldenMessages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()
    app.command()(ddp)
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(document("broken")))
    monkeypatch.chdir(ROOT)
    assert boundary.run(app, [str(job), "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    golden.message(message)
    assert "does not run in one process" in message
    assert f"train.model is {MODELS}:broken" in message
    assert "no model of 10 classes today" in message


def test_the_command_exits_with_1_for_a_defect_and_0_without(
    diagnoses: Mapping[str, Future[DdpDiagnosis]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = typer.Typer()
    app.command()(ddp)
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(document("scaled")))
    for name, code in (("scaled", 1), ("clean", 0)):
        known = diagnoses[name].result()
        monkeypatch.setattr("hpcddp.doctor.ddp.compare.examine_job", lambda *_, known=known, **__: known)
        assert boundary.run(app, [str(job), "--json"]) == code
        printed = json.loads(capsys.readouterr().out)
        assert printed["defect"] is (code == 1)
        assert {found["kind"] for found in printed["findings"]} == set(kinds(known))


def test_what_leaves_nothing_to_compare_is_refused(golden: GoldenMessages) -> None:
    job = JobSpec.model_validate(document("linear", size=7))
    with pytest.raises(ComparisonError) as caught:
        comparison_of(job, world_size=1)
    message = golden.message(caught.value)
    assert "--world-size is 1" in message
    assert "write 2 or more" in message
    with pytest.raises(ComparisonError) as caught:
        comparison_of(job, world_size=4)
    message = golden.message(caught.value)
    assert "batch.global_batch_size is 7" in message
    assert "leaves 4 ranks fewer than two" in message
    assert "write 8 or more" in message
    with pytest.raises(ComparisonError, match="the job has no train section"):
        comparison_of(job.model_copy(update={"train": None}), world_size=2)


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (3, 3), (64, 4)])
def test_the_job_says_how_many_ranks_within_what_one_machine_runs(nodes: int, ranks: int) -> None:
    job = JobSpec.model_validate(document("linear", size=128, resources={"nodes": nodes}))
    comparison = comparison_of(job, world_size=None)
    assert (comparison.world_size, comparison.global_batch_size) == (ranks, 32)


def test_a_rank_that_fails_alone_is_quoted_and_the_first_one_is(golden: GoldenMessages) -> None:
    comparison = comparison_of(JobSpec.model_validate(document("linear")), world_size=2)
    errors = [
        {"kind": "unexpected", "message": "Connection closed by peer", "time": 2.0},
        {"kind": "user_code", "message": "train.model failed", "time": 1.0},
    ]
    found = failure(errors, comparison)
    assert (found.kind, found.severity) == ("fails_on_ranks", "defect")
    assert "2 ranks do not: train.model failed." in golden.message(found.sentence)


def settings(tmp_path: Path, python: str) -> ProcessSettings:
    return ProcessSettings(
        python=python, directory=ROOT, environment=os.environ, scratch=tmp_path, steps=1, timeout_s=0.2
    )


def test_ranks_that_take_too_long_are_ended_and_said_to(golden: GoldenMessages, tmp_path: Path) -> None:
    with pytest.raises(ComparisonError) as caught:
        run_ranks(settings(tmp_path, sys.executable), "ranks", "", 2)
    message = golden.message(caught.value)
    assert "2 ranks took longer than 0.2 s" in message
    assert "raise --timeout" in message


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ComparisonError, match="the interpreter /nowhere/python cannot be started"):
        run_ranks(settings(tmp_path, "/nowhere/python"), "ranks", "", 1)


def test_a_rank_that_dies_is_quoted(golden: GoldenMessages, tmp_path: Path) -> None:
    slow = ProcessSettings(
        python="/bin/false", directory=ROOT, environment=os.environ, scratch=tmp_path, steps=1, timeout_s=60
    )
    (report,) = run_ranks(slow, "ranks", "", 1)
    message = golden.message(report["error"]["message"])
    assert "rank 0 ended with code 1" in message
    assert "printed nothing" in message
