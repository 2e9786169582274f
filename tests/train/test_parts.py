"""Small parts of the training: precision, schedule, metrics, votes, random numbers, optimizers."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from hpcddp.batch.plan import Steps, plan_batch
from hpcddp.jobfile.fields import Every
from hpcddp.jobfile.sections import LearningRate, Optimizer
from hpcddp.run.metrics import keep_until
from hpcddp.run.metrics_log import MetricsFile
from hpcddp.run.record import RecordError
from hpcddp.stop.reasons import StopReason
from hpcddp.train.data.loader import Placement
from hpcddp.train.errors import TrainingError
from hpcddp.train.loop.agreement import Agreed, PendingAgreement, StepPart, StepSums, Votes
from hpcddp.train.loop.job import parameters_sha256
from hpcddp.train.loop.schedule import Schedule
from hpcddp.train.model.replica import build_optimizer, place_model, set_learning_rate
from hpcddp.train.precision import Precision, set_up_backends
from hpcddp.train.randomness import keyed_seed
from tests.messages import GoldenMessages
from tests.train.scaled_steps import parameters_after_steps

NAMES: tuple[Any, ...] = ("fp32", "tf32", "bf16", "fp16", "fp64")


def make_schedule(**changes: Any) -> Schedule:
    numbers: dict[str, Any] = {
        "steps": Steps.from_beginning(plan_batch(global_batch_size=32, world_size=2, samples=100)),
        "epochs": 3,
        "learning_rate": LearningRate(),
        "eval_every": 1,
        "every": Every(duration=timedelta(minutes=10)),
    }
    return Schedule(**{**numbers, **changes})


@pytest.mark.parametrize("name", NAMES)
def test_precision_says_what_parameters_and_products_are(name: Any) -> None:
    precision = Precision(name, "cuda")
    assert precision.dtype == (torch.float64 if name == "fp64" else torch.float32)
    # The fp16 scaler of a GPU warns where there is none.
    assert Precision(name, "cpu").scaler().is_enabled() == (name == "fp16")


@pytest.mark.parametrize(
    ("name", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp64", torch.float64)]
)
def test_forward_computes_in_the_precision(name: Any, expected: torch.dtype) -> None:
    precision = Precision(name, "cpu")
    layer = nn.Linear(2, 2).to(precision.dtype)
    with precision.autocast():
        assert layer(torch.ones(1, 2, dtype=precision.dtype)).dtype == expected


@pytest.mark.parametrize(("name", "products"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")])
def test_only_tf32_lets_products_round(name: Any, products: str) -> None:
    set_up_backends(Precision(name, "cpu"), deterministic=False)
    assert torch.backends.cuda.matmul.fp32_precision == products
    assert torch.backends.cudnn.conv.fp32_precision == products  # type: ignore[attr-defined]
    set_up_backends(Precision("fp32", "cpu"), deterministic=False)


@pytest.mark.parametrize("before", ["new API", "old API", "medium"])
@pytest.mark.parametrize("name", ["fp32", "tf32", "fp64"])
def test_precision_of_products_can_be_read_through_both_apis_of_torch(before: str, name: Any) -> None:
    # torch's compiler and code of users read the old one, which raises where the new one says something else.
    backends: Any = torch.backends
    if before == "new API":
        backends.cuda.matmul.fp32_precision = backends.cudnn.conv.fp32_precision = "tf32"
    elif before == "old API":
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = True
    else:
        torch.set_float32_matmul_precision("medium")
    try:
        set_up_backends(Precision(name, "cuda"), deterministic=False)
        rounds = name == "tf32"
        assert backends.cuda.matmul.allow_tf32 is rounds
        assert backends.cudnn.allow_tf32 is rounds
        assert torch.get_float32_matmul_precision() == ("high" if rounds else "highest")
        new = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        assert [backend.fp32_precision for backend in new] == ["tf32" if rounds else "ieee"] * 3
    finally:
        set_up_backends(Precision("fp32", "cpu"), deterministic=False)


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_sets_every_switch(monkeypatch: pytest.MonkeyPatch, *, deterministic: bool) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_up_backends(Precision("fp32", "cuda"), deterministic=deterministic)
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.backends.cudnn.deterministic is deterministic
    assert torch.backends.cudnn.benchmark is not deterministic
    set_up_backends(Precision("fp32", "cpu"), deterministic=False)
    assert not torch.backends.cudnn.benchmark


def test_workspace_that_does_not_repeat_results_is_refused(
    golden: GoldenMessages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(TrainingError) as caught:
        set_up_backends(Precision("fp32", "cuda"), deterministic=True)
    message = golden.message(caught.value)
    assert "CUBLAS_WORKSPACE_CONFIG is :0:0" in message
    assert "write :4096:8 or :16:8" in message


def test_positions_are_the_same_from_wherever_one_begins() -> None:
    schedule = make_schedule()
    whole = list(schedule.positions(0))
    assert len(whole) == schedule.total_steps == 12
    assert list(schedule.positions(5)) == whole[5:]
    assert [position.samples for position in whole[:5]] == [32, 32, 32, 4, 32]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (Every(duration=timedelta(minutes=1)), [4, 8, 12]),
        (Every(steps=5), [4, 5, 8, 10, 12]),
        (Every(epochs=2), [8, 12]),
    ],
)
def test_saves_come_at_epoch_ends_and_as_asked(every: Every, expected: list[int]) -> None:
    schedule = make_schedule(every=every)
    assert [position.step + 1 for position in schedule.positions(0) if schedule.saves_after(position)] == expected


def test_missing_evaluation_is_one_that_was_due_and_not_made() -> None:
    schedule = make_schedule(eval_every=2)
    assert [step for step in range(13) if schedule.evaluation_missing(step, None)] == [8, 12]
    assert not schedule.evaluation_missing(8, 8)
    assert schedule.evaluation_missing(12, 8)


def test_metrics_are_written_at_once_and_the_file_is_opened_anew_after_a_while(tmp_path: Path) -> None:
    path, clock, checks = tmp_path / "metrics.jsonl", [0.0], []
    metrics = MetricsFile(path, monotonic=lambda: clock[0], before_open=lambda: checks.append(1), warn=print)
    metrics.add({"step": 1, "loss": float("nan")})
    assert path.read_text() == '{"step": 1, "loss": null}\n'
    metrics.add({"step": 2, "loss": 0.1})
    clock[0] = 2.0
    metrics.add({"step": 3, "loss": float("inf")})
    assert path.read_text() == '{"step": 1, "loss": null}\n{"step": 2, "loss": 0.1}\n{"step": 3, "loss": null}\n'
    metrics.flush()
    assert len(checks) == 1
    # A later attempt has written the file anew.
    path.unlink()
    metrics.add({"step": 4})
    assert path.read_text() == '{"step": 4}\n'
    assert len(checks) == 2


def test_a_process_that_aborts_loses_no_step_that_it_has_recorded(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom hpcddp.run.metrics_log import MetricsFile\n"
        "metrics = MetricsFile(Path(sys.argv[1]), before_open=lambda: None, warn=print)\n"
        "for step in range(1, 6):\n    metrics.add({'step': step})\n"
        "os.abort()\n"
    )
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGABRT
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_metrics_that_a_disk_over_the_network_refuses_at_the_end_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said, real_close = tmp_path / "metrics.jsonl", list[str](), os.close
    metrics = MetricsFile(path, monotonic=lambda: 0.0, before_open=lambda: None, warn=said.append)
    metrics.add({"step": 1})

    def close_on_a_full_disk(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        real_close(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_on_a_full_disk)
        metrics.flush()
    assert "Disk quota exceeded" in said[0]
    metrics.flush()
    assert path.read_text() == '{"step": 1}\n'


def test_metrics_that_cannot_be_written_wait_and_hold_nothing_up(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", list[str]()
    metrics = MetricsFile(path, monotonic=lambda: 0.0, before_open=lambda: None, warn=said.append)
    path.mkdir()
    for step in (1, 2):
        metrics.add({"step": step})
        metrics.flush()
    path.rmdir()
    metrics.flush()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]
    assert len(said) == 1
    assert "cannot be written" in said[0]


def test_metrics_beyond_the_checkpoint_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 1}, {"step": 2, "loss": 1}, {"step": 2, "val_samples": 3}, {"step": 3, "loss": 1}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 2, "lo')
    keep_until(path, 2, 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:3]
    keep_until(path, 2, None)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:2]
    keep_until(path, 0, None)
    assert path.read_text() == ""
    keep_until(tmp_path / "nothing", 0, None)


def test_what_stands_in_the_place_of_the_metrics_is_one_sentence(golden: GoldenMessages, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(RecordError) as caught:
        keep_until(path, 1, None)
    message = golden.message(caught.value)
    assert f"{path} cannot be read" in message
    assert "not a regular file" in message
    assert "move it away" in message
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("code", [-1, 6])
def test_vote_for_an_unknown_stop_code_is_an_error(code: int) -> None:
    with pytest.raises(ValueError, match=f"{code} is not a valid StopReason"):
        Votes(stop=StopReason(code))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "votes", [Votes(), Votes(save=True), *(Votes(save=True, stop=reason) for reason in StopReason)]
)
def test_agreement_carries_the_loss_and_every_wish(votes: Votes) -> None:
    parts = [StepPart(torch.tensor(2.5).double(), torch.tensor(1.0)), StepPart(torch.tensor(0.5).double())]
    agreed = PendingAgreement(parts, votes).read()
    steps = [StepSums(loss_sum=2.5, nonfinite=True), StepSums(loss_sum=0.5)]
    assert agreed == Agreed(steps=steps, save=votes.save, stop=votes.stop)


def test_seeds_depend_on_every_part_of_their_key() -> None:
    keys: list[tuple[int | str, ...]] = [
        ("step", 0, 1),
        ("step", 1, 0),
        ("step", 0, 1, 0),
        ("step", 0, "1"),
        ("step", 10),
    ]
    seeds = {keyed_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert keyed_seed("step", 0, 1) == keyed_seed("step", 0, 1)


def test_optimizers_take_the_constants_of_the_job() -> None:
    model = nn.Linear(2, 2)
    sgd = build_optimizer(
        Optimizer(momentum=0.9, weight_decay=0.1, nesterov=True), model, learning_rate=0.5, device_type="cpu"
    )
    assert isinstance(sgd, optim.SGD)
    group = sgd.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"], group["nesterov"]) == (0.5, 0.9, 0.1, True)
    adamw = build_optimizer(
        Optimizer(name="adamw", betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
        model,
        learning_rate=0.5,
        device_type="cpu",
    )
    assert isinstance(adamw, optim.AdamW)
    group = adamw.param_groups[0]
    assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.2)
    set_learning_rate(adamw, 0.25)
    assert group["lr"] == 0.25


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("gradients", [["inf", 2.0, 3.0], ["inf", "inf", 2.0], [2.0, "inf", 3.0], [None, "inf", 2.0]])
def test_fused_sgd_leaves_out_steps_that_overflow(gradients: list[Any], *, nesterov: bool) -> None:
    found = [parameters_after_steps(gradients, nesterov=nesterov, fused=fused) for fused in (False, True)]
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_placed_model_keeps_what_is_imaginary_or_no_number_of_its_format(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    model.rotation = nn.Parameter(torch.tensor([1 + 2j, -0.5j], dtype=torch.complex64))
    model.register_buffer("freqs_cis", torch.polar(torch.ones(3), torch.arange(3.0)))
    model.register_buffer("count", torch.tensor(2**40))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    rotation = model.rotation
    place_model(model, torch.device("cpu"), dtype, channels_last=False)
    formats = {name: value.dtype for name, value in model.state_dict().items()}
    real = {"weight": dtype, "bias": dtype, "count": torch.int64}
    assert formats == {**real, "rotation": dtype.to_complex(), "freqs_cis": dtype.to_complex()}
    assert all(torch.equal(value, values[name].to(value.dtype)) for name, value in model.state_dict().items())
    assert model.rotation is rotation
    inputs = torch.tensor([1 + 2j, -0.5j], dtype=torch.complex64)
    placed = Placement(torch.device("cpu"), dtype, channels_last=False).place_inputs(inputs)
    assert (placed.dtype, placed.tolist()) == (dtype.to_complex(), inputs.tolist())


def test_complex_parameters_take_no_fused_kernel() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.ones(2))])
    for constants in (Optimizer(momentum=0.9), Optimizer(name="adamw")):
        optimizer = build_optimizer(constants, model, learning_rate=0.5, device_type="cuda")
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert float(model[0].detach().real[0]) != 1.0


def test_frozen_parameters_are_left_to_themselves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(requires_grad=False)
    built = build_optimizer(Optimizer(), model, learning_rate=0.1, device_type="cpu")
    assert len(built.param_groups[0]["params"]) == 2


def test_digest_sees_names_shapes_formats_and_values() -> None:
    torch.manual_seed(0)
    first = nn.Linear(2, 3)
    digests = {parameters_sha256(first)}
    second = nn.Linear(2, 3)
    second.load_state_dict(first.state_dict())
    assert parameters_sha256(second) in digests
    digests.add(parameters_sha256(nn.Sequential(second)))
    digests.add(parameters_sha256(nn.Linear(3, 2)))
    digests.add(parameters_sha256(second.double()))
    with torch.no_grad():
        first.bias[0] += 1e-6
    digests.add(parameters_sha256(first))
    assert len(digests) == 5
