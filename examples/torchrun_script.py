"""A plain script, written for torchrun. It runs under hpcddp without changes.

torchrun --standalone --nproc-per-node 2 examples/torchrun_script.py
hpcddp submit --nodes 2 --tasks-per-node 2 --time 10min --global-batch-size 64 -- python examples/torchrun_script.py
"""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist
from sklearn import datasets
from torch import nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 4


def train() -> None:
    """Train a small network on handwritten digits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    digits = datasets.load_digits()
    data = TensorDataset(torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target))
    sampler: DistributedSampler[object] = DistributedSampler(data)
    # hpcddp sets this rank's share of the global batch; torchrun does not.
    batch_size = int(os.environ.get("HPCDDP_PER_DEVICE_BATCH_SIZE", "32"))
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device))
    optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        correct = torch.zeros((), device=device)
        for images, labels in loader:
            scores = model(images.to(device))
            loss = functional.cross_entropy(scores, labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            correct += (scores.argmax(1) == labels.to(device)).sum()
        dist.all_reduce(correct)
        print(f"rank {rank} of {ranks}: epoch {epoch}, accuracy {correct.item() / len(data):.3f}", flush=True)


def main() -> None:
    """Open a group, train, and close it."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train()
    # DDP is part of reference cycles. If it is freed after its process group, it can abort the process.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
