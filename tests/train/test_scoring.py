"""Metrics: what they compute, and that no split of the samples changes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import jaccard_score, roc_auc_score
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hpcddp
from hpcddp.train.scoring import (
    AreaUnderRocCurve,
    CrossEntropy,
    MeanIoU,
    Metric,
    MetricError,
    TopKAccuracy,
    ValidationShare,
    evaluate,
)
from hpcddp.train.scoring.evaluate import Tally
from tests.distributed.scoring_rank import METRICS, outputs_and_targets
from tests.messages import GoldenMessages

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_sample_is_in_one_share_once(ranks: int) -> None:
    for samples in range(1, 51):
        shares = [ValidationShare(samples, 7, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert [index for share in shares for batch in share for index in batch] == list(range(samples))
        assert all(len(batch) <= 7 for share in shares for batch in share)
        sizes = [sum(len(batch) for batch in share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


def on_ranks(metrics: Mapping[str, Metric], samples: int, ranks: int, batch: int = 7) -> dict[str, float]:
    """Return what ``evaluate`` would on so many ranks."""
    outputs, targets = outputs_and_targets(samples)
    tallies = []
    for rank in range(ranks):
        tally = Tally(metrics, samples, CPU)
        for indices in ValidationShare(samples, batch, rank=rank, ranks=ranks):
            tally.add(indices, outputs[indices], targets[indices])
        tallies.append(tally)
    widths = [max(ks) for ks in zip(*(tally.widths() for tally in tallies), strict=True)]
    vectors = torch.stack([tally.vector(widths) for tally in tallies])
    return tallies[0].values(vectors.sum(dim=0), widths)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_metrics_on_any_number_of_ranks_are_those_of_one_process(ranks: int) -> None:
    for samples in range(1, 51):
        one, many = on_ranks(METRICS, samples, 1, batch=50), on_ranks(METRICS, samples, ranks)
        for name in ("top1", "top2", "auc", "iou"):
            assert np.array_equal(many[name], one[name], equal_nan=True), (name, samples)
        assert many["loss"] == pytest.approx(one["loss"], rel=0, abs=1e-12)


@pytest.mark.parametrize("samples", [1, 2, 3, 17, 50])
def test_metrics_are_those_of_their_definitions(samples: int) -> None:
    outputs, targets = outputs_and_targets(samples)
    found = on_ranks(METRICS, samples, 3)
    assert found["top1"] == (outputs.argmax(dim=1) == targets).double().mean()
    assert found["loss"] == pytest.approx(float(functional.cross_entropy(outputs, targets)), abs=1e-12)
    assert found["iou"] == pytest.approx(
        jaccard_score(
            targets, outputs.argmax(dim=1), average="macro", labels=np.union1d(targets, outputs.argmax(dim=1))
        )
    )
    positive = (targets == 1).int()
    if 0 < positive.sum() < samples:
        # Scores of one decimal, so that there are ties.
        assert found["auc"] == pytest.approx(roc_auc_score(positive, (outputs[:, 1] * 2).round()), abs=1e-12)
    else:
        assert math.isnan(found["auc"])


def top(k: int, logits: Sequence[Sequence[float]], labels: Sequence[int]) -> list[bool]:
    found: list[bool] = TopKAccuracy(k).statistics(torch.tensor(logits), torch.tensor(labels)).tolist()
    return found


def test_top_k_counts_the_label_among_the_k_largest() -> None:
    logits = [[3.0, 1.0, 2.0, 0.0]] * 4
    assert top(1, logits, [0, 1, 2, 3]) == [True, False, False, False]
    assert top(3, logits, [0, 1, 2, 3]) == [True, True, True, False]
    assert top(4, logits, [0, 1, 2, 3]) == [True] * 4


def test_smaller_class_wins_a_tie_and_no_label_wins_against_nan() -> None:
    assert top(1, [[1.0, 1.0, 1.0]] * 3, [0, 1, 2]) == [True, False, False]
    assert top(2, [[1.0, 1.0, 1.0]] * 3, [0, 1, 2]) == [True, True, False]
    assert top(1, [[math.nan, 2.0], [math.nan, 2.0]], [0, 1]) == [False, False]


def test_top_1_is_the_argmax() -> None:
    logits = torch.randn(500, 10, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    labels = torch.arange(500) % 10
    assert torch.equal(TopKAccuracy(1).statistics(logits, labels), logits.numpy().argmax(axis=1) == labels)
    with pytest.raises(ValueError, match="k is 1 or more, not 0"):
        TopKAccuracy(0)


def area(scores: Sequence[float], labels: Sequence[int]) -> float:
    metric = AreaUnderRocCurve()
    return metric.from_rows(metric.rows(torch.tensor(scores), torch.tensor(labels)))


def test_area_under_the_curve_counts_a_tie_half() -> None:
    assert area([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert area([0.5, 0.5, 0.5], [0, 1, 1]) == 0.5
    assert area([1.0, 2.0], [1, 0]) == 0.0
    assert math.isnan(area([1.0, 2.0], [1, 1]))
    assert math.isnan(area([1.0, math.nan], [1, 0]))


def test_area_under_the_curve_of_two_logits_is_refused(golden: GoldenMessages) -> None:
    with pytest.raises(MetricError) as caught:
        AreaUnderRocCurve().rows(torch.zeros(3, 2), torch.zeros(3))
    message = golden.message(caught.value)
    assert "a tensor of shape (3, 2)" in message
    assert "give outputs[:, 1] - outputs[:, 0]" in message


def logits_of(classes: Tensor) -> Tensor:
    return functional.one_hot(classes, 3).movedim(-1, 1).double()


def test_mean_iou_sums_before_it_divides_and_leaves_out_what_never_occurs() -> None:
    labels = torch.tensor([[[0, 0], [0, 1]], [[1, 1], [1, 255]]])
    found = torch.tensor([[[0, 0], [1, 1]], [[1, 1], [0, 0]]])
    metric = MeanIoU(3, ignore_index=255)
    sums = metric.statistics(logits_of(found), labels).sum(dim=0).double()
    assert sums.tolist() == [2, 3, 0, 4, 5, 0]
    assert metric.from_sums(sums, 2) == pytest.approx((2 / 4 + 3 / 5) / 2)
    assert math.isnan(metric.from_sums(torch.zeros(6, dtype=torch.float64), 2))


def test_mean_iou_refuses_labels_and_shapes_that_do_not_fit(golden: GoldenMessages) -> None:
    metric = MeanIoU(3)
    with pytest.raises(MetricError) as caught:
        metric.statistics(torch.zeros(1, 3, 2, 2), torch.tensor([[[0, 1], [2, 3]]]))
    message = golden.message(caught.value)
    assert "given labels 0..3; give labels 0..2" in message
    assert "ignore_index" in message
    with pytest.raises(MetricError) as caught:
        metric.statistics(torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long))
    message = golden.message(caught.value)
    assert "outputs of shape (1, 2, 2, 2)" in message
    assert "labels of shape (1, 2, 2)" in message
    assert "give logits" in message


def test_share_is_the_batch_sampler_of_a_loader() -> None:
    outputs, targets = outputs_and_targets(23)
    share = hpcddp.ValidationShare(23, batch_size=4)
    loader = DataLoader(TensorDataset(outputs, targets), batch_sampler=share)
    assert len(loader) == len(share) == 6
    assert hpcddp.evaluate(share, loader, METRICS) == on_ranks(METRICS, 23, 1)


def test_results_are_taken_without_gradient() -> None:
    weight = torch.ones((), requires_grad=True)
    results = ((torch.ones(2, 2) * weight, torch.zeros(2).long()) for _ in range(1))
    seen = []

    class Sees(CrossEntropy):
        def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
            seen.append(outputs.requires_grad)
            return super().statistics(outputs, targets)

    evaluate(ValidationShare(2, 2), results, {"loss": Sees()})
    assert seen == [False]


class _BatchMean:
    """What must not be written: the mean of a batch."""

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(dim=1) == targets).double().mean()

    def from_sums(self, sums: Tensor, samples: int) -> float:
        return float(sums) / samples


class _Outputs:
    """The mean of the outputs."""

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG002
        return outputs

    def from_sums(self, sums: Tensor, samples: int) -> float:
        return float(sums.sum()) / samples


def results_of(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(size, 2), torch.zeros(size).long()) for size in sizes]


@pytest.mark.parametrize(
    ("results", "metric", "facts"),
    [
        (results_of([3]), CrossEntropy(), ("results of 1 batches", "this rank has 2; give them all")),
        (results_of([3, 2, 3]), CrossEntropy(), ("more than the 2 batches", "give each batch once")),
        (
            results_of([2, 3]),
            CrossEntropy(),
            ("the outputs of a batch of 3 samples", "shape (2, 2)", "give one for each"),
        ),
        (
            [(torch.zeros(3, 2), torch.zeros(4))],
            CrossEntropy(),
            ("the targets of a batch of 3 samples", "shape (4,)", "give one for each"),
        ),
        (
            results_of([3, 2]),
            _BatchMean(),
            ("metric it returns", "shape () for 3 samples", "return one row for each sample", "shape (3, k)"),
        ),
    ],
    ids=["too few", "too many", "outputs", "targets", "mean of a batch"],
)
def test_what_is_not_one_result_per_sample_is_refused(
    golden: GoldenMessages, results: Any, metric: Metric, facts: tuple[str, ...]
) -> None:
    with pytest.raises(MetricError) as caught:
        evaluate(ValidationShare(5, 3), results, {"it": metric})
    message = golden.message(caught.value)
    for fact in facts:
        assert fact in message


def test_complex_results_are_refused(golden: GoldenMessages) -> None:
    results = [(torch.ones(3, 2, dtype=torch.complex64), torch.zeros(3))]
    with pytest.raises(MetricError) as caught:
        evaluate(ValidationShare(3, 3), results, {"it": _Outputs()})
    message = golden.message(caught.value)
    assert "metric it returns complex64 values" in message
    assert "return real ones" in message


def test_ranks_that_together_miss_samples_are_refused(golden: GoldenMessages) -> None:
    with pytest.raises(MetricError) as caught:
        evaluate(ValidationShare(5, 3, rank=0, ranks=2), results_of([3]), {"loss": CrossEntropy()})
    message = golden.message(caught.value)
    assert "3 samples were evaluated" in message
    assert "there are 5" in message
    assert "ValidationShare of the same samples" in message


def test_share_of_nothing_is_refused(golden: GoldenMessages) -> None:
    with pytest.raises(ValueError) as caught:
        ValidationShare(0, 4)
    assert "samples >= 1" in golden.message(caught.value)
    assert "not 0 and 4" in str(caught.value)
