"""One rank that computes every case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, not marked so
from torch.nn.parallel import DistributedDataParallel

from hpcddp import LossError, accumulate_gathered, additive_loss, gather_with_grad, sum_statistics, weighted_mean
from hpcddp.batch.plan import plan_batch
from hpcddp.batch.sampler import share_of
from hpcddp.train.model.compiler import leave_compiler_out
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


def misuses() -> dict[str, Callable[[int], object]]:
    """Return calls that cannot be right; each gets the rank."""
    mixed = [torch.ones(2), torch.ones(1), torch.ones(2), torch.ones(2)]
    rows = [torch.ones(2, 3), torch.ones(2, 4), torch.ones(2, 3), torch.ones(2, 3)]
    return {
        "number as count": lambda _: weighted_mean(torch.ones(()), 5),  # type: ignore[arg-type]
        "number as count on one rank": lambda rank: weighted_mean(
            torch.ones(()),
            5 if rank == 2 else torch.tensor(5),  # type: ignore[arg-type]
        ),
        "list": lambda _: additive_loss(torch.div, torch.ones(()), [1.0]),  # type: ignore[arg-type]
        "vector in a weighted mean": lambda rank: weighted_mean(mixed[rank], torch.tensor(2)),
        "vectors of uneven shares": lambda rank: additive_loss(torch.div, mixed[rank], torch.tensor(2)),
        "large vectors": lambda rank: sum_statistics([[torch.ones(600 + rank)]]),
        "large vector on one rank": lambda rank: sum_statistics([[torch.ones(600 if rank else 6)]]),
        "another number of statistics": lambda rank: sum_statistics([[torch.ones(())] * (1 + (rank == 3))]),
        "micro-batches": lambda _: sum_statistics([[torch.ones(3)], [torch.ones(2)]]),
        "nothing on one rank": lambda rank: sum_statistics([[torch.ones(())]] if rank else []),
        "complex on one rank": lambda rank: sum_statistics([[torch.ones((), dtype=torch.complex64 if rank else None)]]),
        "scalar": lambda _: gather_with_grad(torch.ones(())),
        "scalar on one rank": lambda rank: gather_with_grad(torch.ones(() if rank else (2,))),
        "no tensor": lambda _: gather_with_grad(1.0),  # type: ignore[arg-type]
        "too few sizes": lambda _: gather_with_grad(torch.ones(2, 3), sizes=[2, 2, 2]),
        "sizes of a full batch": lambda rank: gather_with_grad(mixed[rank], sizes=[2, 2, 2, 2]),
        "other sizes": lambda rank: gather_with_grad(torch.ones(2), sizes=[2, 2, 2, 2] if rank else [2, 2, 2, 1]),
        "sizes on one rank": lambda rank: gather_with_grad(torch.ones(2), sizes=[2, 2, 2, 2] if rank else None),
        "other rows": lambda rank: gather_with_grad(rows[rank]),
        "other rows of known sizes": lambda rank: gather_with_grad(rows[rank], sizes=[2, 2, 2, 2]),
        "other dtypes": lambda rank: gather_with_grad(torch.ones(2, dtype=torch.float32 if rank == 1 else None)),
        "outputs of other samples": lambda rank: accumulate_gathered(
            lambda one, _: one.sum(),
            lambda batch: [batch, batch[: 1 + rank]],
            [torch.ones(4, 2)] * 2,
            model=nn.Identity(),
        ),
        "scalar outputs": lambda _: accumulate_gathered(
            torch.sum, lambda batch: [batch.sum()], [torch.ones(4, 2)] * 2, model=nn.Identity()
        ),
    }


def message_of(misuse: Callable[[int], object]) -> str:
    """Return what a call that cannot be right is refused with on this rank."""
    try:
        misuse(dist.get_rank())
    except LossError as error:
        return error.message
    return "not refused"


def main(folder: Path, world_size: int, rank: int) -> int:
    """Compute everything; rank r writes ``r.pt``."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    store = FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # Its import takes each rank longer than all cases.
    leave_compiler_out()
    results = {"/".join(map(str, which)): run(*which) for which in RUNS}
    others = {"token_mean": token_mean(), "gathered": gathered()}
    # After the refusals, the ranks still meet in the same collectives.
    refused = {name: message_of(call) for name, call in misuses().items()}
    torch.save({**results, **others, "refused": refused, "after": gathered()}, folder / f"{rank}.pt")
    dist.barrier()
    return 0
