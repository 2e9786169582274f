"""The replica of a rank: the model wrapped in DDP, with its optimizer, gradient scaler and averaged weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from hpcddp.jobfile.sections import Optimizer, Train
from hpcddp.train.buffers import buffers_restored
from hpcddp.train.errors import ModelError, UserCodeError
from hpcddp.train.losses.declared import zero_of
from hpcddp.train.model.compiler import leave_compiler_out
from hpcddp.train.model.merging import OrderedStatistics, merged_buffers
from hpcddp.train.model.normalisation import absent, keep_uncompiled, synchronised_batch_norms
from hpcddp.train.model.objective import ModelOutputs
from hpcddp.train.precision import Precision


def build_optimizer(spec: Optimizer, model: nn.Module, *, learning_rate: float, device_type: str) -> optim.Optimizer:
    """Return an optimizer over the parameters that require a gradient.

    Args:
        spec: the job's ``train.optimizer``.
        model: the model, on its device.
        learning_rate: the rate of the first step; every step sets its own.
        device_type: ``cuda`` uses the fused kernels, one launch for all parameters, unless a parameter is complex.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # torch's fused kernels take no complex numbers.
    fused = (device_type == "cuda" and not any(parameter.is_complex() for parameter in parameters)) or None
    if spec.name == "adamw":
        return optim.AdamW(
            parameters, lr=learning_rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=fused
        )
    optimizer = optim.SGD(
        parameters,
        lr=learning_rate,
        momentum=spec.momentum,
        weight_decay=spec.weight_decay,
        nesterov=spec.nesterov,
        fused=fused,
    )
    if fused and spec.momentum:
        optimizer.register_step_pre_hook(_begin_momentum_at_zero)
    return optimizer


def _begin_momentum_at_zero(optimizer: optim.Optimizer, *_: object) -> None:
    """Allocate the momentum of every parameter with a gradient as zeros, before a fused step does it.

    The fused step writes the momentum in the same kernel as the parameters. If the GradScaler skips the first step,
    torch later uses momentum memory that was never written. Starting at 0, the first momentum is the gradient, as
    without the hook: momentum * 0 + gradient, as dampening is 0.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def set_learning_rate(optimizer: optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


class Ema:
    """A copy of the model with averaged weights, used for evaluation.

    After each optimizer step::

        average <- decay * average + (1 - decay) * value

    for every parameter and every running statistic of BatchNorm: statistics of the latest weights do not fit averaged
    weights. The average starts at the initial weights. Other buffers are copied.

    Args:
        model: the model, on its device, before DDP and compilation.
        decay: 0..1, for this job's global batch.

    Raises:
        UserCodeError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        try:
            self.model = copy.deepcopy(model)
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            raise UserCodeError(
                f"train.ema_decay is {decay:g}, which needs a copy of the model, and copy.deepcopy does not make one "
                f"({error}); let the model be copied, or leave ema_decay out"
            ) from error
        self.model.requires_grad_(requires_grad=False)
        self.model.eval()

    @torch.no_grad()
    def update(self, model: nn.Module, skipped: Tensor | None = None) -> None:
        """Move the averages towards the model.

        Args:
            model: the trained model, after its optimizer step.
            skipped: a scalar on the device that is not 0 if that step left the model as it was; None = it did not.
        """
        averages = _averaged(self.model)
        values = _averaged(model)
        if skipped is None:
            torch._foreach_lerp_(averages, values, 1 - self.decay)
        else:
            # Computed on the device, so that the host does not wait for the step.
            factor = (skipped == 0).to(averages[0].real.dtype) * (1 - self.decay)
            for average, value in zip(averages, values, strict=True):
                average.add_((value - average) * factor)
        for own, other in zip(_copied(self.model), _copied(model), strict=True):
            own.copy_(other)


def _averaged(model: nn.Module) -> list[Tensor]:
    return [*(parameter.detach() for parameter in model.parameters()), *_statistics(model)]


def _statistics(model: nn.Module) -> list[Tensor]:
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    both = [value for layer in layers for value in (layer.running_mean, layer.running_var)]
    return [value for value in both if value is not None]


def _copied(model: nn.Module) -> list[Tensor]:
    averaged = {id(value) for value in _statistics(model)}
    return [buffer for buffer in model.buffers() if id(buffer) not in averaged]


@dataclass(slots=True, kw_only=True)
class Replica:
    """The state that a training changes, on one rank.

    Args:
        model: the model without wrapper.
        parallel: the model in DDP; with one rank the model itself.
        scaler: the gradient scaler of fp16; disabled in other precisions.
        precision: precision of the forward.
        placeholder: inputs ``[n, ...]``, n >= 2, on the device, for a micro-step without samples.
        ema: the averaged weights; None without ``train.ema_decay``.
        samples: samples that this rank has trained on, which weight its running statistics in merges.
        statistics: merges running statistics in every step; None = only evaluations and checkpoints see them merged.
        needed: with one rank, the parameters that must get a gradient in every step.
    """

    model: nn.Module
    parallel: nn.Module
    optimizer: optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: Precision
    placeholder: Tensor
    ema: Ema | None = None
    samples: int = 0
    statistics: OrderedStatistics | None = None
    needed: tuple[nn.Parameter, ...] = ()

    @property
    def models(self) -> dict[str, nn.Module]:
        """The model and, if there is one, its average, by name."""
        return {"model": self.model} | ({} if self.ema is None else {"ema": self.ema.model})

    @property
    def _weight(self) -> int | None:
        return self.samples if self.statistics is None else None

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards add to the gradients of this rank, without the other ranks."""
        return self.parallel.no_sync() if isinstance(self.parallel, DistributedDataParallel) else nullcontext()

    def check_gradients(self) -> None:
        """Check that the last backward has reached every parameter that it must reach.

        Raises:
            RuntimeError: one has no gradient, for which the other ranks would wait forever.
        """
        if isinstance(self.parallel, DistributedDataParallel):
            # torch leaves the method without types, and has no public one.
            check: Callable[[], None] = self.parallel._check_reducer_finalized  # noqa: SLF001  see above
            check()
        elif any(parameter.grad is None for parameter in self.needed):
            raise RuntimeError("a parameter has no gradient")

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Give every rank the same buffers within the block, and its own again afterwards."""
        with ExitStack() as stack:
            for model in self.models.values():
                stack.enter_context(merged_buffers(model, self._weight))
            yield

    @contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """Yield the model to evaluate, equal on every rank: the averaged one if there is one."""
        model = self.model if self.ema is None else self.ema.model
        with merged_buffers(model, self._weight):
            model.eval()
            try:
                yield model
            finally:
                self.model.train()

    def backward_placeholder(
        self, *, others_have_samples: bool = False, loss_of: Callable[[ModelOutputs], Tensor] = zero_of
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
        with buffers_restored(self.model, exclude=shared), counting:
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
    fixed_micro_batch: bool = False,
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
        fixed_micro_batch: whether the micro-batches are the same for every number of ranks, in the order of the ranks.

    Raises:
        ModelError: the precision is fp16, and a parameter is complex.
    """
    device = placeholder.device
    precision = Precision(train.precision, device.type)
    if precision.scaler().is_enabled():
        _refuse_complex(model)
    ema = None if train.ema_decay is None else Ema(model, train.ema_decay)
    if train.compile:
        keep_uncompiled(model)
        model.compile()
    else:
        leave_compiler_out()
    parallel: nn.Module = model
    if dist.get_world_size() > 1:
        parallel = _in_ddp(model, device, unused_parameters=unused_parameters)
    replica = Replica(
        model=model,
        parallel=parallel,
        optimizer=build_optimizer(train.optimizer, model, learning_rate=learning_rate, device_type=device.type),
        scaler=precision.scaler(),
        precision=precision,
        placeholder=placeholder,
        ema=ema,
        statistics=OrderedStatistics(model) if fixed_micro_batch and dist.get_world_size() > 1 else None,
        needed=() if unused_parameters else tuple(p for p in model.parameters() if p.requires_grad),
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


def _in_ddp(model: nn.Module, device: torch.device, *, unused_parameters: bool) -> DistributedDataParallel:
    """Wrap a model; each rank keeps its own buffers, which ``merging`` merges when needed."""
    # torch 2.15 renamed the option and warns about the old name.
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    option = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
    no_broadcast: dict[str, Any] = {option: False}
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        gradient_as_bucket_view=True,
        find_unused_parameters=unused_parameters,
        **no_broadcast,
    )
