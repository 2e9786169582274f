"""The lines that the doctor proposes do what it says."""

from __future__ import annotations

import pytest
import torch

import hpcddp
from hpcddp.doctor.loss.batches import Batch
from hpcddp.doctor.loss.call import Loss
from hpcddp.doctor.loss.repairs import repair_for
from hpcddp.doctor.loss.verdict import Verdict
from tests.doctor import sample_losses


@pytest.mark.parametrize("name", ["infonce", "neighbours", "rmse", "batch_iou", "clip_pair", "ranknet"])
def test_the_proposed_lines_run_and_give_the_loss(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    one, two = torch.randn(12, 5, generator=g).double(), torch.rand(12, 5, generator=g).double()
    outputs, targets = ((one, two), torch.arange(12)) if name == "clip_pair" else (one, two)
    function = getattr(sample_losses, name)
    batch = Batch(arguments=(outputs, targets), differentiable=1, samples=12)
    verdict = Verdict.ORDER_DEPENDENT if name == "neighbours" else Verdict.NOT_DECOMPOSABLE
    repair = repair_for(Loss(name=f"m:{name}", function=function), batch, verdict)
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
