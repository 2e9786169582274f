"""One rank's copy of the model, ready to train: wrapped in DDP, with its optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from hpcddp.spec.job import Train
from hpcddp.train.buffers import buffers_put_back
from hpcddp.train.ema import Ema
from hpcddp.train.merging import merged_buffers
from hpcddp.train.noise import GradientNorms
from hpcddp.train.normalisation import absent, synchronised_batch_norms
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
        ema: the averaged weights; None without ``train.ema_decay``.
        norms: lengths of this rank's gradient; None without ``train.noise_scale``.
        samples: samples that this rank has trained on, by which its running statistics count.
    """

    model: nn.Module
    parallel: DistributedDataParallel
    optimizer: optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: Precision
    placeholder: Tensor
    ema: Ema | None = None
    norms: GradientNorms | None = None
    samples: int = 0

    @property
    def models(self) -> dict[str, nn.Module]:
        """The model and, where there is one, its average, by name."""
        return {"model": self.model} | ({} if self.ema is None else {"ema": self.ema.model})

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Give every rank the same buffers within the block, and its own again afterwards."""
        with ExitStack() as stack:
            for model in self.models.values():
                stack.enter_context(merged_buffers(model, self.samples))
            yield

    @contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """Yield the model that is evaluated, the same on every rank: the averaged one where there is one."""
        model = self.model if self.ema is None else self.ema.model
        with merged_buffers(model, self.samples):
            model.eval()
            yield model
        self.model.train()

    def backward_placeholder(
        self, *, others_have_samples: bool = False, loss_of: Callable[[Any], Tensor] = zero_loss
    ) -> None:
        """Go through forward and backward with nothing to learn, so that collectives match.

        This rank's statistics stay. Those over all ranks are what the other ranks' samples make them; a layer that
        takes such statistics counts the placeholder only where no rank has samples, and then they stay too.

        Args:
            others_have_samples: whether some rank has samples in this micro-step.
            loss_of: what there is to call backward on, from the outputs: 0, or what takes part in a loss's collectives.
        """
        shared = synchronised_batch_norms(self.model) if others_have_samples else ()
        counting: AbstractContextManager[None] = absent(self.model) if others_have_samples else nullcontext()
        with buffers_put_back(self.model, but=shared), counting:
            with self.precision.autocast():
                loss = loss_of(self.parallel(self.placeholder))
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def build_replica(
    train: Train,
    model: nn.Module,
    placeholder: Tensor,
    *,
    learning_rate: float,
    unused_parameters: bool,
) -> Replica:
    """Wrap a model that is on its device already.

    DDP sorts its buckets by the order in which gradients came in the first backward, from the second step on. That
    first backward is made here and thrown away: a run that is resumed then adds in the same order as one that never
    stopped.

    Args:
        train: the job's training, its constants scaled for this global batch.
        model: the model, on the device, checked.
        placeholder: inputs ``[n, ...]``, n >= 2, on the device, for a micro-step without samples.
        learning_rate: the rate of the first step.
        unused_parameters: whether some parameters get no gradient, on some rank in some step.
    """
    device = placeholder.device
    precision = Precision(train.precision, device.type)
    ema = None if train.ema_decay is None else Ema(model, train.ema_decay)
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
        ema=ema,
        norms=GradientNorms(parallel) if train.noise_scale else None,
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
