"""One rank that computes every case."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, not marked so
from torch.nn.parallel import DistributedDataParallel

from hpcddp import gather_with_grad, sum_statistics, weighted_mean
from hpcddp.batch.plan import plan_batch
from hpcddp.batch.sampler import share_of
from hpcddp.train.model.replica import leave_compiler_out
from tests.train.losses.cases import CASES, RUNS


def run(name: str, batch: int, micro_steps: int) -> dict[str, Tensor]:
    """Make one step on this rank's share and return the loss and the gradients."""
    case = CASES[name]
    plan = plan_batch(
        global_batch_size=batch, world_size=dist.get_world_size(), samples=None, grad_accum_steps=micro_steps
    )
    first, second = case.load()
    shares = share_of(plan, torch.arange(batch).numpy(), dist.get_rank())
    model = DistributedDataParallel(case.make_model())
    loss = case.backward(model, [(first[share], second[share]) for share in shares])
    gradients = {key: p.grad for key, p in model.module.named_parameters() if p.grad is not None}
    return {"loss": loss, **gradients}


def token_mean() -> dict[str, Tensor]:
    """Return the value and the gradient of a token mean with two ranks and two micro-steps."""
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1 or isinstance(group, int):
        return {}
    pairs = [[(10, 2), (30, 10)], [(4, 4), (2, 1)]][dist.get_rank()]
    factor = torch.ones((), requires_grad=True)
    (tokens,) = sum_statistics(([torch.tensor(count)] for _, count in pairs), group=group)
    losses = [weighted_mean(factor * total, global_count=tokens, group=group) for total, _ in pairs]
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    value = torch.stack(losses).sum().detach()
    gradient = factor.grad if factor.grad is not None else torch.zeros(())
    for number in (value, gradient):
        dist.all_reduce(number, group=group)
    return {"value": value / 2, "gradient": gradient / 2}


def gathered() -> dict[str, Tensor]:
    """Gather uneven shares, one of them empty, with known sizes."""
    sizes = [2, 0, 3, 1]
    own = torch.full((sizes[dist.get_rank()], 2), float(dist.get_rank()))
    return {"known": gather_with_grad(own, sizes=sizes), "asked": gather_with_grad(own)}


def main(folder: Path, world_size: int, rank: int) -> int:
    """Compute everything; rank r writes ``r.pt``."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    store = FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # Its import takes each rank longer than all cases.
    leave_compiler_out()
    results = {"/".join(map(str, which)): run(*which) for which in RUNS}
    torch.save({**results, "token_mean": token_mean(), "gathered": gathered()}, folder / f"{rank}.pt")
    dist.barrier()
    return 0
