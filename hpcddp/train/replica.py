"""One rank's copy of the model, ready to train: wrapped in DDP, with its optimizer."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from hpcddp.spec.job import Train
from hpcddp.train.buffers import buffers_put_back
from hpcddp.train.objective import zero_loss
from hpcddp.train.optimizers import build_optimizer
from hpcddp.train.precision import Precision


@dataclass(slots=True, kw_only=True)
class Replica:
    """What changes while training, on one rank.

    Args:
        model: the model itself.
        parallel: the model in DDP, which averages gradients over the ranks.
        optimizer: its optimizer.
        scaler: the gradient scaler of fp16, otherwise one that does nothing.
        precision: what the forward computes in.
        placeholder: inputs ``[n, ...]``, n >= 2, on the device, for a micro-step without samples.
    """

    model: nn.Module
    parallel: DistributedDataParallel
    optimizer: optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: Precision
    placeholder: Tensor

    def backward_placeholder(self) -> None:
        """Go through forward and backward with nothing to learn, so that collectives match; statistics stay."""
        with buffers_put_back(self.model):
            with self.precision.autocast():
                loss = zero_loss(self.parallel(self.placeholder))
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def build_replica(
    train: Train, model: nn.Module, placeholder: Tensor, *, learning_rate: float, unused_parameters: bool
) -> Replica:
    """Wrap a model that is on its device already.

    DDP sorts its buckets by the order in which gradients came in the first backward, from the second step on. That
    first backward is made here and thrown away: a run that is resumed then adds in the same order as one that never
    stopped.

    Args:
        train: the job's training.
        model: the model, on the device, checked.
        placeholder: inputs ``[n, ...]``, n >= 2, on the device, for a micro-step without samples.
        learning_rate: the rate of the first step.
        unused_parameters: whether some parameters get no gradient.
    """
    device = placeholder.device
    precision = Precision(train.precision, device.type)
    if train.compile:
        model.compile()
    parallel = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        gradient_as_bucket_view=True,
        find_unused_parameters=unused_parameters,
        **_own_buffers(),
    )
    replica = Replica(
        model=model,
        parallel=parallel,
        optimizer=build_optimizer(train.optimizer, model, learning_rate=learning_rate, device_type=device.type),
        scaler=precision.scaler(),
        precision=precision,
        placeholder=placeholder,
    )
    model.train()
    replica.backward_placeholder()
    replica.optimizer.zero_grad(set_to_none=True)
    return replica


def _own_buffers() -> dict[str, Any]:
    """Return the option that leaves each rank its own buffers; those of rank 0 are handed round when they count."""
    # torch 2.15 gave the option a new name and warns about the old one.
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers": False}
