"""Compare the replicas of all ranks every few steps (``train.replica_check_every``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.train.errors import DriftError
from hpcddp.train.model.normalisation import local_norms
from hpcddp.train.model.replica import Replica

LEARNING_RATE: Final = "the learning rate"

_INTEGER_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# 2^64 divided by the golden ratio, made odd: it spreads small numbers (Knuth, The Art of Computer Programming, 6.4).
_MULTIPLIER: Final = 0x9E3779B97F4A7C15 - 2**64


def digest(tensor: Tensor) -> Tensor:
    """Return a hash of the tensor's bits and their positions: an int64 scalar on the tensor's device.

    The bits of each entry pass through a bijection and are summed with an odd factor per position, modulo 2^64. A
    change of one entry always changes the hash; changes of several entries do so with overwhelming probability. Nothing
    is copied to the host.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.detach().view(_INTEGER_BY_SIZE[real.element_size()]).reshape(-1).to(torch.int64)
    mixed = bits * _MULTIPLIER
    mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF))
    places = torch.arange(1, 2 * bits.numel() + 1, 2, device=bits.device)
    return mixed.mul_(places).sum()


class ReplicaGuard:
    """Compares the replicas of all ranks at regular steps, with one hash per tensor and one small collective.

    Parameters, averaged weights, buffers, the learning rate and the scale of fp16 must be bitwise equal on all ranks.
    The running statistics of local normalisation layers differ between ranks by design and are not compared.

    Args:
        every: steps between comparisons; None = never.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every

    def check(self, replica: Replica, steps: int) -> None:
        """Compare the replicas if a comparison is due after ``steps`` steps.

        Raises:
            DriftError: names the rank and the tensors that differ; the same error on every rank.
        """
        if self._every is None or steps % self._every or dist.get_world_size() == 1:
            return
        names, digests = zip(*_digests(replica), strict=True)
        digests_here = torch.stack(digests)
        rows = [torch.empty_like(digests_here) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, digests_here)
        table = torch.stack(rows)
        if bool((table == table[0]).all()):
            return
        raise drift_error(names, table.tolist(), steps)


def _digests(replica: Replica) -> Iterator[tuple[str, Tensor]]:
    device = replica.placeholder.device
    rates = [float(group["lr"]) for group in replica.optimizer.param_groups]
    yield LEARNING_RATE, digest(torch.tensor(rates, dtype=torch.float64, device=device))
    if replica.scaler.is_enabled():
        yield "the scale of fp16", digest(torch.tensor(replica.scaler.get_scale(), device=device))
    for prefix, model in replica.models.items():
        kind = "" if prefix == "model" else "averaged "
        yield from ((f"{kind}{name}", digest(parameter)) for name, parameter in model.named_parameters())
        local_buffers = {id(buffer) for layer in local_norms(model) for buffer in layer.buffers(recurse=False)}
        for name, buffer in model.named_buffers():
            if id(buffer) not in local_buffers:
                yield f"{kind}{name}", digest(buffer)


def drift_error(names: tuple[str, ...], table: list[list[int]], steps: int) -> DriftError:
    """Return the error that names the rank that differs most from the majority, and the tensors that differ.

    Where two values are equally frequent, the value of the lowest rank counts as the majority.

    Args:
        names: of the compared tensors.
        table: hashes ``[W][names]``.
        steps: optimizer steps done.
    """
    names_by_rank: dict[int, list[str]] = {}
    for name, column in zip(names, zip(*table, strict=True), strict=True):
        # Of equally frequent values, most_common returns the first.
        usual = Counter(column).most_common(1)[0][0]
        for rank, value in enumerate(column):
            if value != usual:
                names_by_rank.setdefault(rank, []).append(name)
    most_names = max(len(names_of_rank) for names_of_rank in names_by_rank.values())
    worst_rank = min(rank for rank, names_of_rank in names_by_rank.items() if len(names_of_rank) == most_names)
    differing_names = names_by_rank[worst_rank]

    who = f"rank {worst_rank} differs"
    if len(names_by_rank) > 1:
        who = f"ranks {worst_rank} and {len(names_by_rank) - 1} more differ"
    parameters = [name for name in differing_names if name != LEARNING_RATE]
    shown_names = parameters[:1]
    if LEARNING_RATE in differing_names:
        # A wrong learning rate is the cause of wrong weights: the message names both.
        shown_names = [LEARNING_RATE, *shown_names]
    what = " and ".join(shown_names)
    if len(parameters) > 1:
        what += f" and {len(parameters) - 1} more"
    return DriftError(
        f"after step {steps} {who} from the other ranks in {what}, so that they no longer "
        "train one model; look for code that treats ranks differently, or for faulty memory on that rank's host, and "
        "go on from the last checkpoint",
        step=steps,
        rank=worst_rank,
        names=tuple(differing_names),
    )
