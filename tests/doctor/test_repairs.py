"""The lines that the doctor proposes do what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpcddp
from hpcddp.doctor.loss.batches import Batch
from hpcddp.doctor.loss.call import Loss
from hpcddp.doctor.loss.examination import examine
from hpcddp.doctor.loss.repairs import repair_for
from hpcddp.doctor.loss.verdict import Verdict, judged_splits
from tests.doctor import sample_losses

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["infonce", "neighbours", "rmse", "batch_iou", "clip_pair", "ranknet"])
def test_the_proposed_lines_run_and_give_the_loss(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    one, two = torch.randn(12, 5, generator=g).double(), torch.rand(12, 5, generator=g).double()
    outputs, targets = ((one, two), torch.arange(12)) if name == "clip_pair" else (one, two)
    function = getattr(sample_losses, name)
    batch = Batch(arguments=(outputs, targets), differentiable=1, samples=12)
    verdict = Verdict.ORDER_DEPENDENT if name == "neighbours" else Verdict.NOT_DECOMPOSABLE
    splits = judged_splits(12, 3, seed=0)
    repair = repair_for(Loss(name=f"m:{name}", function=function), batch, verdict, splits=splits)
    assert repair is not None
    p = one.sigmoid()
    names = {
        name: function,
        "outputs": outputs,
        "targets": targets,
        "squares": (one - two).square().sum(),
        "count": torch.tensor(one.numel()),
        "above": (p + two - 2 * p * two).sum(),
        "below": (p + two - p * two).sum(),
    }
    exec("\n".join(repair.code), names)
    torch.testing.assert_close(names["loss"], function(outputs, targets))
    assert repair.helper in hpcddp.__all__


@pytest.mark.parametrize(
    ("name", "helper"),
    [
        ("divided_by_itself", "gather_with_grad"),
        ("divided_by_its_average", "gather_with_grad"),
        ("divided_by_the_largest", "gather_with_grad"),
        ("divided_by_a_detached_spread", "gather_with_grad"),
        ("free_bits", "gather_with_grad"),
        ("flooded", "additive_loss"),
        ("flooded_low", "additive_loss"),
        ("flooded_classes", "additive_loss"),
        ("root_of_a_mean", "additive_loss"),
        ("masked_mean", "weighted_mean"),
        ("correlation_of_sums", "additive_loss"),
    ],
)
def test_a_repair_is_named_only_where_it_gives_value_and_gradient(name: str, helper: str) -> None:
    found = examine(f"tests.doctor.difficult_losses:{name}", world_size=3, samples=None, data=None, directory=ROOT)
    assert found.verdict is Verdict.NOT_DECOMPOSABLE
    assert found.repair is not None
    assert found.repair.helper == helper
