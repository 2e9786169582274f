"""The replica of a rank: the model wrapped in DDP, with its optimizer, gradient scaler and averaged weights.

The replicas of all ranks must stay equal, which ``ReplicaGuard`` checks.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.sections import Optimizer, Train
from hpcddp.packages import require
from hpcddp.train.buffers import buffers_restored
from hpcddp.train.errors import DriftError, ModelError, UserCodeError
from hpcddp.train.losses.declared import zero_of
from hpcddp.train.model.merging import OrderedStatistics, merged_buffers
from hpcddp.train.model.normalisation import absent, keep_uncompiled, local_norms, synchronised_batch_norms
from hpcddp.train.model.objective import ModelOutputs, check_outputs
from hpcddp.train.precision import Precision, kept_in
from hpcddp.train.user_code import call_function, describe

# These models warn if init_weights is not given; True is their default.
_WANT_INIT_WEIGHTS = ("googlenet", "inception_v3")


def build_model(name: str, arguments: Mapping[str, Any], classes: int) -> nn.Module:
    """Return a new model with freshly drawn parameters.

    Args:
        name: a torchvision model, or ``pkg.module:function``.
        arguments: ``train.model_args``, passed to the model.
        classes: K, passed as ``num_classes``.

    Raises:
        ModelError: torchvision has no such model, or does not take the arguments.
        UserCodeError: the user's function failed, or returned something that cannot be trained.
    """
    if is_reference(name):
        return _checked(name, call_function("train.model", name, {"num_classes": classes, **arguments}))
    require(f"train.model: {name}", "torchvision")
    from torchvision import models

    defaults = {"init_weights": True} if name in _WANT_INIT_WEIGHTS else {}
    try:
        return _checked(name, models.get_model(name, **{"num_classes": classes, **defaults, **arguments}))
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise ModelError(
            f"train.model is {name} with model_args {dict(arguments)}, and torchvision does not build it "
            f"({describe(error)}); write a model and arguments that torchvision knows"
        ) from error


def _checked(name: str, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UserCodeError(
            f"train.model is {name}, which returned a {type(model).__name__}, and only a torch.nn.Module can be "
            "trained; return one"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserCodeError(
            f"train.model is {name}, which returned a {type(model).__name__} without a parameter that requires a "
            "gradient, so that there is nothing to train; return one that has some"
        )
    return model


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def place_model(model: nn.Module, device: torch.device, dtype: torch.dtype, *, channels_last: bool) -> None:
    """Move a model to the device, in the precision and layout of the training."""
    for tensor in (*model.parameters(), *model.buffers()):
        # Module.to(dtype) would make complex tensors real.
        tensor.data = tensor.data.to(kept_in(tensor, dtype))
    model.to(device)
    if channels_last:
        # Module.to changes the layout of four-dimensional parameters only.
        model.to(memory_format=torch.channels_last)


def check_model_input(
    train: Train, model: nn.Module, inputs: Tensor, precision: Precision, *, classes: int
) -> tuple[str, ...]:
    """Run two samples through the model: forward in evaluation mode, forward and backward in training mode.

    Buffers are restored and gradients cleared; the model is left in training mode.

    Args:
        train: the job's training.
        model: the model on its device.
        inputs: two samples on the device.
        precision: the precision of the forward.
        classes: K.

    Returns:
        Names of the parameters that get no gradient.

    Raises:
        ModelError: a torchvision model does not take the input, or the outputs do not fit the loss.
        UserCodeError: the user's model raised.
    """
    try:
        with buffers_restored(model):
            model.eval()
            with torch.no_grad(), precision.autocast():
                check_outputs(train.model, model(inputs), len(inputs), classes)
            model.train()
            with precision.autocast():
                outputs = model(inputs)
                check_outputs(train.model, outputs, len(inputs), classes)
                loss = zero_of(outputs)
            torch.autograd.backward(loss)
    except (torch.OutOfMemoryError, ModelError):
        raise
    except Exception as error:
        if is_reference(train.model):
            raise UserCodeError(
                f"train.model is {train.model}, which failed on two samples of dataset {train.dataset}, a tensor of "
                f"shape {tuple(inputs.shape)}: {describe(error)}; make it take them, or give it other data",
                traceback=traceback.format_exc(),
            ) from error
        size = " x ".join(str(number) for number in inputs.shape[1:])
        raise ModelError(
            f"train.model is {train.model}, which does not take inputs of {size} of dataset {train.dataset} "
            f"({describe(error)}); give it images of another size, another model, or the argument in train.model_args "
            "that sets their size"
        ) from error
    unused = tuple(
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    )
    model.zero_grad(set_to_none=True)
    return unused


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
        if isinstance(self.parallel, DistributedDataParallel):
            return self.parallel.no_sync()
        return nullcontext()

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
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_complex():
                raise ModelError(
                    f"train.precision is fp16, and {name} is complex, whose gradients torch's GradScaler does not "
                    "unscale; write bf16 or fp32"
                )
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


_NAME: Final = "torch._dynamo"
# torch keeps some functions of these packages out of its compiler, and asks the compiler what to call in their place.
_NOT_COMPILED: Final = ("torch.optim.", "torch.nn.parallel.")
# ``inspect`` and ``warnings`` ask every module for these, also in the middle of an import, where the compiler would be
# a circular one.
_ASKED_OF_ALL_MODULES: Final = frozenset({"__file__", "__warningregistry__"})


def leave_compiler_out() -> None:
    """Let ``DistributedDataParallel`` and optimizers work without the compiler, unless it is loaded already.

    The compiler, ``torch._dynamo``, has 900 modules and takes nearly the CPU time of torch itself, in each rank. torch
    loads it for both of them, whether something is compiled or not. Code that compiles something loads it, as always.
    """
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _UnusedCompiler()
        # What ``import torch._dynamo`` finds and the attribute must be the same.
        setattr(torch, "_dynamo", sys.modules[_NAME])  # noqa: B010  the name is torch's own


class _UnusedCompiler(ModuleType):
    """Answers what torch asks outside of compiled code; anything else loads the compiler, which takes its place."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.utils = _Utilities()
        self.trace_rules = _TraceRules()

    def graph_break(self) -> None:
        """Mark where compiled code ends; there is none."""

    def disable(self, function: object = None, *arguments: object, **options: object) -> object:
        """Return the form of a function that is not compiled."""
        if getattr(function, "__module__", "").startswith(_NOT_COMPILED):
            return function
        return _loaded().disable(function, *arguments, **options)

    def __getattr__(self, name: str) -> object:
        if name in _ASKED_OF_ALL_MODULES:
            raise AttributeError(name)
        return getattr(_loaded(), name)


class _Utilities:
    def get_optimize_ddp_mode(self) -> str:
        """Return torch's default."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> object:
        return getattr(_loaded().utils, name)


class _TraceRules:
    def clear_lru_cache(self) -> None:
        """Forget the rules; a process group that opens asks for it, and there are none."""

    def __getattr__(self, name: str) -> object:
        return getattr(_loaded().trace_rules, name)


def _loaded() -> Any:  # noqa: ANN401  the compiler's functions are not typed
    if isinstance(sys.modules.get(_NAME), _UnusedCompiler):
        del sys.modules[_NAME]
    return importlib.import_module(_NAME)


LEARNING_RATE: Final = "the learning rate"

_INTEGER_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# 2^64 divided by the golden ratio, made odd: it spreads small numbers (Knuth, The Art of Computer Programming, 6.4).
_MULTIPLIER: Final = 0x9E3779B97F4A7C15 - 2**64


def digest(tensor: Tensor) -> Tensor:
    """Return a hash of the tensor's bits and their positions: an int64 scalar on the tensor's device.

    The bits of each entry pass through a bijection and are summed with an odd factor per position, modulo 2^64. A
    change of one entry always changes the hash; changes of several entries do so with overwhelming probability. Nothing
    is copied to the host.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.detach().view(_INTEGER_BY_SIZE[real.element_size()]).reshape(-1).to(torch.int64)
    mixed = bits * _MULTIPLIER
    mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF))
    places = torch.arange(1, 2 * bits.numel() + 1, 2, device=bits.device)
    return mixed.mul_(places).sum()


class ReplicaGuard:
    """Compares the replicas of all ranks at regular steps, with one hash per tensor and one small collective.

    Parameters, averaged weights, buffers, the learning rate and the scale of fp16 must be bitwise equal on all ranks.
    The running statistics of local normalisation layers differ between ranks by design and are not compared.

    Args:
        every: steps between comparisons; None = never.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every

    def check(self, replica: Replica, steps: int) -> None:
        """Compare the replicas if a comparison is due after ``steps`` steps.

        Raises:
            DriftError: names the rank and the tensors that differ; the same error on every rank.
        """
        if self._every is None or steps % self._every or dist.get_world_size() == 1:
            return
        names, digests = zip(*_digests(replica), strict=True)
        digests_here = torch.stack(digests)
        rows = [torch.empty_like(digests_here) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, digests_here)
        table = torch.stack(rows)
        if bool((table == table[0]).all()):
            return
        raise drift_error(names, table.tolist(), steps)


def _digests(replica: Replica) -> Iterator[tuple[str, Tensor]]:
    device = replica.placeholder.device
    rates = [float(group["lr"]) for group in replica.optimizer.param_groups]
    yield LEARNING_RATE, digest(torch.tensor(rates, dtype=torch.float64, device=device))
    if replica.scaler.is_enabled():
        yield "the scale of fp16", digest(torch.tensor(replica.scaler.get_scale(), device=device))
    for prefix, model in replica.models.items():
        kind = "" if prefix == "model" else "averaged "
        yield from ((f"{kind}{name}", digest(parameter)) for name, parameter in model.named_parameters())
        local_buffers = {id(buffer) for layer in local_norms(model) for buffer in layer.buffers(recurse=False)}
        for name, buffer in model.named_buffers():
            if id(buffer) not in local_buffers:
                yield f"{kind}{name}", digest(buffer)


def drift_error(names: tuple[str, ...], table: list[list[int]], steps: int) -> DriftError:
    """Return the error that names the rank that differs most from the majority, and the tensors that differ.

    Where two values are equally frequent, the value of the lowest rank counts as the majority.

    Args:
        names: of the compared tensors.
        table: hashes ``[W][names]``.
        steps: optimizer steps done.
    """
    names_by_rank: dict[int, list[str]] = {}
    for name, column in zip(names, zip(*table, strict=True), strict=True):
        # Of equally frequent values, most_common returns the first.
        usual = Counter(column).most_common(1)[0][0]
        for rank, value in enumerate(column):
            if value != usual:
                names_by_rank.setdefault(rank, []).append(name)
    most_names = max(len(names_of_rank) for names_of_rank in names_by_rank.values())
    worst_rank = min(rank for rank, names_of_rank in names_by_rank.items() if len(names_of_rank) == most_names)
    differing_names = names_by_rank[worst_rank]

    who = f"rank {worst_rank} differs"
    if len(names_by_rank) > 1:
        who = f"ranks {worst_rank} and {len(names_by_rank) - 1} more differ"
    parameters = [name for name in differing_names if name != LEARNING_RATE]
    shown_names = parameters[:1]
    if LEARNING_RATE in differing_names:
        # A wrong learning rate is the cause of wrong weights: the message names both.
        shown_names = [LEARNING_RATE, *shown_names]
    what = " and ".join(shown_names)
    if len(parameters) > 1:
        what += f" and {len(parameters) - 1} more"
    return DriftError(
        f"after step {steps} {who} from the other ranks in {what}, so that they no longer "
        "train one model; look for code that treats ranks differently, or for faulty memory on that rank's host, and "
        "go on from the last checkpoint",
        step=steps,
        rank=worst_rank,
        names=tuple(differing_names),
    )
