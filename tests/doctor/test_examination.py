"""What the doctor says about losses that people write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hpcddp
from hpcddp.doctor.errors import DoctorError
from hpcddp.doctor.loss.call import Batch, Loss
from hpcddp.doctor.loss.examination import Diagnosis, Verdict, as_json, examine, explain
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
        "torch.nn.functional:binary_cross_entropy_with_logits",
        "torch.nn.functional:mse_loss",
        "torch.nn:HuberLoss",
        "label_smoothing",
        "dice_per_sample",
        "in_place",
        "make_mse",
        "ArcFace",
    ],
)
def test_means_over_samples_are_mean(name: str) -> None:
    diagnosis = diagnose(name)
    assert diagnosis.verdict is Verdict.MEAN
    assert as_json(diagnosis)["helpers"] == []
    assert diagnosis.judgement.ddp.deviation.worst <= 1e-12


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_sum_is_sum_and_as_many_times_too_small_as_there_are_ranks(world_size: int) -> None:
    diagnosis = diagnose("cross_entropy_sum", world_size=world_size)
    assert diagnosis.verdict is Verdict.SUM
    assert diagnosis.judgement.ddp.ratio == pytest.approx(1 / world_size)
    assert as_json(diagnosis)["helpers"] == ["DeclaredLoss"]
    assert as_json(diagnosis)["loss_reduction"] == "sum"


@pytest.mark.parametrize("name", ["ten_weights", "ignores_0", "ignores_3", "focal_over_positives"])
def test_losses_that_are_divided_by_weights_are_weighted_means(name: str) -> None:
    diagnosis = diagnose(name)
    assert diagnosis.verdict is Verdict.WEIGHTED_MEAN
    assert diagnosis.judgement.ddp.deviation.gradient > 1e-3
    assert as_json(diagnosis)["helpers"] == ["weighted_mean"]
    assert as_json(diagnosis)["loss_reduction"] == "global"


@pytest.mark.parametrize(
    "name",
    [
        "batch_iou",
        "batch_dice_smooth",
        "rmse",
        "correlation",
        "barlow",
        "infonce",
        "batch_hard",
        "ohem",
        "lovasz",
        "ranknet",
        "mmd",
        "energy_distance",
        "rkd_distance",
        "rkd_angle",
        "neighbours",
        "log_of_a_sum",
    ],
)
def test_losses_of_whole_batches_are_not_decomposable_and_get_two_helpers(name: str) -> None:
    diagnosis = diagnose(name)
    assert diagnosis.verdict is Verdict.NOT_DECOMPOSABLE
    assert diagnosis.judgement.deviation.gradient > 1e-3
    assert as_json(diagnosis)["helpers"] == ["additive_loss", "gather_with_grad"]
    assert set(as_json(diagnosis)["helpers"]) <= set(hpcddp.__all__)


@pytest.mark.parametrize("name", ["torch.nn.functional:ctc_loss", "torch.nn:CTCLoss"])
def test_losses_of_four_arguments_are_examined_along_their_batch(name: str) -> None:
    diagnosis = diagnose(name, data="sequences", batch_dim=1)
    assert diagnosis.verdict is Verdict.MEAN
    assert diagnosis.judgement.ddp.shares == (2, 2, 2, 2)


def test_the_dimension_of_the_samples_can_be_named() -> None:
    assert diagnose("last_step", data="time_first", batch_dim=1).verdict is Verdict.MEAN
    assert diagnose("last_step_hardest", data="time_first", batch_dim=1).verdict is Verdict.NOT_DECOMPOSABLE


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


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("constant", ("for all outputs", "logits and class indices")),
        ("accuracy", ("accuracy returns a number without a gradient",)),
        ("hits", ("hits returns a number without a gradient", "counts")),
        ("item", ("item returns a float", "return the loss alone")),
        ("vector", ("a tensor of shape (32,)", "return its mean", "train.loss_reduction: per_sample")),
        ("not_a_number", ("not_a_number is nan", "(outputs [32, 10], targets [32])")),
        ("dropout", ("dropout draws random numbers", "for the same batch")),
        ("python_random", ("python_random draws random numbers", "name a version without noise")),
        ("misspelt", ("AttributeError: ", "'crossentropy'")),
        ("one_batch_size", ("all 32 samples", "not a share of 8", "ValueError: Expected input batch")),
        ("boxes", ("none of the plain kinds of batch", "--data module:function")),
        ("NeedsArguments", ("NeedsArguments() failed", "should return the loss")),
        ("pairs", ("pairs is a tuple", "write the name of a loss")),
        ("NOT_A_LOSS", ("NOT_A_LOSS is a int", "write the name of a loss")),
        ("missing", ("importing missing failed", "write the name of a loss")),
        ("nowhere:loss", ("importing nowhere:loss failed", "No module named 'nowhere'")),
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
    own = diagnose("torch.nn.functional:cross_entropy", data="pairs")
    assert own.judgement.batch.data == f"your own, {SAMPLES}:pairs"
    assert diagnose("three_weights", data="pairs").verdict is Verdict.WEIGHTED_MEAN
    assert diagnose("three_float32_weights", data="pairs").verdict is Verdict.WEIGHTED_MEAN


def test_structured_outputs_and_a_list_of_targets_are_split_by_sample() -> None:
    diagnosis = diagnose("boxes", data="two_batches")
    assert diagnosis.verdict is Verdict.MEAN
    assert diagnosis.judgement.ddp.shares == (3, 3, 3, 3)
    assert diagnosis.notes == ()


def test_own_batches_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "batch.pt"
    torch.save((torch.randn(8, 3), torch.randint(0, 3, (8,))), path)
    diagnosis = diagnose("torch.nn.functional:cross_entropy", data=str(path))
    assert diagnosis.verdict is Verdict.MEAN
    assert diagnosis.judgement.ddp.shares == (2, 2, 2, 2)


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
    assert sum(diagnosis.judgement.ddp.shares) == samples


@pytest.mark.parametrize("name", ["repaired_dice", "RepairedContrast", "repaired_mean", "guarded"])
def test_a_loss_that_calls_collectives_is_not_judged_by_one_process(name: str, golden: GoldenMessages) -> None:
    message = golden.message(refusal(name))
    assert "calls a collective, " in message
    assert "train.loss_reduction: global" in message
    assert message.endswith("hpcddp doctor ddp JOB")


def test_a_mean_on_plain_batches_says_which_batches_may_have_another_verdict(golden: GoldenMessages) -> None:
    (note,) = diagnose("torch.nn.functional:cross_entropy").notes
    assert "labels are ignored or padded" in golden.message(note)
    assert diagnose("torch.nn.functional:cross_entropy", data="pairs").notes == ()


def test_the_report_names_the_precision_of_the_loss() -> None:
    assert "\ntried in float32 on logits" in explain(diagnose("casts_to_float32"))
    assert "\ntried in float64 on logits" in explain(diagnose("label_smoothing"))


def test_a_share_without_a_finite_loss_is_told() -> None:
    diagnosis = diagnose("positives_only", data="few_positives")
    assert diagnosis.verdict is Verdict.NOT_DECOMPOSABLE
    assert "a share's loss is not finite" in explain(diagnosis)
    assert as_json(diagnosis)["plain_ddp"]["gradient_error"] is None


@pytest.mark.parametrize("name", ["dice_per_sample_from_the_end", "mmd"])
def test_where_kinds_of_batches_disagree_the_worst_verdict_counts_and_says_on_what_it_was_seen(
    golden: GoldenMessages, name: str
) -> None:
    diagnosis = diagnose(name)
    assert diagnosis.verdict is Verdict.NOT_DECOMPOSABLE
    assert diagnosis.judgement.batch.data == "values and values"
    (note,) = diagnosis.notes
    golden.message(note)
    assert "On logits and 0/1 masks" in note
    assert "it is MEAN" in note
    assert "with --data" in note
    assert diagnose(name, data="mask_pairs").verdict is Verdict.MEAN


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
    batch = Batch(data="own", arguments=((real, turned),), samples=3)
    found = Loss(name="weighted", function=Weighted()).evaluate(batch)
    assert found.gradients[0].tolist() == [-1, 2, -6]
    # d/da and d/db of Im((a + bi)(1 - 2i)) = b - 2a.
    assert found.gradients[1].tolist() == [[-2, 1]] * 3
    # Of the parameter c + di: the sum of a d + b c.
    assert found.parameter_gradients[0].tolist() == [3, 4]


def test_nothing_of_the_process_is_changed() -> None:
    torch.set_num_threads(2)
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    diagnose("ten_weights")
    after = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_the_text_is_to_be_read(golden: GoldenMessages) -> None:
    lines = explain(diagnose("ten_weights")).splitlines()
    assert lines[0] == f"{SAMPLES}:ten_weights: WEIGHTED MEAN"
    assert "4 ranks train another loss than one" in golden.message(lines[1])
    assert lines[3].endswith("outputs [32, 10], targets [32]")
    assert lines[4] == "largest difference from the mean over even, uneven and permuted shares:"
    assert re.fullmatch(r"  value [0-9.]+ %, gradient [0-9.]+ %", lines[5])
    assert lines[7] == "plain DDP, 4 ranks, a global batch of 32:"
    *_, helper, job = lines
    assert golden.message(helper).startswith("use hpcddp.weighted_mean ")
    assert golden.message(job).endswith("train.loss_reduction: global")
