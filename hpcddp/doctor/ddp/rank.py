"""Run one rank of a comparison: ``python -m hpcddp.doctor.ddp.rank FOLDER STEPS DIRECTORY TIMEOUT``.

The rank is that of the environment. The folder contains ``job.yaml``; the report of this rank is written to
``rank-<rank>.json`` there: samples, losses, gradients and parameters of a few steps without noise. The one process
writes its gradients to files; rank 0 of the W ranks compares its own with them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, not marked so
from torch.nn import functional

from hpcddp.batch.sampler import GlobalBatches
from hpcddp.doctor.tensors import differences
from hpcddp.errors import HpcddpError
from hpcddp.jobfile.write import parse_resolved
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import write_json
from hpcddp.slurm.rank_env import RankEnv
from hpcddp.train.buffers import buffers_restored
from hpcddp.train.context import TrainContext
from hpcddp.train.data.loader import Batches, MicroBatch, micro_batch_keys
from hpcddp.train.loop.agreement import PendingAgreement
from hpcddp.train.loop.job import Setting, derive_setting, make_replica
from hpcddp.train.loop.step import Stepper
from hpcddp.train.model.normalisation import local_batch_norms
from hpcddp.train.model.replica import Replica
from hpcddp.train.precision import Precision, set_up_backends
from hpcddp.train.randomness import seed_step
from hpcddp.train.user_code import describe

# A parameter's gradient that is smaller than this fraction of the largest one is rounding error.
_FLOORS: Final = {"fp64": 1e-6, "fp32": 1e-2}


@dataclass(slots=True)
class _RecordingBatches:
    """Iterator over this rank's micro-batches that keeps the digests of their samples."""

    batches: Iterator[MicroBatch]
    samples: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        inputs, labels = batch = next(self.batches)
        self.samples += [_digest(image, label) for image, label in zip(inputs, labels, strict=True)]
        return batch


def _digest(*tensors: Tensor) -> str:
    """Return a short text that differs when the tensors differ."""
    contents = hashlib.sha256()
    for tensor in tensors:
        contents.update(tensor.detach().contiguous().numpy().tobytes())
    return contents.hexdigest()[:16]


def _parameter_digests(model: nn.Module) -> dict[str, str]:
    return {name: _digest(parameter) for name, parameter in model.named_parameters()}


def observe(setting: Setting, folder: Path, *, steps: int) -> dict[str, Any]:
    """Make a few optimizer steps as the training does, without dropout, and return the observations.

    Local BatchNorm uses fixed statistics, which are the same on every rank.

    Args:
        setting: the training; the one process writes its gradients, rank 0 of several reads them.
        folder: holds a file for the gradients of each step.
        steps: K.
    """
    replica = make_replica(setting)
    freeze_batch_norm(replica.model, replica.placeholder)
    with without_dropout(replica.model):
        return {
            "batch_norms": len(local_batch_norms(replica.model)),
            "draws_random_numbers": _draws_random_numbers(setting, replica),
            "initial": _parameter_digests(replica.model),
            "steps": [*_steps(setting, replica, folder, steps)],
        }


@torch.no_grad()
def _draws_random_numbers(setting: Setting, replica: Replica) -> bool:
    """Return whether the outputs of the model differ between steps, for equal inputs and parameters."""
    digests = []
    for step in range(2):
        seed_step(setting.context.train.seed, step, setting.context.rank, setting.placement.device)
        with buffers_restored(replica.model):
            outputs = replica.model(replica.placeholder)
        digests.append(_digest(outputs if isinstance(outputs, Tensor) else next(iter(outputs))))
    return digests[0] != digests[1]


def _steps(setting: Setting, replica: Replica, folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    context = setting.context
    batches = _RecordingBatches(_batches(setting, steps))
    stepper = Stepper(replica, setting.plan.batch, context.train, batches, context.rank)
    gradients: dict[str, Tensor] = {}

    def keep_gradients(*_: object) -> None:
        for name, parameter in replica.model.named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[name] = gradient.detach().clone()

    # At this point gradients are averaged and not changed, since clipping is off.
    replica.optimizer.register_step_pre_hook(keep_gradients)
    for position in itertools.islice(setting.schedule.positions(0), steps):
        batches.samples.clear()
        part = stepper.compute(position)
        agreement = PendingAgreement([part])
        stepper.update(part)
        path = folder / f"gradients-{position.step}.pt"
        errors = None
        if context.world_size == 1:
            torch.save(gradients, path)
        elif context.is_main:
            errors = _gradient_errors(torch.load(path, weights_only=True), gradients, _FLOORS[context.train.precision])
        yield {
            "loss": agreement.read().steps[0].loss_sum / position.samples,
            "samples": [*batches.samples],
            "parameters": _parameter_digests(replica.model),
            "has_gradient": any(bool(gradient.any()) for gradient in gradients.values()),
            "gradient_errors": errors,
        }


def _batches(setting: Setting, steps: int) -> Iterator[MicroBatch]:
    spec = setting.context.spec
    data = setting.data
    train = setting.context.train
    keys = micro_batch_keys(
        GlobalBatches(data.units, spec.global_batch_size, spec.batch.tail, spec.batch.order, train.seed),
        setting.plan.batch,
        setting.context.rank,
        groups=data.groups,
        seed=train.seed,
        first_step=0,
        last_step=min(steps, setting.schedule.total_steps),
    )
    return iter(Batches(data, data.train, keys, setting.placement, workers=0))


def _gradient_errors(expected: Mapping[str, Tensor], gradients: Mapping[str, Tensor], floor: float) -> dict[str, float]:
    """Return the relative error of the gradient of each parameter, 0 where it is the same."""
    smallest = floor * max(float(gradient.abs().max()) for gradient in expected.values())
    errors = dict.fromkeys(expected, 0.0)
    for difference in differences(expected, gradients):
        errors[difference.name] = difference.largest / max(difference.size, smallest)
    return errors


_FUNCTIONS: Final = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
# Names of the layers of torchvision and timm that drop whole branches; they have no common base class.
_BRANCHES: Final = ("StochasticDepth", "DropPath")


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout within the block, in layers and in functions."""
    functions = {name: getattr(functional, name) for name in _FUNCTIONS}
    restored = [_disable_dropout(layer) for layer in model.modules()]
    for name in _FUNCTIONS:
        setattr(functional, name, _unchanged)
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(functional, name, function)
        for layer, attribute, value in filter(None, restored):
            setattr(layer, attribute, value)


def _disable_dropout(layer: nn.Module) -> tuple[nn.Module, str, Any] | None:
    """Disable the dropout of one layer; return the layer, the changed attribute and its old value, or None."""
    if type(layer).__name__ in _BRANCHES:
        attribute = (layer, "training", layer.training)
        layer.training = False
        return attribute
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        attention = (layer, "dropout", layer.dropout)
        layer.dropout = 0.0
        return attention
    return None


def _unchanged(input: Tensor, *_: object, **__: object) -> Tensor:  # noqa: A002  callers use torch's name
    return input


@torch.no_grad()
def freeze_batch_norm(model: nn.Module, inputs: Tensor) -> None:
    """Make local BatchNorm use running statistics, equal on every rank, instead of those of the micro-batch.

    The running statistics are the average of those of ``inputs`` and of mean 0, variance 1, so that the outputs of a
    deep model neither grow without bound nor are divided by a variance near 0.

    Args:
        model: the model, in training mode.
        inputs: samples ``[n, ...]``, n >= 2, the same on every rank.
    """
    layers = local_batch_norms(model)
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = 0.5
    model(inputs)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        if layer.track_running_stats:
            layer.eval()


def main(folder: Path, steps: int, timeout_s: float) -> int:
    """Run one rank; return the exit code."""
    torch.set_num_threads(1)
    env = RankEnv.from_env(os.environ)
    store = FileStore(str(folder / "store"), env.world_size)
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    path = folder / f"rank-{env.rank}.json"
    try:
        report = observe(_setting(folder, env), folder.parent, steps=steps)
    except HpcddpError as error:
        write_json(path, _failed(error.kind, error.message))
        return 1
    except Exception as error:  # noqa: BLE001  the user's model may raise anything; it is reported
        write_json(path, _failed("unexpected", describe(error)))
        return 1
    write_json(path, {"error": None, **report})
    dist.barrier()
    return 0


def _failed(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message, "time": time.monotonic()}}


def _setting(folder: Path, env: RankEnv) -> Setting:
    context = TrainContext(
        spec=parse_resolved((folder / "job.yaml").read_text(encoding="utf-8")),
        rank_env=env,
        device=torch.device("cpu"),
        run=RunDirectory(folder),
        attempt=0,
        threads=1,
        write_line=lambda _: None,
    )
    set_up_backends(Precision(context.train.precision, "cpu"), deterministic=False)
    return derive_setting(context)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _folder, _number_of_steps, _directory, _timeout = sys.argv[1:]
    sys.path.insert(0, _directory)
    _code = main(Path(_folder), int(_number_of_steps), float(_timeout))
    sys.stdout.flush()
    sys.stderr.flush()
    # Destroying the process group of a failed rank may hang.
    os._exit(_code)
