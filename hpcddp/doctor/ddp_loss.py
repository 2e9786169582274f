"""Whether a job's own loss does with the samples what the job file says."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hpcddp.doctor.batches import Batch
from hpcddp.doctor.errors import DoctorError
from hpcddp.doctor.judging import Verdict, judge
from hpcddp.doctor.running import Loss
from hpcddp.spec.job import Train
from hpcddp.train.losses import DeclaredLoss, Reduction
from hpcddp.train.objective import choose_loss

_SAMPLES: Final = 32
_RANKS: Final = 4


def verdict_on_loss(train: Train, classes: int) -> Verdict | None:
    """Return what the job's loss does with samples: with the mean of its vector, where it is declared per sample.

    Args:
        train: the job's training.
        classes: K.

    Returns:
        None where there is nothing to say: no loss of the user's own, one that is made with a helper, or one that
        cannot be run on random logits.
    """
    if train.loss is None or train.loss_reduction == "global":
        return None
    declared = choose_loss(train, torch.device("cpu"))
    g = torch.Generator().manual_seed(0)
    arguments = (torch.randn(_SAMPLES, classes, generator=g), torch.randint(0, classes, (_SAMPLES,), generator=g))
    batch = Batch(arguments=arguments, differentiable=1, samples=_SAMPLES)
    dtype = torch.float64 if train.precision == "fp64" else torch.float32
    try:
        loss = Loss(name=train.loss, function=lambda outputs, labels: _scalar(declared, outputs, labels))
        return judge(loss, batch.to(dtype), world_size=_RANKS).verdict
    except DoctorError:
        return None


def _scalar(declared: DeclaredLoss, outputs: Tensor, labels: Tensor) -> Tensor:
    found = declared.function(outputs, labels)
    return found.mean() if declared.reduction is Reduction.PER_SAMPLE else found
