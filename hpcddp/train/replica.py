"""The replica of a rank: the model wrapped in DDP, with its optimizer, gradient scaler and averaged weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from hpcddp.jobfile.sections import Train
from hpcddp.train.buffers import buffers_put_back
from hpcddp.train.ema import Ema
from hpcddp.train.errors import ModelError
from hpcddp.train.merging import merged_buffers
from hpcddp.train.noise import GradientNorms
from hpcddp.train.normalisation import absent, synchronised_batch_norms
from hpcddp.train.objective import ModelOutputs, zero_loss
from hpcddp.train.optimizers import build_optimizer
from hpcddp.train.precision import Precision


@dataclass(slots=True, kw_only=True)
class Replica:
    """The state that a training changes, on one rank.

    Args:
        model: the model without wrapper.
        parallel: the model in DDP.
        scaler: the gradient scaler of fp16; disabled in other precisions.
        precision: precision of the forward.
        placeholder: inputs ``[n, ...]``, n >= 2, on the device, for a micro-step without samples.
        ema: the averaged weights; None without ``train.ema_decay``.
        norms: measures this rank's gradient; None without ``train.noise_scale``.
        samples: samples that this rank has trained on, which weight its running statistics in merges.
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
        """The model and, if there is one, its average, by name."""
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
        """Yield the model to evaluate, equal on every rank: the averaged one if there is one."""
        model = self.model if self.ema is None else self.ema.model
        with merged_buffers(model, self.samples):
            model.eval()
            yield model
        self.model.train()

    def backward_placeholder(
        self, *, others_have_samples: bool = False, loss_of: Callable[[ModelOutputs], Tensor] = zero_loss
    ) -> None:
        """Run forward and backward on the placeholder, so that this rank joins the collectives of the others.

        Local running statistics are restored. Synchronised statistics are those of the other ranks' samples; if no rank
        has samples, the placeholder counts and they are restored as well.

        Args:
            others_have_samples: whether another rank has samples in this micro-step.
            loss_of: computes the loss from the outputs: 0, or the part of this rank in a loss with collectives.
        """
        shared = synchronised_batch_norms(self.model) if others_have_samples else ()
        counting: AbstractContextManager[None] = absent(self.model) if others_have_samples else nullcontext()
        with buffers_put_back(self.model, but=shared), counting:
            with self.precision.autocast():
                loss = loss_of(self.parallel(self.placeholder))
            torch.autograd.backward(self.scaler.scale(loss))


def build_replica(
    train: Train,
    model: nn.Module,
    placeholder: Tensor,
    *,
    learning_rate: float,
    unused_parameters: bool,
) -> Replica:
    """Return the replica of a model that is on its device.

    After the first backward DDP rebuilds its buckets in the order of that backward's gradients. One backward is
    therefore made here and discarded: a resumed run then adds gradients in the same order as a run that never stopped.

    Args:
        train: the job's training, with hyperparameters scaled for this global batch.
        model: the model, on the device, checked.
        placeholder: inputs ``[n, ...]``, n >= 2, on the device, for a micro-step without samples.
        learning_rate: the rate of the first step.
        unused_parameters: whether some parameters may get no gradient, on some rank in some step.

    Raises:
        ModelError: the precision is fp16, and a parameter is complex.
    """
    device = placeholder.device
    precision = Precision(train.precision, device.type)
    if precision.scaler().is_enabled():
        _refuse_complex(model)
    ema = None if train.ema_decay is None else Ema(model, train.ema_decay)
    if train.compile:
        model.compile()
    parallel = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        gradient_as_bucket_view=True,
        find_unused_parameters=unused_parameters,
        **_no_buffer_broadcast(),
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


def _refuse_complex(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ModelError(
                f"train.precision is fp16, and {name} is complex, whose gradients torch's GradScaler does not unscale; "
                "write bf16 or fp32"
            )


def _no_buffer_broadcast() -> dict[str, Any]:
    """Return the DDP option that leaves each rank its own buffers; ``merging`` merges them when needed."""
    # torch 2.15 renamed the option and warns about the old name.
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers": False}
