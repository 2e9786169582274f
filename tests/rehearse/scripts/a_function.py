"""A right function for `entrypoint`: the Checkpointer of the run saves, its Stopper says when to leave."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hpcddp

STEPS = 24


def main(context: hpcddp.Context) -> dict[str, float]:
    """Train from the newest checkpoint; the samples of a step follow from its number."""
    torch.manual_seed(0)
    network = nn.Linear(6, 2).to(context.device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
    checkpointer = context.checkpointer({"model": model, "optimizer": optimizer})
    loss = torch.tensor(0.0)
    for step in range(checkpointer.restore().step, STEPS):
        generator = torch.Generator().manual_seed(step * context.world_size + context.rank)
        inputs = torch.randn(8, 6, generator=generator).to(context.device)
        loss = functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        context.log(step + 1, loss=mean.item() / context.world_size)
        time.sleep(0.1)
        if context.stopper.should_stop():
            checkpointer.save(step + 1)
            checkpointer.wait()
            context.stopper.exit()
        if (step + 1) % 4 == 0:
            checkpointer.save(step + 1)
    checkpointer.save(STEPS)
    checkpointer.wait()
    return {"loss": loss.item()}
