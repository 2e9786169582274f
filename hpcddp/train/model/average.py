"""The average of gradients over the ranks, as a communication hook of DDP whose wait another thread can end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpcddp.train.buffers import as_real
from hpcddp.train.waits import WAITS


class Bucket(Protocol):
    """What is used of ``torch.distributed.GradBucket``, which torch's types leave out."""

    def buffer(self) -> Tensor:
        """Return the gradients of this rank in one tensor."""
        ...


def average(bucket: Bucket) -> Future[Tensor]:
    """Start to average a bucket over the ranks; dense gradients get the bits of DDP if they were None before."""
    buffer = as_real(bucket.buffer())
    # DDP multiplies too (``Reducer::mark_variable_ready_dense`` in torch/csrc): a division would round otherwise.
    buffer.mul_(1 / dist.get_world_size())
    return WAITS.future(dist.all_reduce(buffer, async_op=True), bucket.buffer)


def use_hook(parallel: DistributedDataParallel, hook: Callable[[Bucket], Future[Tensor]]) -> None:
    """Let DDP reduce each bucket of gradients with a hook."""
    # DDP checks annotations and expects types, but ours are strings: a lambda has none.
    parallel.register_comm_hook(None, lambda _, bucket: hook(bucket))
