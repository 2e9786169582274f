"""Checks that need several ranks, run one after the other in one process group.

Each returns what this rank saw, as JSON; the tests compare.
"""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.batch.plan import plan_batch
from hpcddp.jobfile.sections import Train
from hpcddp.train.errors import DriftError, UserCodeError
from hpcddp.train.loop.agreement import PendingAgreement, StepSums
from hpcddp.train.loop.schedule import Position
from hpcddp.train.loop.step import Stepper, clip_and_step
from hpcddp.train.model.merging import gather_differing, merged_buffers, take_rows
from hpcddp.train.model.normalisation import absent, choose_batch_norm
from hpcddp.train.model.replica import ReplicaGuard, build_replica

RATE = 0.1


def largest(*pairs: tuple[Tensor | None, Tensor | None]) -> float:
    """Return the largest difference."""
    return max(
        (float((one - other).detach().abs().max()) for one, other in pairs if one is not None and other is not None),
        default=0.0,
    )


# Shares of the ranks, and the layer with the shape of one sample.
SHARES = [(16, 16, 16, 16), (8, 8, 8, 8), (4, 4, 4, 4), (2, 2, 2, 2), (1, 1, 1, 1), (5, 1, 3, 1), (3, 2, 0, 1)]
LAYERS: list[tuple[Callable[[], Any], tuple[int, ...]]] = [
    (lambda: nn.BatchNorm1d(3), (3,)),
    (lambda: nn.BatchNorm1d(3, momentum=None), (3, 5)),
    (lambda: nn.BatchNorm2d(3, momentum=0.3, eps=1e-3), (3, 2, 3)),
    (lambda: nn.BatchNorm3d(3, affine=False), (3, 2, 1, 2)),
    (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 2, 2)),
]


def batch_norm(rank: int, ranks: int) -> dict[str, float]:
    """Return the largest difference to one process, for shares and layers, after two steps."""
    del ranks
    return {
        f"{shares} {number}": _batch_norm_error(make(), shape, shares, rank)
        for shares in SHARES
        for number, (make, shape) in enumerate(LAYERS)
    }


def _batch_norm_error(layer: Any, shape: tuple[int, ...], shares: tuple[int, ...], rank: int) -> float:
    torch.manual_seed(sum(shares))
    reference = layer.double()
    if reference.affine:
        nn.init.normal_(reference.weight)
        nn.init.normal_(reference.bias)
    mine = copy.deepcopy(reference)
    choose_batch_norm(mine, "sync", "cpu")
    error = 0.0
    for _ in range(2):
        whole: Any = (torch.randn(sum(shares), *shape, dtype=torch.float64) * 2 + 5).requires_grad_()
        weights = torch.randn_like(whole)
        first = sum(shares[:rank])
        rows = slice(first, first + shares[rank])
        share = whole.detach()[rows].clone().requires_grad_()
        outputs = reference(whole)
        (outputs.tanh() * weights).sum().backward()
        if shares[rank]:
            found = mine(share)
            (found.tanh() * weights[rows]).sum().backward()
            error = max(error, largest((found, outputs[rows]), (share.grad, whole.grad[rows])))
        else:
            placeholder = (
                torch.linspace(0, 9, 2 * math.prod(shape), dtype=torch.float64).view(2, *shape).requires_grad_()
            )
            with absent(mine):
                (mine(placeholder) * 0).sum().backward()
            error = max(error, largest((placeholder.grad, torch.zeros_like(placeholder))))
    own = [*(parameter.grad for parameter in mine.parameters())]
    for gradient in own:
        dist.all_reduce(gradient)
    expected = [parameter.grad for parameter in reference.parameters()]
    statistics = zip(mine.buffers(), reference.buffers(), strict=True)
    return max(error, largest(*zip(own, expected, strict=True), *statistics), _evaluation_error(mine, reference, shape))


def _evaluation_error(mine: nn.Module, reference: nn.Module, shape: tuple[int, ...]) -> float:
    inputs = torch.randn(3, *shape, dtype=torch.float64)
    return largest((mine.eval()(inputs), reference.eval()(inputs)))


def closed_form(rank: int, ranks: int) -> list[float]:
    """Return running mean and variance of 0, 2 | 4, 6 and two absent ranks, and the layer's names."""
    del ranks
    layer = nn.BatchNorm1d(1).double()
    choose_batch_norm(layer, "sync", "cpu")
    if rank < 2:
        layer(torch.tensor([[0.0], [2.0]], dtype=torch.float64) + 4 * rank)
    else:
        with absent(layer):
            layer(torch.full((2, 1), 100.0, dtype=torch.float64))
    return [float(buffer) for buffer in layer.buffers()]


def far_from_zero(rank: int, ranks: int) -> float:
    """Return the relative error of the variance of single-precision numbers that lie far from zero."""
    del ranks
    torch.manual_seed(rank)
    values = 1e4 + torch.randn(64, 1)
    layer: Any = nn.BatchNorm1d(1, momentum=1.0)
    choose_batch_norm(layer, "sync", "cpu")
    layer(values)
    everyone = torch.cat([1e4 + torch.randn(64, 1, generator=torch.Generator().manual_seed(r)) for r in range(4)])
    return abs(float(layer.running_var) / float(everyone.double().var()) - 1)


def one_value(rank: int, ranks: int) -> str:
    """Return what is said of one value over all ranks."""
    del ranks
    layer: Any = nn.BatchNorm1d(1)
    choose_batch_norm(layer, "sync", "cpu")
    layer.absent = rank > 0
    try:
        layer(torch.zeros(1 if rank == 0 else 2, 1))
    except ValueError as error:
        return str(error)
    return "nothing"


class Twin(nn.Module):
    """Two linear layers; the second is used where the first number of a sample is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.always(inputs)
        chosen = inputs[:, 0] > 0
        if chosen.any():
            outputs = outputs.index_add(0, chosen.nonzero()[:, 0], self.sometimes(inputs[chosen]))
        return outputs


def replica_of(model: nn.Module, *, unused: bool = False, **changes: Any) -> Any:
    train = Train.model_validate({"model": "a.b:c", "dataset": "a.b:c", "precision": "fp64", **changes})
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    placeholder = torch.randn(2, 3, dtype=torch.float64)
    return build_replica(train, model.double(), placeholder, learning_rate=RATE, unused_parameters=unused)


def batches_of(samples: Tensor, labels: Tensor, shares: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    first = 0
    for share in shares:
        yield samples[first : first + share], labels[first : first + share]
        first += share


def position(step: int, samples: int, rate: float = RATE) -> Position:
    return Position(step=step, epoch=0, step_in_epoch=step, units=samples, samples=samples, learning_rate=rate)


def stepper_of(replica: Any, rank: int, ranks: int, samples: int, **changes: Any) -> Stepper:
    """Return a stepper that sees the same global batch in every step."""
    steps = changes.pop("steps", 1)
    accumulation = changes.pop("accumulation", 1)
    plan = plan_batch(global_batch_size=samples, world_size=ranks, samples=None, grad_accum_steps=accumulation)
    inputs, labels = global_batch(samples)
    before = sum(sum(plan.rank_share(samples, other)) for other in range(rank))
    shares = [share for share in plan.rank_share(samples, rank) if share]
    own = [batch for _ in range(steps) for batch in batches_of(inputs[before:], labels[before:], shares)]
    train = Train.model_validate({"model": "a.b:c", "dataset": "a.b:c", "precision": "fp64", **changes})
    return Stepper(replica, plan, train, iter(own), rank)


def take_step(stepper: Stepper, position: Position) -> StepSums:
    """Make one step, and return what the ranks agree on in it."""
    part = stepper.compute(position)
    agreement = PendingAgreement([part])
    stepper.update(part)
    return agreement.read().steps[0]


def global_batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 3, dtype=torch.float64, generator=generator)
    # Only the first sample, which is rank 0's, uses all parameters.
    inputs[:, 0] = -inputs[:, 0].abs()
    inputs[0, 0] = 1
    return inputs, torch.arange(samples) % 2


def clipping(rank: int, ranks: int) -> list[float]:
    """Return the change of two parameters whose gradients are (3, 4) on even ranks and (0, 0.5) on odd ones."""
    del ranks
    replica = replica_of(nn.Linear(3, 1, bias=False))
    before = replica.model.weight.detach().clone()
    slope = [[3.0, 4.0, 0.0], [0.0, 0.5, 0.0]][rank % 2]
    replica.parallel(torch.tensor([slope], dtype=torch.float64)).sum().backward()
    clip_and_step(replica, 1.0)
    change: list[float] = ((before - replica.model.weight) / RATE)[0].tolist()
    return change


def unused(rank: int, ranks: int) -> dict[str, float]:
    """Return the largest difference of gradients to one process, where most ranks leave some parameters out."""
    errors = {}
    for accumulation in (1, 2):
        replica = replica_of(Twin(), unused=True, clip_grad_norm=0.5)
        alone = copy.deepcopy(replica.model)
        stepper = stepper_of(replica, rank, ranks, 9, accumulation=accumulation, clip_grad_norm=0.5)
        take_step(stepper, position(0, 9))
        inputs, labels = global_batch(9)
        loss: Any = nn.functional.cross_entropy(alone(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        torch.optim.SGD(alone.parameters(), lr=RATE).step()
        errors[str(accumulation)] = largest(*zip(replica.model.parameters(), alone.parameters(), strict=True))
    fresh = replica_of(Twin(), unused=True).model
    errors["moved"] = largest(*zip(fresh.parameters(), alone.parameters(), strict=True))
    return errors


def overflow(rank: int, ranks: int) -> list[dict[str, Any]]:
    """Return what came of three steps of fp16's scaler, in the second of which rank 2 alone overflows."""
    replica = replica_of(nn.Linear(3, 2), ema_decay=0.5)
    replica.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    stepper = stepper_of(replica, rank, ranks, 8, steps=3, clip_grad_norm=1.0)
    seen = []
    for step in range(3):
        spoil = rank == 2 and step == 1
        hook = replica.model.weight.register_hook(lambda gradient: gradient * torch.inf) if spoil else None
        sums = take_step(stepper, position(step, 8))
        if hook is not None:
            hook.remove()
        models = replica.models.values()
        entries = [float(parameter.detach()[0].sum()) for model in models for parameter in model.parameters()]
        seen.append({"skipped": sums.nonfinite, "scale": replica.scaler.get_scale(), "entries": entries})
    return seen


def average(rank: int, ranks: int) -> float:
    """Return the largest difference of the averaged weights, statistics included, to the average of what there was."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    replica = replica_of(model, ema_decay=0.9)
    stepper = stepper_of(replica, rank, ranks, 8, steps=4, ema_decay=0.9)
    expected = [value.detach().clone() for value in replica.model.state_dict().values()]
    for step in range(4):
        take_step(stepper, position(step, 8))
        for index, value in enumerate(replica.model.state_dict().values()):
            floating = value.is_floating_point()
            expected[index] = 0.9 * expected[index] + 0.1 * value.detach() if floating else value.detach().clone()
    found = replica.models["ema"].state_dict().values()
    return largest(*zip(found, expected, strict=True))


def guard(rank: int, ranks: int) -> dict[str, Any]:
    """Return what the guard says of 50 clean steps, and of steps whose rate is 1.1 times as large on rank 1."""
    replica = replica_of(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    stepper, watch, alarms = stepper_of(replica, rank, ranks, 8, steps=60), ReplicaGuard(5), []
    for step in range(60):
        factor = 1.1 if rank == 1 and step >= 52 else 1.0
        take_step(stepper, position(step, 8, rate=RATE * factor))
        try:
            watch.check(replica, step + 1)
        except DriftError as error:
            alarms.append([error.step, error.rank, int(error.exit_code), error.message])
            break
    return {"alarms": alarms}


def guard_of_buffers(rank: int, ranks: int) -> list[str]:
    """Return what the guard says of local statistics that differ, and then of one entry of a buffer on rank 2."""
    del ranks
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].instances = nn.InstanceNorm1d(4, track_running_stats=True)
    model.register_buffer("mask", torch.ones(5))
    replica, said = replica_of(model), []
    for entry in (0.0, 1e-30):
        with torch.no_grad():
            model[1].running_mean.fill_(rank)
            model[0].instances.running_var.fill_(rank)
            model.mask[3] = entry if rank == 2 else 0.0
        try:
            ReplicaGuard(1).check(replica, 7)
        except DriftError as error:
            said.append(f"{error.rank} {error.message}")
    return said


def merging(rank: int, ranks: int) -> dict[str, Any]:
    """Return running statistics of ranks that counted 2, 4, 0, 2 samples: within the block, after it, and by rank."""
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).double()
    model.register_buffer("own", torch.tensor([float(rank)]))
    norm: Any = model[1]
    norm.running_mean.copy_(torch.tensor([rank, 1.0]))
    norm.running_var.copy_(torch.tensor([1.0 + rank, 2.0]))
    norm.num_batches_tracked.fill_(3)
    before = [buffer.tolist() for buffer in model.buffers()]
    with merged_buffers(model, [2, 4, 0, 2][rank]):
        merged = [buffer.tolist() for buffer in model.buffers()]
    after = [buffer.tolist() for buffer in model.buffers()]
    with merged_buffers(model, 0):
        of_nothing = [buffer.tolist() for buffer in model.buffers()]
    rows = gather_differing({"model": model})
    shared = [rows]
    dist.broadcast_object_list(shared, src=0)
    other = copy.deepcopy(model)
    for buffer in other.buffers():
        buffer.zero_()
    take_rows({"model": other}, shared[0])
    return {
        "merged": merged,
        "put_back": before == after,
        "of_nothing": of_nothing,
        "names": sorted(rows),
        "own_again": [buffer.tolist() for name, buffer in other.named_buffers() if name in ("own", "1.running_mean")],
        "ranks": ranks,
    }


def unreached(rank: int, ranks: int) -> str:
    """Return what is said where only rank 0 uses all parameters, and nobody said that this may be."""

    class Late(Twin):
        first = True

        def forward(self, inputs: Tensor) -> Tensor:
            # The first backward, which is thrown away, uses all.
            used, self.first = inputs.abs() if self.first else inputs, False
            return super().forward(used)

    stepper = stepper_of(replica_of(Late()), rank, ranks, 9)
    try:
        take_step(stepper, position(0, 9))
    except (UserCodeError, RuntimeError) as error:
        return str(error)
    return "nothing"


CHECKS: list[Callable[[int, int], Any]] = [
    batch_norm, closed_form, far_from_zero, one_value, clipping, unused, overflow, average, guard, guard_of_buffers,
    merging, unreached,
]  # fmt: skip


def main(folder: Path, ranks: int, rank: int) -> int:
    warnings.simplefilter("error")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    answers = {check.__name__: check(rank, ranks) for check in CHECKS}
    # No barrier: rank 0 of the last check waits until the others have ended.
    (folder / f"{rank}.json").write_text(json.dumps(answers))
    return 0
