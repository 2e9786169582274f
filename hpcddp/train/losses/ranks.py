"""Collectives for losses and metrics, and the gather with gradient; without a process group there is one rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hpcddp.train import distributed
from hpcddp.train.errors import LossError

# Values that travel in the first collective of a sum, whatever there is to be summed; more take a second one.
INLINE: Final = 512
_MOST_REMEMBERED: Final = 1024


def device_of_tensors(values: Iterable[object], group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of the first tensor among the values; without one, that of the group's collectives."""
    for value in values:
        if isinstance(value, Tensor):
            return value.device
    return distributed.collective_device(group)


def add_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace ``values``, which must be contiguous, by their sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(values, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSummary:
    """What a rank gives to a helper, in numbers that every rank gets to see before any collective depends on them.

    Args:
        misuse: which mistake this rank knows of; 0 = none.
        shapes: checksum of what must be the same on every rank.
        sizes: checksum of the sizes that the caller gave.
        count: how many rows are gathered, or statistics are summed; after a mistake, a number for the message.
        numbers: how many numbers a row has, or all statistics have; after a mistake, a number for the message.
    """

    misuse: int = 0
    shapes: int = 0
    sizes: int = 0
    count: float = 0
    numbers: float = 0

    @property
    def row(self) -> tuple[float, ...]:
        """The numbers; float64 holds all of them exactly."""
        return self.misuse, self.shapes, self.sizes, self.count, self.numbers


_ROW_LENGTH: Final = len(InputSummary().row)
# The first numbers of a row must be equal on all ranks: the mistake, and both checksums.
_EQUAL_NUMBERS: Final = 3
# Summaries of this rank that fitted together with those of the others, so that a GPU need not be waited for once more.
_accepted: set[tuple[object, ...]] = set()


def checksum(value: object) -> int:
    """Return 32 bits of the text of a value, the same in every process."""
    return zlib.crc32(repr(value).encode())


@lru_cache(maxsize=_MOST_REMEMBERED)
def _row_on(device: torch.device, row: tuple[float, ...]) -> Tensor:
    # A copy from the host's memory waits for the GPU; it is made once for each row.
    return torch.tensor(row, dtype=torch.float64, device=device)


def agree(
    summary: InputSummary,
    explain: Callable[[Sequence[InputSummary]], str | None],
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
    values: Tensor | None = None,
    read: bool = False,
) -> tuple[list[InputSummary] | None, Tensor]:
    """Let every rank see what the others give, and refuse what does not fit together, on every rank alike.

    One collective, whose size depends on nothing that a rank gives: ranks that give different things would abort (gloo)
    or wait for each other (NCCL) in a collective of their own sizes. The first values travel along. On a GPU the
    summaries are read, which waits for the device, where this rank's own is a new one; where it is not, values that
    were summed with another summary are NaN.

    Args:
        summary: what this rank gives.
        explain: returns why the summaries of all ranks do not fit together, in one sentence; None = they do.
        device: where the collective takes place.
        group: the process group; None = the default one, or one process where none is open.
        values: float64 ``[k]``, k <= INLINE, to be summed; None = nothing.
        read: whether to read the summaries in any case.

    Returns:
        The summaries of all ranks, None if they were not read; and the sums.

    Raises:
        LossError: the summaries do not fit together.
    """
    rank = distributed.rank(group)
    rows, sums = _exchange(summary, values, device, group)
    key = (summary, len(rows), rank)
    if key in _accepted and device.type != "cpu" and not read:
        is_equal = (rows[:, :_EQUAL_NUMBERS] == rows[rank, :_EQUAL_NUMBERS]).all()
        return None, torch.where(is_equal, sums, torch.nan)
    summaries = [_summary_of(row) for row in rows.tolist()]
    sentence = explain(summaries)
    if sentence is not None:
        raise LossError(sentence)
    if len(_accepted) >= _MOST_REMEMBERED:
        _accepted.clear()
    _accepted.add(key)
    return summaries, sums


def _exchange(
    summary: InputSummary, values: Tensor | None, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the rows of all ranks (``InputSummary.row``), and the sums of the values; one collective."""
    # The block that is summed has a row for each rank, in which the other ranks have zeros, and after them the values.
    world_size = distributed.world_size(group)
    rows_end = world_size * _ROW_LENGTH
    block_length = rows_end
    values_end = rows_end
    if values is not None:
        block_length += INLINE
        values_end += len(values)
    block = torch.zeros(block_length, dtype=torch.float64, device=device)
    rows = block[:rows_end].view(world_size, _ROW_LENGTH)
    sums = block[rows_end:values_end]
    rows[distributed.rank(group)] = _row_on(device, summary.row)
    if values is not None:
        sums.copy_(values)
    add_over_ranks(block, group)
    return rows, sums


def _summary_of(row: Sequence[float]) -> InputSummary:
    misuse, shapes, sizes, count, numbers = row
    return InputSummary(misuse=int(misuse), shapes=int(shapes), sizes=int(sizes), count=count, numbers=numbers)


class _Misuse(IntEnum):
    """Mistakes in what a rank gives to be gathered that the rank itself knows of; 0 is none."""

    NO_TENSOR = 1
    SCALAR = 2
    DIFFERENT_LENGTHS = 3
    """The tensors of one rank have different lengths."""
    NUMBER_OF_SIZES = 4
    """There are more or fewer sizes than ranks."""
    WRONG_SIZE = 5
    """The size given for this rank is not that of its share."""


def agree_on_sizes(
    shares: Sequence[object], *, sizes: Sequence[int] | None = None, group: dist.ProcessGroup | None
) -> list[int]:
    """Return the length of every rank's shares along dimension 0, in rank order; one collective.

    Args:
        shares: tensors of this rank ``[n_r, ...]``, all of the same length.
        sizes: n_r of every rank if the caller knows them: a GPU is then waited for only where they are new.
        group: the process group; None = the default one, or one process where none is open.

    Raises:
        LossError: the shares, or the sizes, do not fit together; on every rank.
    """
    summary = _summarise_shares(shares, sizes, group)
    device = device_of_tensors(shares, group)
    summaries, _ = agree(summary, _explain_refused_gather, device=device, group=group, read=sizes is None)
    if summaries is None:
        # They are always read where no sizes are given.
        return list(sizes or ())
    return [int(summary.count) for summary in summaries]


def _summarise_shares(
    shares: Sequence[object], sizes: Sequence[int] | None, group: dist.ProcessGroup | None
) -> InputSummary:
    tensors = [share for share in shares if isinstance(share, Tensor)]
    if len(tensors) < len(shares) or not tensors:
        return InputSummary(misuse=_Misuse.NO_TENSOR)
    if any(tensor.dim() == 0 for tensor in tensors):
        return InputSummary(misuse=_Misuse.SCALAR)
    lengths = sorted({len(tensor) for tensor in tensors})
    if len(lengths) > 1:
        return InputSummary(misuse=_Misuse.DIFFERENT_LENGTHS, count=lengths[0], numbers=lengths[-1])
    if sizes is not None:
        if len(sizes) != distributed.world_size(group):
            return InputSummary(misuse=_Misuse.NUMBER_OF_SIZES, count=len(sizes))
        size = sizes[distributed.rank(group)]
        if size != lengths[0]:
            return InputSummary(misuse=_Misuse.WRONG_SIZE, count=lengths[0], numbers=size)
    return InputSummary(
        shapes=checksum([(tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in tensors]),
        sizes=checksum(None if sizes is None else [int(size) for size in sizes]),
        count=lengths[0],
        numbers=sum(tensor.shape[1:].numel() for tensor in tensors),
    )


def _explain_refused_gather(summaries: Sequence[InputSummary]) -> str | None:
    """Return why the shares of all ranks cannot be gathered; None if they can."""
    misused = first_misuse(summaries)
    if misused is not None:
        return _explain_misuse(misused, summaries)
    different = first_different(summaries)
    if different is None:
        return None
    if summaries[different].sizes != summaries[0].sizes:
        return (
            f"rank {different} was given other sizes than rank 0, and both need the samples of every rank; give the "
            "same list on every rank, or leave sizes out on all"
        )
    return (
        f"the rows to be gathered have another shape or dtype on rank {different} "
        f"({summaries[different].numbers:g} numbers each) than on rank 0 ({summaries[0].numbers:g}); make all "
        "dimensions but the first the same on every rank, for example by padding"
    )


def _explain_misuse(rank: int, summaries: Sequence[InputSummary]) -> str:
    summary = summaries[rank]
    where = rank_suffix(rank, summaries)
    match _Misuse(summary.misuse):
        case _Misuse.NO_TENSOR:
            return f"what is to be gathered{where} is no tensor; give the outputs of the model, [n, ...]"
        case _Misuse.SCALAR:
            return (
                f"what is to be gathered{where} is a scalar, and a gather needs one row for each sample; give the "
                "outputs [n, ...] before they are reduced (numbers are added over ranks by additive_loss)"
            )
        case _Misuse.DIFFERENT_LENGTHS:
            return (
                f"the outputs{where} have {summary.count:g} and {summary.numbers:g} rows, and each needs one row for "
                "each sample of the micro-batch; give outputs of the same samples"
            )
        case _Misuse.NUMBER_OF_SIZES:
            return (
                f"sizes holds {summary.count:g} numbers{where}, and there are {len(summaries)} ranks; give the samples "
                "of every rank, in rank order, or leave sizes out"
            )
        case _Misuse.WRONG_SIZE:
            return (
                f"sizes holds {summary.numbers:g} for rank {rank}, which gives {summary.count:g} rows; give the "
                "samples of this very step, of every rank (the last one of an epoch may be smaller), or leave sizes out"
            )


def first_misuse(summaries: Sequence[InputSummary]) -> int | None:
    """Return the first rank that knows of a mistake of its own."""
    return next((rank for rank, summary in enumerate(summaries) if summary.misuse), None)


def first_different(summaries: Sequence[InputSummary]) -> int | None:
    """Return the first rank that gives other shapes, or was given other sizes, than rank 0."""
    for rank, summary in enumerate(summaries):
        if summary.shapes != summaries[0].shapes or summary.sizes != summaries[0].sizes:
            return rank
    return None


def rank_suffix(rank: int, summaries: Sequence[InputSummary]) -> str:
    """Return " on rank 3", or nothing where there is one rank."""
    return f" on rank {rank}" if len(summaries) > 1 else ""


def gather_shares(share: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the shares of all ranks, concatenated in rank order, without gradient.

    Args:
        share: this rank's share ``[n_r, ...]``.
        sizes: n_r of every rank.
        group: the process group; None = the default one.
    """
    if not dist.is_initialized():
        return share.detach()
    # all_gather needs equal shapes: short shares are padded, and the padding is removed.
    padded = share.new_zeros((max(sizes), *share.shape[1:]))
    padded[: len(share)] = share.detach()
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    shares = [rows[:size] for rows, size in zip(gathered, sizes, strict=True)]
    return torch.cat(shares)


class _ScaleContext(Protocol):
    """What the forward keeps for the backward."""

    factor: float


class ScaleGradient(Function):
    """Identity whose backward multiplies the gradient by a number."""

    @staticmethod
    def forward(ctx: _ScaleContext, value: Tensor, factor: float) -> Tensor:
        """Return ``value``."""
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: _ScaleContext, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient times the factor."""
        return gradients[0] * ctx.factor, None


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return ``value`` with its gradient multiplied by ``factor``."""
    if factor == 1:
        return value
    scaled: Tensor = ScaleGradient.apply(value, factor)
    return scaled


class _GatherContext(Protocol):
    """What the forward keeps for the backward."""

    sizes: Sequence[int]
    group: dist.ProcessGroup | None


class _Gather(Function):
    @staticmethod
    def forward(ctx: _GatherContext, share: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.sizes = sizes
        ctx.group = group
        return gather_shares(share, sizes, group)

    @staticmethod
    def backward(ctx: _GatherContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        add_over_ranks(summed, ctx.group)
        rank = distributed.rank(ctx.group)
        begin = sum(ctx.sizes[:rank])
        return summed[begin : begin + ctx.sizes[rank]], None, None


def gather_with_grad(
    share: Tensor, *, sizes: Sequence[int] | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the outputs of all ranks, in rank order, on every rank; the backward sums over ranks.

    Every rank then computes the full loss F of the global batch, *with no factor*::

        image, text = gather_with_grad(image), gather_with_grad(text)
        loss = contrastive(image, text, model.module.temperature)

    This is exact: rank r holds the outputs z_r, and every rank computes F(z_0 .. z_{W-1}, tau). The backward of the
    gather sums the gradients of the W ranks for z_r: W * dF/dz_r. DDP divides by W (batch contract, section 0), giving
    ``sum over r of dF/dz_r * dz_r/dparameters``, the gradient of F. A parameter that F uses directly, such as a
    temperature, gets dF/dtau on every rank, and the mean of W equal numbers is that number. A gather whose backward
    only takes the rank's own slice gives 1/W of the encoder's gradient but all of the temperature's: no factor on the
    loss or on the learning rate corrects both.

    Shares may be uneven or empty; an empty share passes ``outputs[:0]``. With accumulation use ``accumulate_gathered``.

    Args:
        share: this rank's outputs ``[n_r, ...]``; all dimensions but the first are the same on every rank. Labels,
            which have no gradient, can be gathered too.
        sizes: n_r of every rank if known, such as ``plan.per_rank_samples``: a GPU is then not waited for, except in
            the first steps; None = the ranks tell each other.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        ``[sum of n_r, ...]``, the same on every rank: the order of the global batch.

    Raises:
        LossError: the share is a scalar, the sizes are not those of the shares, or a rank's rows have another shape or
            dtype; the same error on every rank.
    """
    agreed_sizes = agree_on_sizes([share], sizes=sizes, group=group)
    if not dist.is_initialized():
        return share
    gathered: Tensor = _Gather.apply(share, agreed_sizes, group)
    return gathered
