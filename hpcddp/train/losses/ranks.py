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

# Numbers of the first collective of a sum, whatever there is to be summed; larger statistics take a second one.
INLINE: Final = 512
_MOST_REMEMBERED: Final = 1024


def device_of_tensors(values: Iterable[object], group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of the first tensor among the values; without one, that of the group's collectives."""
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    return device or distributed.collective_device(group)


def add_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace ``values``, which must be contiguous, by their sum over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(values, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a rank gives to a helper, in numbers that every rank gets to see before any collective depends on them.

    Args:
        misuse: which mistake this rank knows of; 0 = none.
        shapes: checksum of what must be the same on every rank.
        sizes: checksum of the sizes that the caller gave.
        first: a number for the message.
        second: a number for the message.
    """

    misuse: int = 0
    shapes: int = 0
    sizes: int = 0
    first: float = 0
    second: float = 0

    @property
    def row(self) -> tuple[float, ...]:
        """The numbers, float64 holds all of them exactly."""
        return self.misuse, self.shapes, self.sizes, self.first, self.second


_ROW: Final = len(Layout().row)
# Layouts of all ranks that were read and found right, so that a GPU need not be waited for once more.
_known: set[tuple[object, ...]] = set()


def checksum(value: object) -> int:
    """Return 32 bits of the text of a value, the same in every process."""
    return zlib.crc32(repr(value).encode())


@lru_cache(maxsize=_MOST_REMEMBERED)
def _row_on(device: torch.device, row: tuple[float, ...]) -> Tensor:
    # A copy from the host's memory waits for the GPU; it is made once for each row.
    return torch.tensor(row, dtype=torch.float64, device=device)


def agree(
    layout: Layout,
    explain: Callable[[Sequence[Layout]], str | None],
    *,
    device: torch.device,
    group: dist.ProcessGroup | None,
    values: Tensor | None = None,
    read: bool = False,
) -> tuple[list[Layout] | None, Tensor]:
    """Let every rank see what the others give, and refuse what does not fit together, on every rank alike.

    One collective, whose size depends on nothing that a rank gives: ranks that give different things would abort (gloo)
    or wait for each other (NCCL) in a collective of their own sizes. The first values travel along. On a GPU the
    layouts are read, which waits for the device, where this rank's own is a new one; where it is not, values that were
    summed with another layout are NaN.

    Args:
        layout: what this rank gives.
        explain: returns why the layouts of all ranks do not fit together, in one sentence; None = they do.
        device: where the collective takes place.
        group: the process group; None = the default one, or one process where none is open.
        values: float64 ``[k]``, k <= INLINE, to be summed; None = nothing.
        read: whether to read the layouts in any case.

    Returns:
        The layouts of all ranks, None if they were not read; and the sums.

    Raises:
        LossError: the layouts do not fit together.
    """
    ranks = distributed.world_size(group)
    rank = distributed.rank(group)
    rows = ranks * _ROW
    block = torch.zeros(rows + (0 if values is None else INLINE), dtype=torch.float64, device=device)
    block[rank * _ROW : (rank + 1) * _ROW] = _row_on(device, layout.row)
    if values is not None:
        block[rows : rows + len(values)] = values
    add_over_ranks(block, group)
    sums = block[rows : rows + (0 if values is None else len(values))]
    table = block[:rows].view(ranks, _ROW)
    key = (layout, ranks, rank)
    if key in _known and device.type != "cpu" and not read:
        return None, torch.where((table[:, :3] == table[rank, :3]).all(), sums, torch.nan)
    layouts = [_layout_of(row) for row in table.tolist()]
    sentence = explain(layouts)
    if sentence is not None:
        raise LossError(sentence)
    if len(_known) >= _MOST_REMEMBERED:
        _known.clear()
    _known.add(key)
    return layouts, sums


def _layout_of(row: Sequence[float]) -> Layout:
    misuse, shapes, sizes, first, second = row
    return Layout(misuse=int(misuse), shapes=int(shapes), sizes=int(sizes), first=first, second=second)


class _Misuse(IntEnum):
    """Mistakes in what a rank gives to be gathered that the rank itself knows of; 0 is none."""

    NO_TENSOR = 1
    SCALAR = 2
    NOT_AS_MANY = 3
    """The tensors of one rank have different lengths."""
    SIZES_OF_OTHER_RANKS = 4
    """As many sizes as there are no ranks."""
    ANOTHER_SIZE = 5


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
    layout = _layout_to_gather(shares, sizes, distributed.world_size(group), distributed.rank(group))
    layouts, _ = agree(
        layout, _why_not_gathered, device=device_of_tensors(shares, group), group=group, read=sizes is None
    )
    return list(sizes or ()) if layouts is None else [int(other.first) for other in layouts]


def _layout_to_gather(shares: Sequence[object], sizes: Sequence[int] | None, ranks: int, rank: int) -> Layout:
    tensors = [share for share in shares if isinstance(share, Tensor)]
    if len(tensors) < len(shares) or not tensors:
        return Layout(misuse=_Misuse.NO_TENSOR)
    if not all(tensor.dim() for tensor in tensors):
        return Layout(misuse=_Misuse.SCALAR)
    lengths = sorted({len(tensor) for tensor in tensors})
    if len(lengths) > 1:
        return Layout(misuse=_Misuse.NOT_AS_MANY, first=lengths[0], second=lengths[-1])
    if sizes is not None and len(sizes) != ranks:
        return Layout(misuse=_Misuse.SIZES_OF_OTHER_RANKS, first=len(sizes))
    if sizes is not None and sizes[rank] != lengths[0]:
        return Layout(misuse=_Misuse.ANOTHER_SIZE, first=lengths[0], second=sizes[rank])
    return Layout(
        shapes=checksum([(tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in tensors]),
        sizes=checksum(None if sizes is None else [int(size) for size in sizes]),
        first=lengths[0],
        second=sum(tensor.shape[1:].numel() for tensor in tensors),
    )


def _why_not_gathered(layouts: Sequence[Layout]) -> str | None:
    rank = first_misuse(layouts)
    if rank is not None:
        layout = layouts[rank]
        where = on_rank(rank, layouts)
        return {
            _Misuse.NO_TENSOR: f"what is to be gathered{where} is no tensor; give the outputs of the model, [n, ...]",
            _Misuse.SCALAR: f"what is to be gathered{where} is a scalar, and a gather needs one row for each sample; "
            "give the outputs [n, ...] before they are reduced (numbers are added over ranks by additive_loss)",
            _Misuse.NOT_AS_MANY: f"the outputs{where} have {layout.first:g} and {layout.second:g} rows, and each needs "
            "one row for each sample of the micro-batch; give outputs of the same samples",
            _Misuse.SIZES_OF_OTHER_RANKS: f"sizes holds {layout.first:g} numbers{where}, and there are {len(layouts)} "
            "ranks; give the samples of every rank, in rank order, or leave sizes out",
            _Misuse.ANOTHER_SIZE: f"sizes holds {layout.second:g} for rank {rank}, which gives {layout.first:g} rows; "
            "give the samples of this very step, of every rank (the last one of an epoch may be smaller), or leave "
            "sizes out",
        }[_Misuse(layout.misuse)]
    rank = first_other(layouts)
    if rank is None:
        return None
    if layouts[rank].sizes != layouts[0].sizes:
        return (
            f"rank {rank} was given other sizes than rank 0, and both need the samples of every rank; give the same "
            "list on every rank, or leave sizes out on all"
        )
    return (
        f"the rows to be gathered have another shape or dtype on rank {rank} ({layouts[rank].second:g} numbers each) "
        f"than on rank 0 ({layouts[0].second:g}); make all dimensions but the first the same on every rank, for "
        "example by padding"
    )


def first_misuse(layouts: Sequence[Layout]) -> int | None:
    """Return the first rank that knows of a mistake of its own."""
    return next((rank for rank, layout in enumerate(layouts) if layout.misuse), None)


def first_other(layouts: Sequence[Layout]) -> int | None:
    """Return the first rank that gives other shapes, or was given other sizes, than rank 0."""
    first = layouts[0].shapes, layouts[0].sizes
    return next((rank for rank, layout in enumerate(layouts) if (layout.shapes, layout.sizes) != first), None)


def on_rank(rank: int, layouts: Sequence[Layout]) -> str:
    """Return " on rank 3", or nothing where there is one rank."""
    return f" on rank {rank}" if len(layouts) > 1 else ""


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
    return torch.cat([piece[:size] for piece, size in zip(gathered, sizes, strict=True)])


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
    return value if factor == 1 else ScaleGradient.apply(value, factor)


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
        return summed.narrow(0, sum(ctx.sizes[:rank]), ctx.sizes[rank]), None, None


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
