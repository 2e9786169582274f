"""Cross entropy with class weights, over the whole global batch.

`torch.nn.functional.cross_entropy(..., weight=w)` divides by the sum of the weights of the samples that it sees, and
that differs between ranks. `weighted_mean` divides by the sum over all ranks and micro-steps.

One process, four processes, and four processes with accumulation print the same losses.

    python examples/class_weighted_cross_entropy.py
    torchrun --standalone --nproc-per-node 4 examples/class_weighted_cross_entropy.py
    torchrun --standalone --nproc-per-node 4 examples/class_weighted_cross_entropy.py --micro-steps 2
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from sklearn import datasets
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hpcddp import sum_statistics, weighted_mean
from hpcddp.batch.plan import plan_batch
from hpcddp.batch.sampler import GlobalBatches, share_of

Pair = tuple[Tensor, Tensor]


def load_digits() -> Pair:
    """Return handwritten digits ``[N, 64]`` with few of the classes above 4, and their labels."""
    bunch = datasets.load_digits()
    images = torch.from_numpy(bunch.data).to(torch.get_default_dtype()) / 16
    labels = torch.from_numpy(bunch.target).long()
    kept = (labels <= 4) | (torch.arange(len(labels)) % 5 == 0)
    return images[kept], labels[kept]


def class_weights() -> Tensor:
    """Return the weight of each class ``[10]``: the rare ones count five times."""
    return torch.tensor([1.0] * 5 + [5.0] * 5)


def make_model() -> nn.Module:
    """Return a small network, pixels to logits; the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def backward(model: nn.Module, micro_batches: Sequence[Pair]) -> Tensor:
    """Run forward and backward of one optimizer step on this rank; return the loss of the global batch."""
    weights = class_weights()
    # The divisor of the loss needs no forward, so one pass is enough, also with accumulation.
    (weight,) = sum_statistics([weights[labels].sum()] for _, labels in micro_batches)
    total = torch.zeros(())
    for micro_step, (images, labels) in enumerate(micro_batches):
        with reduces(model, last=micro_step == len(micro_batches) - 1):
            losses = functional.cross_entropy(model(images), labels, weight=weights, reduction="sum")
            weighted_mean(losses, global_count=weight).backward()  # type: ignore[no-untyped-call]
            total += losses.detach()
    (total,) = sum_statistics([[total]])
    return total / weight


def reduces(model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context for a forward and its backward: DDP averages in the last micro-step only."""
    if last or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


def train(*, micro_steps: int, steps: int = 20) -> Iterator[float]:
    """Yield the loss of the global batch at every step, the same for any number of ranks and micro-steps."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    images, labels = load_digits()
    model = wrap(make_model())
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    batches = GlobalBatches(len(images), 150, tail="keep", order="keyed", seed=0)
    plan = plan_batch(global_batch_size=150, world_size=ranks, samples=len(images), grad_accum_steps=micro_steps)
    for step in range(steps):
        indices = batches.indices(*divmod(step, batches.steps_per_epoch))
        shares = [torch.from_numpy(share) for share in share_of(plan, indices, rank)]
        optimizer.zero_grad()
        loss = backward(model, [(images[share], labels[share]) for share in shares])
        optimizer.step()
        yield float(loss)


def wrap(model: nn.Module) -> nn.Module:
    """Return the model wrapped in DDP if there are several ranks."""
    return DistributedDataParallel(model) if dist.is_initialized() else model


def main() -> None:
    """Open a group if torchrun started this process, train, and print from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-steps", type=int, default=1, help="backward passes per optimizer step")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    for step, loss in enumerate(train(micro_steps=options.micro_steps)):
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step:2d}  loss {loss:.12f}")
    if dist.is_initialized():
        # DDP is part of reference cycles. If it is freed after its process group, it can abort the process.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
