"""A contrastive loss like that of CLIP (Radford et al. 2021, arXiv 2103.00020) with a learnable temperature.

Every sample is compared with every other one of the global batch, on whatever rank that is. The outputs are gathered
with a backward that sums, so that the encoders *and* the temperature get the gradient of one process.

One process and four processes print the same losses.

    python examples/contrastive_clip.py
    torchrun --standalone --nproc-per-node 4 examples/contrastive_clip.py
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from sklearn import datasets
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from hpcddp import gather_with_grad
from hpcddp.batch.plan import plan_batch
from hpcddp.batch.sampler import GlobalBatches, share_of

Pair = tuple[Tensor, Tensor]


def load_digits() -> Pair:
    """Return the upper and the lower half of handwritten digits, ``[1797, 32]`` each: the pairs."""
    images = torch.from_numpy(datasets.load_digits().images).to(torch.get_default_dtype()) / 16
    return images[:, :4].flatten(1), images[:, 4:].flatten(1)


class TwoTowers(nn.Module):
    """Two encoders with outputs in one space, and the temperature of their similarity."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
        self.lower = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, upper: Tensor, lower: Tensor) -> Pair:
        """Return unit vectors ``[n, 16]`` of both halves."""
        return functional.normalize(self.upper(upper), dim=1), functional.normalize(self.lower(lower), dim=1)


def make_model() -> TwoTowers:
    """Return the two encoders; the same on every rank."""
    torch.manual_seed(0)
    return TwoTowers()


def clip_loss(upper: Tensor, lower: Tensor, log_scale: Tensor) -> Tensor:
    """Return the symmetric cross entropy of matching each half with its other half in the whole batch."""
    logits = upper @ lower.T * log_scale.exp()
    labels = torch.arange(len(logits))
    return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


def backward(model: nn.Module, pairs: Pair) -> Tensor:
    """Run forward and backward of one optimizer step on this rank's pairs; return the loss of the global batch."""
    towers = cast("TwoTowers", model.module if isinstance(model, DistributedDataParallel) else model)
    upper, lower = model(*pairs)
    loss = clip_loss(gather_with_grad(upper), gather_with_grad(lower), towers.log_scale)
    torch.autograd.backward(loss)
    return loss.detach()


def train(*, steps: int = 20) -> Iterator[float]:
    """Yield the loss of the global batch at every step, the same for any number of ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    upper, lower = load_digits()
    model = wrap(make_model())
    optimizer = optim.AdamW(model.parameters(), lr=0.003)
    batches = GlobalBatches(len(upper), 150, tail="keep", order="keyed", seed=0)
    plan = plan_batch(global_batch_size=150, world_size=ranks, samples=len(upper))
    for step in range(steps):
        indices = batches.indices(*divmod(step, batches.steps_per_epoch))
        share = torch.from_numpy(share_of(plan, indices, rank)[0])
        optimizer.zero_grad()
        loss = backward(model, (upper[share], lower[share]))
        optimizer.step()
        yield float(loss)


def wrap(model: nn.Module) -> nn.Module:
    """Return the model wrapped in DDP if there are several ranks."""
    return DistributedDataParallel(model) if dist.is_initialized() else model


def main() -> None:
    """Open a group if torchrun started this process, train, and print from rank 0."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    for step, loss in enumerate(train()):
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step:2d}  loss {loss:.12f}")
    if dist.is_initialized():
        # DDP is part of reference cycles. If it is freed after its process group, it can abort the process.
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
