"""Intersection over union as a loss, over the whole global batch.

It divides a sum over samples by another sum over samples. The mean of the losses of the ranks is another loss;
`additive_loss` sums first and then divides.

One process, four processes, and four processes with accumulation print the same losses.

    python examples/segmentation_iou.py
    torchrun --standalone --nproc-per-node 4 examples/segmentation_iou.py
    torchrun --standalone --nproc-per-node 4 examples/segmentation_iou.py --micro-steps 2
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from sklearn import datasets
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from hpcddp import accumulate_additive
from hpcddp.batch.plan import plan_batch
from hpcddp.batch.sampler import GlobalBatches, share_of

Pair = tuple[Tensor, Tensor]


def load_digits() -> Pair:
    """Return noisy images of handwritten digits ``[1797, 1, 8, 8]`` and masks of the ink."""
    clean = torch.from_numpy(datasets.load_digits().images).to(torch.get_default_dtype()).unsqueeze(1) / 16
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    return clean + 0.5 * noise, (clean > 0.5).to(clean.dtype)


def make_model() -> nn.Module:
    """Return a small convolutional network, pixels to logits; the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))


def iou_loss(intersection: Tensor, union: Tensor) -> Tensor:
    """Return 1 - IoU from sums over the samples of a batch."""
    return 1 - intersection / union


def backward(model: nn.Module, micro_batches: Sequence[Pair]) -> Tensor:
    """Run forward and backward of one optimizer step on this rank; return the loss of the global batch."""

    def overlap(batch: Pair) -> tuple[Tensor, Tensor]:
        images, masks = batch
        probability = model(images).sigmoid()
        intersection = probability * masks
        return intersection.sum(), (probability + masks - intersection).sum()

    return accumulate_additive(iou_loss, overlap, micro_batches, model=model)


def train(*, micro_steps: int, steps: int = 20) -> Iterator[float]:
    """Yield the loss of the global batch at every step, the same for any number of ranks and micro-steps."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    images, masks = load_digits()
    model = wrap(make_model())
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    batches = GlobalBatches(len(images), 150, tail="keep", order="keyed", seed=0)
    plan = plan_batch(global_batch_size=150, world_size=ranks, samples=len(images), grad_accum_steps=micro_steps)
    for step in range(steps):
        indices = batches.indices(*divmod(step, batches.steps_per_epoch))
        shares = [torch.from_numpy(share) for share in share_of(plan, indices, rank)]
        optimizer.zero_grad()
        loss = backward(model, [(images[share], masks[share]) for share in shares])
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
