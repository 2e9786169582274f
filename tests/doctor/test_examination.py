"""What the doctor says about losses that people write."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hpcddp.doctor.errors import DoctorError
from hpcddp.doctor.loss.batches import Batch
from hpcddp.doctor.loss.call import Loss, collective_of
from hpcddp.doctor.loss.examination import Diagnosis, examine
from hpcddp.doctor.loss.finding import Finding, judge_all
from hpcddp.doctor.loss.report import as_json, explain
from hpcddp.doctor.loss.verdict import Verdict
from tests.doctor import sample_losses
from tests.messages import GoldenMessages

HERE = Path(__file__).parent
SAMPLES = "tests.doctor.sample_losses"


def diagnose(
    name: str, *, world_size: int = 4, samples: int | None = None, data: str | None = None, batch_dim: int = 0
) -> Diagnosis:
    """Examine a loss of ``sample_losses``, or one by its full name."""
    full = name if ":" in name else f"{SAMPLES}:{name}"
    whole = data if data is None or ":" in data or "." in data else f"{SAMPLES}:{data}"
    return examine(full, world_size=world_size, samples=samples, data=whole, directory=HERE, batch_dim=batch_dim)


def refusal(name: str, *, world_size: int = 4, samples: int | None = None, data: str | None = None) -> str:
    with pytest.raises(DoctorError) as caught:
        diagnose(name, world_size=world_size, samples=samples, data=data)
    assert caught.value.exit_code == 2
    return caught.value.message.replace(f"{SAMPLES}:", "")


def reasons(message: str) -> dict[str, str]:
    """Return a word for what Python or torch say in a message, in other words from version to version."""
    return dict.fromkeys(re.findall(r"(?<=Error: ).*", message), "REASON")


@pytest.mark.parametrize(
    "name",
    [
        "torch.nn.functional:cross_entropy",
        "torch.nn:CrossEntropyLoss",
        "torch.nn.functional:binary_cross_entropy",
        "torch.nn.functional:binary_cross_entropy_with_logits",
        "torch.nn.functional:mse_loss",
        "torch.nn:HuberLoss",
        "torch.nn.functional:gaussian_nll_loss",
        "torch.nn.functional:triplet_margin_loss",
        "torch.nn.functional:cosine_embedding_loss",
        "label_smoothing",
        "kl_batchmean",
        "dice_per_sample",
        "in_place",
        "make_mse",
        "ArcFace",
    ],
)
def test_means_over_samples_are_mean(name: str) -> None:
    diagnosis = diagnose(name)
    assert diagnosis.verdict is Verdict.MEAN
    assert diagnosis.repair is None
    assert diagnosis.finding.judgement.ddp.deviation.worst <= 1e-12


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_sum_is_sum_and_as_many_times_too_small_as_there_are_ranks(world_size: int) -> None:
    diagnosis = diagnose("cross_entropy_sum", world_size=world_size)
    assert diagnosis.verdict is Verdict.SUM
    assert diagnosis.finding.judgement.ddp.ratio == pytest.approx(1 / world_size)
    assert diagnosis.repair is not None
    assert diagnosis.repair.helper == "DeclaredLoss"


@pytest.mark.parametrize(
    ("name", "helper"),
    [
        ("three_weights", "weighted_mean"),
        ("three_float32_weights", "weighted_mean"),
        ("ignores_0", "weighted_mean"),
        ("ignores_255", "weighted_mean"),
        ("token_mean", "weighted_mean"),
        ("focal_over_positives", "weighted_mean"),
        ("batch_iou", "additive_loss"),
        ("batch_dice_smooth", "additive_loss"),
        ("rmse", "additive_loss"),
        ("correlation", "additive_loss"),
        ("barlow", "gather_with_grad"),
        ("infonce", "gather_with_grad"),
        ("clip_pair", "gather_with_grad"),
        ("uniformity", "gather_with_grad"),
        ("batch_hard", "gather_with_grad"),
        ("ohem", "gather_with_grad"),
        ("lovasz", "gather_with_grad"),
        ("ranknet", "gather_with_grad"),
        ("mmd", "gather_with_grad"),
        ("energy_distance", "gather_with_grad"),
        ("rkd_distance", "gather_with_grad"),
        ("rkd_angle", "gather_with_grad"),
    ],
)
def test_losses_of_whole_batches_are_not_decomposable_and_have_a_repair(name: str, helper: str) -> None:
    diagnosis = diagnose(name)
    assert diagnosis.verdict is Verdict.NOT_DECOMPOSABLE
    assert diagnosis.finding.judgement.ddp.deviation.gradient > 1e-3
    assert diagnosis.repair is not None
    assert diagnosis.repair.helper == helper
    assert diagnosis.repair.code[0] == f"from hpcddp import {helper}"


@pytest.mark.parametrize("name", ["torch.nn.functional:ctc_loss", "torch.nn:CTCLoss"])
@pytest.mark.parametrize("data", [None, "sequences"])
def test_losses_of_four_arguments_are_examined_along_their_batch(name: str, data: str | None) -> None:
    diagnosis = diagnose(name, data=data, batch_dim=1 if data else 0)
    assert diagnosis.verdict is Verdict.MEAN
    assert diagnosis.shares == ((2,) * 4 if data else (8,) * 4)


def test_the_dimension_of_the_samples_can_be_named() -> None:
    assert diagnose("last_step", data="time_first", batch_dim=1).verdict is Verdict.MEAN
    hardest = diagnose("last_step_hardest", data="time_first", batch_dim=1)
    assert hardest.verdict is Verdict.NOT_DECOMPOSABLE
    assert hardest.repair is not None
    assert hardest.repair.code[1] == (
        "loss = last_step_hardest(gather_with_grad(outputs.movedim(1, 0)).movedim(0, 1), gather_with_grad(targets))"
    )


def test_a_dimension_or_arguments_that_the_batches_do_not_have_are_refused(golden: GoldenMessages) -> None:
    with pytest.raises(DoctorError) as caught:
        diagnose("last_step", data="time_first", batch_dim=3)
    message = golden.message(caught.value)
    assert "--batch-dim is 3" in message
    assert "have 3 dimensions" in message
    with pytest.raises(DoctorError) as caught:
        diagnose("last_step", batch_dim=1)
    message = golden.message(caught.value)
    assert "--batch-dim is 1" in message
    assert "batches of --data" in message
    with pytest.raises(DoctorError) as caught:
        diagnose("torch.nn.functional:ctc_loss", data="pairs")
    message = golden.message(caught.value)
    assert "not the 4 arguments of the loss" in message
    assert "return them in a tuple" in message


def test_a_difference_of_neighbours_is_order_dependent() -> None:
    diagnosis = diagnose("neighbours")
    assert diagnosis.verdict is Verdict.ORDER_DEPENDENT
    assert diagnosis.finding.judgement.deviations["order"].worst > 0.01
    assert diagnosis.repair is not None
    assert diagnosis.repair.code[1] == "loss = neighbours(gather_with_grad(outputs), gather_with_grad(targets))"


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("constant", ("constant is 4.46875 for all outputs", "class indices, 10 classes")),
        ("accuracy", ("accuracy returns a number without a gradient",)),
        ("hits", ("hits returns a tensor of int64", "a floating-point number")),
        ("item", ("item returns a float (2.42616)", "return the loss alone")),
        ("vector", ("a tensor of shape (32,)", "return its mean", "train.loss_reduction: per_sample")),
        ("not_a_number", ("not_a_number is nan", "10 classes (outputs [32, 10], targets")),
        ("dropout", ("dropout draws random numbers", "2.98951 and 2.76198")),
        ("python_random", ("python_random keeps something from call to call", "torch's seed does not decide")),
        ("misspelt", ("misspelt failed: AttributeError: ", "'crossentropy'")),
        ("one_batch_size", ("all 32 samples", "not a share of 8", "ValueError: Expected input batch")),
        ("boxes", ("kinds of random batches", "class indices: TypeError: ")),
        ("NeedsArguments", ("NeedsArguments is a class", "without arguments: (weight: ")),
        ("pairs", ("pairs is a tuple", "write the name of a loss")),
        ("NOT_A_LOSS", ("NOT_A_LOSS is a int", "write the name of a loss")),
        ("missing", ("sample_losses.py has no 'missing'", "write the name of a loss")),
        ("nowhere:loss", ("nowhere:loss is not there", f"no module 'nowhere' in {Path.cwd()}")),
        ("torch.nn.", ("does not name a loss", "write module:function", "losses:dice_loss")),
    ],
)
def test_a_loss_that_cannot_be_looked_at_gets_one_clear_sentence(
    golden: GoldenMessages, name: str, facts: tuple[str, ...]
) -> None:
    message = refusal(f"{name}:" if name == "torch.nn." else name)
    # Those of Python's generator are others in each run.
    without_numbers = re.sub(r"gives [\d.]+ and [\d.]+ for", "gives NUMBER and NUMBER for", message)
    paths = {str(sample_losses.__file__): "FILE", str(Path.cwd()): "DIRECTORY"}
    golden.message(without_numbers, {**reasons(message), **paths})
    for fact in facts:
        assert fact in message
    assert "\n" not in message


def test_own_batches_are_split_and_decide() -> None:
    assert diagnose("torch.nn.functional:cross_entropy", data="pairs").finding.data == f"your own, {SAMPLES}:pairs"
    assert diagnose("three_weights", data="pairs").verdict is Verdict.NOT_DECOMPOSABLE
    assert diagnose("three_float32_weights", data="pairs").verdict is Verdict.NOT_DECOMPOSABLE


def test_structured_outputs_and_a_list_of_targets_are_split_by_sample(golden: GoldenMessages) -> None:
    diagnosis = diagnose("boxes", data="two_batches")
    assert diagnosis.verdict is Verdict.MEAN
    assert sum(diagnosis.shares) == 13
    (note,) = diagnosis.notes
    golden.message(note)
    assert "4 ranks do not divide 13 samples" in note
    assert "would be off by 12 %" in note


def test_own_batches_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "batch.pt"
    torch.save((torch.randn(8, 3), torch.randint(0, 3, (8,))), path)
    diagnosis = diagnose("torch.nn.functional:cross_entropy", data=str(path))
    assert diagnosis.verdict is Verdict.MEAN
    assert diagnosis.shares == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        ("triple", ("triple gives a tuple", "not a pair", "return (outputs, targets)")),
        ("nothing", ("nothing gives no batches", "return (outputs, targets) or a list")),
        ("whole_numbers", ("whole_numbers gives outputs", "without a floating-point tensor")),
        ("NOT_A_LOSS", ("NOT_A_LOSS is a int", "name a function")),
        ("broken.pt", ("reading broken.pt failed: ",)),
        ("absent.pt", ("--data is absent.pt", "the name of a file, or module:function")),
    ],
)
def test_own_batches_that_are_none_are_refused(
    golden: GoldenMessages, data: str, facts: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "broken.pt").write_text("no tensors")
    with pytest.raises(DoctorError) as caught:
        examine(
            f"{SAMPLES}:rmse",
            world_size=4,
            samples=None,
            data=data if "." in data else f"{SAMPLES}:{data}",
            directory=tmp_path,
        )
    message = golden.message(caught.value, reasons(str(caught.value)))
    for fact in facts:
        assert fact in message


def test_numbers_that_cannot_be_split_are_refused(golden: GoldenMessages) -> None:
    message = golden.message(refusal("rmse", world_size=1))
    assert "--world-size is 1" in message
    assert "write 2 or more" in message
    message = golden.message(refusal("rmse", samples=3))
    assert "--batch is 3 samples" in message
    assert "fewer than the 4 ranks" in message
    assert "write 8 or more" in message
    message = golden.message(refusal("rmse", samples=8, data="pairs"))
    assert "--batch is 8" in message
    assert "--data pairs have a size; leave it" in message
    message = golden.message(refusal("torch.nn.functional:cross_entropy", world_size=25, data="pairs"))
    assert "batch 0 of pairs is 24 samples" in message
    assert "fewer than the 25 ranks" in message


@pytest.mark.parametrize(("world_size", "samples"), [(2, 2), (3, 10), (4, 6), (7, 100), (16, 36)])
@pytest.mark.parametrize(
    ("name", "verdict"), [("label_smoothing", Verdict.MEAN), ("infonce", Verdict.NOT_DECOMPOSABLE)]
)
def test_the_verdict_does_not_depend_on_world_size_and_batch(
    name: str, verdict: Verdict, world_size: int, samples: int
) -> None:
    diagnosis = diagnose(name, world_size=world_size, samples=samples)
    assert diagnosis.verdict is verdict
    assert sum(diagnosis.shares) == samples


@pytest.mark.parametrize(("world_size", "samples"), [(2, 8), (3, 10), (2, 5)])
@pytest.mark.parametrize("name", ["ignores_3", "ten_weights"])
def test_a_class_that_counts_otherwise_is_seen_in_batches_that_hardly_hold_it(
    name: str, world_size: int, samples: int
) -> None:
    assert diagnose(name, world_size=world_size, samples=samples).verdict is Verdict.NOT_DECOMPOSABLE


@pytest.mark.parametrize(
    ("name", "helper"),
    [
        ("repaired_dice", "additive_loss"),
        ("RepairedContrast", "gather_with_grad"),
        ("repaired_mean", "weighted_mean"),
        ("guarded", "all_reduce"),
    ],
)
def test_a_loss_that_calls_collectives_is_not_judged_by_one_process(
    name: str, helper: str, golden: GoldenMessages
) -> None:
    message = golden.message(refusal(name))
    assert f"calls {helper}, " in message
    assert "train.loss_reduction: global" in message
    assert message.endswith("hpcddp doctor ddp JOB")


def test_a_collective_in_a_module_that_the_loss_imports_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examined_terms.py").write_text("def dice(x, y):\n    dist.all_reduce(x)\n")
    (tmp_path / "examined_loss.py").write_text("from examined_terms import dice\ndef loss(x, y): return dice(x, y)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("examined_loss")
    assert collective_of("examined_loss:loss") == "all_reduce (in module examined_terms)"


def test_a_function_of_a_sum_that_is_no_mean_is_repaired_by_its_sums() -> None:
    repair = diagnose("log_of_a_sum").repair
    assert repair is not None
    assert repair.helper == "additive_loss"


def test_the_note_on_ignored_labels_names_the_helper_that_repairs_the_loss() -> None:
    (note,) = diagnose("entropy_with_penalty").notes
    assert "If labels can be -100" in note
    assert note.endswith(": use additive_loss.")


def test_notes_say_what_else_was_seen(golden: GoldenMessages) -> None:
    (ignored,) = diagnose("torch.nn.functional:cross_entropy").notes
    golden.message(re.sub(r"\S+ %", "N %", ignored))
    assert "If labels can be -100" in ignored
    assert "NOT DECOMPOSABLE (with 3 labels in 10" in ignored
    assert "use weighted_mean" in ignored
    assert "changes its arguments in place" in golden.message(diagnose("in_place").notes[-1])
    float32 = golden.message(diagnose("casts_to_float32").notes[-1])
    assert "computes in float32" in float32
    assert "deviations below 0.0001 are not seen" in float32
    bad_share = golden.message(diagnose("positives_only").notes[-1])
    assert "makes every parameter NaN" in bad_share


@pytest.mark.parametrize("name", ["dice_per_sample_from_the_end", "mmd"])
def test_where_kinds_of_batches_disagree_the_worst_verdict_counts_and_says_on_what_it_was_seen(
    golden: GoldenMessages, name: str
) -> None:
    diagnosis = diagnose(name)
    assert diagnosis.verdict is Verdict.NOT_DECOMPOSABLE
    assert diagnosis.finding.data.startswith("10 logits and 10 0/1 targets")
    (note,) = diagnosis.notes
    golden.message(note)
    assert "On maps of logits and 0/1 masks" in note
    assert "it is MEAN" in note
    assert "with --data" in note
    assert diagnose(name, data="mask_pairs").verdict is Verdict.MEAN


def test_of_ones_own_batches_the_one_with_the_worst_verdict_decides() -> None:
    g = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(12, 3, generator=g), torch.randn(12, 3, generator=g)
    loss = Loss(name="m:neighbours", function=sample_losses.neighbours)
    sums = Loss(name="m:total", function=lambda one, two: (one - two).square().sum())
    batch = Batch(arguments=(outputs, targets), differentiable=1, samples=12)
    (worst,) = judge_all(loss, [batch], "own", 4).judgements
    (milder,) = judge_all(sums, [batch], "own", 4).judgements
    assert (worst.verdict, milder.verdict) == (Verdict.ORDER_DEPENDENT, Verdict.SUM)
    assert milder.ddp.deviation.worst > worst.ddp.deviation.worst
    assert Finding(data="own", batches=(batch, batch), judgements=(milder, worst)).worst == 1


def test_a_loss_that_draws_random_numbers_on_some_kinds_of_batches_is_refused() -> None:
    assert "noise_on_maps draws random numbers: it gives" in refusal("noise_on_maps")


def test_the_same_question_gets_the_same_answer() -> None:
    assert as_json(diagnose("batch_iou")) == as_json(diagnose("batch_iou"))


def test_gradients_of_complex_outputs_and_parameters_are_pairs_of_real_numbers() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1 - 2j))

        def forward(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
            real, turned = outputs
            return (real * (turned * self.weight).imag).sum()

    real, turned = torch.ones(3, dtype=torch.float64), torch.tensor([1 + 1j, 2j, 3])
    batch = Batch(arguments=((real, turned),), differentiable=1, samples=3)
    found = Loss(name="weighted", function=Weighted()).evaluate(batch)
    assert found.gradients[0].tolist() == [-1, 2, -6]
    # d/da and d/db of Im((a + bi)(1 - 2i)) = b - 2a.
    assert found.gradients[1].tolist() == [[-2, 1]] * 3
    # Of the parameter c + di: the sum of a d + b c.
    assert found.parameter_gradients[0].tolist() == [3, 4]


def test_nothing_of_the_process_is_changed() -> None:
    torch.set_num_threads(2)
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    diagnose("three_weights")
    after = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_the_text_is_to_be_read(golden: GoldenMessages) -> None:
    lines = explain(diagnose("three_weights")).splitlines()
    assert lines[0] == f"{SAMPLES}:three_weights: NOT DECOMPOSABLE"
    assert "4 ranks train another loss than one" in golden.message(lines[1])
    assert lines[3].endswith("3 classes: outputs [32, 3], targets [32] int64")
    assert [line.split()[:2] for line in lines[5:9]] == [
        ["whole", "batch,"],
        ["even", "shares"],
        ["uneven", "shares"],
        ["uneven", "shares,"],
    ]
    assert lines[10].startswith("plain DDP, 4 ranks")
    assert lines[10].endswith(" 32 (8 + 8 + 8 + 8):")
    *_, reason, first, second, job = lines
    assert golden.message(reason).startswith("repair: hpcddp.weighted_mean, because ")
    assert first == "    from hpcddp import weighted_mean"
    assert second.startswith("    loss = weighted_mean(total, count)  # what three_weights divides")
    assert golden.message(job).endswith("train.loss_reduction: global")
