"""Losses that are functions of sums over samples, exact for every split of the global batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.train import distributed
from hpcddp.train.errors import LossError, describe
from hpcddp.train.losses.ranks import (
    INLINE,
    InputSummary,
    add_over_ranks,
    agree,
    checksum,
    device_of_tensors,
    first_different,
    first_misuse,
    rank_suffix,
    scale_gradient,
)


def weighted_mean(
    total: Tensor,
    count: Tensor | None = None,
    *,
    global_count: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the loss ``sum / count`` of the global batch, to call ``backward`` on under DDP.

    For losses that are divided by something other than the number of samples: tokens that are not padding, pixels
    that are not ignored, class weights, positives. DDP averages over ranks (batch contract, section 0):
    ``gradient = (1/W) sum over r, a of grad L[r,a]``. The loss of the global batch is ``sum of s[r,a] / C`` with ``C``
    the count over all ranks and micro-steps. So ``L[r,a] = W * s[r,a] / C`` is exact, and ``s[r,a] / c[r,a]`` is not,
    unless all counts are equal.

    Without accumulation::

        loss = weighted_mean(losses[kept].sum(), kept.sum())

    With accumulation the count of all micro-batches must be known before the first backward; it needs no forward::

        (tokens,) = sum_statistics([(targets != PADDING).sum()] for _, targets in micro_batches)
        for inputs, targets in micro_batches:  # all but the last inside no_sync
            weighted_mean(token_losses(inputs, targets).sum(), global_count=tokens).backward()

    An empty share passes a sum over no samples, ``outputs[:0].sum()``: it counts 0 and keeps the collectives matched.

    Args:
        total: the sum of weighted losses of this rank's micro-batch, a scalar.
        count: what that sum is divided by (sum of weights, number of tokens), a scalar, where A = 1; it may have a
            gradient.
        global_count: in its place where A > 1: the count over all ranks and micro-steps, from ``sum_statistics``.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        A float64 scalar. With ``count`` its value is the loss of the global batch, the same on every rank. With
        ``global_count`` it is L[r,a]: the mean over ranks of the sum over micro-steps is the loss of the global batch.

    Raises:
        LossError: not exactly one of ``count`` and ``global_count`` is given, or one is not a real scalar tensor on
            some rank; the same error on every rank.
    """
    if count is not None and global_count is None:
        totals = _sum_over_ranks([(total, count)], group, scalars=True)
        return _loss_of_sums(torch.div, (total, count), totals, group)
    if global_count is not None and count is None:
        _refuse_misuse([total], scalars=True)
        return total.double() * distributed.world_size(group) / global_count
    given = "neither count nor" if count is None else "both count and"
    raise LossError(
        f"weighted_mean got {given} global_count; give count "
        "where a rank makes one backward per step, global_count where it makes several"
    )


def additive_loss(
    function: Callable[..., Tensor],
    *statistics: Tensor,
    totals: Sequence[Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the loss ``function(sums over the global batch)``, to call ``backward`` on under DDP.

    It makes many losses exact: batch Dice and IoU, class-weighted cross entropy, token means, correlation, Barlow
    Twins. The loss of the global batch is ``f(S)`` with ``S = sum of s[r,a]``, so its gradient is ``f'(S) * sum over r,
    a of grad s[r,a]``. DDP computes ``(1/W) sum over r, a of grad L[r,a]`` (batch contract, section 0). With::

        L[r,a] = W * f(S + s[r,a] - stopgrad(s[r,a]))

    the argument of f has the value S and the gradient of s[r,a], so that both are equal, under any split. S is summed
    over ranks without gradient, in float64.

    Without accumulation::

        loss = additive_loss(lambda both, either: 1 - both / either, intersection.sum(), union.sum())

    With accumulation S must be known before the first backward, and it needs the outputs of every micro-batch: two
    passes, which ``accumulate_additive`` makes. An empty share passes sums over no samples, ``outputs[:0].sum()``.

    Args:
        function: f; takes as many float64 tensors as there are statistics, in their shapes, returns a scalar.
        statistics: s[r,a], sums over the samples of this rank's micro-batch; any shapes, the same on every rank. The
            number of samples is one too, if f needs it.
        totals: S where A > 1, from ``sum_statistics``; None = A is 1, and one collective sums the statistics here.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        A float64 scalar. Its value is ``f(S)``, the loss of the global batch, the same on every rank and in every
        micro-step: log it as it is. Its gradient is that of L[r,a].

    Raises:
        LossError: ``totals`` do not match the statistics, ``function`` returns no scalar, or the statistics are not
            what ``sum_statistics`` takes.
    """
    if totals is None:
        totals = _sum_over_ranks([statistics], group)
    else:
        _refuse_misuse(statistics)
    return _loss_of_sums(function, statistics, totals, group)


def _loss_of_sums(
    function: Callable[..., Tensor],
    statistics: Sequence[Tensor],
    totals: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the loss ``function(totals)`` with the gradient of L[r,a] of ``additive_loss``."""
    shapes = [tuple(s.shape) for s in statistics]
    expected = [tuple(total.shape) for total in totals]
    if shapes != expected:
        raise LossError(
            f"additive_loss got statistics of shapes {shapes} and totals of shapes {expected}, and each total is the "
            "sum of one statistic; give the same statistics to sum_statistics, in the same order"
        )
    # The value of S with the gradient of s[r,a].
    sums = [total + (s - s.detach()).double() for total, s in zip(totals, statistics, strict=True)]
    loss: object = function(*sums)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise LossError(
            f"the function of additive_loss returns {describe(loss)}, and a loss is a scalar; return its mean or sum"
        )
    return scale_gradient(loss, distributed.world_size(group))


def sum_statistics(
    statistics: Iterable[Sequence[Tensor]], *, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, ...]:
    """Return the sums of statistics over all micro-batches of all ranks, without gradient.

    One collective; a second one where the statistics are more than 512 numbers.

    Args:
        statistics: for each micro-batch of this rank, in any order, its sums over samples; as many and of the same
            shapes in every micro-batch and on every rank.
        group: the process group; None = the default one, or one process where none is open.

    Returns:
        One float64 tensor per statistic, in its shape.

    Raises:
        LossError: there is no micro-batch: a rank without samples gives sums over none, not nothing; a statistic is
            no tensor or complex; or its shape is another one in another micro-batch or on another rank. The same error
            on every rank.
    """
    return _sum_over_ranks([tuple(row) for row in statistics], group)


class _Misuse(IntEnum):
    """Mistakes in the statistics of a rank that the rank itself knows of; 0 is none."""

    NOTHING = 1
    NUMBER = 2
    NO_TENSOR = 3
    COMPLEX = 4
    NO_SCALAR = 5
    MICRO_BATCHES = 6
    """The statistics of its micro-batches have different shapes."""


@torch.no_grad()
def _sum_over_ranks(
    rows: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None, *, scalars: bool = False
) -> tuple[Tensor, ...]:
    """Return the sums of ``sum_statistics``.

    Args:
        rows: the statistics of each micro-batch.
        scalars: whether statistics that have dimensions are refused.
    """
    summary = _summarise_statistics(rows, scalars=scalars)
    device = device_of_tensors(itertools.chain.from_iterable(rows), group)
    if summary.misuse:
        local_sums = torch.zeros(0, dtype=torch.float64, device=device)
    else:
        local_sums = torch.stack([_flatten(row) for row in rows]).sum(0)

    is_large = len(local_sums) > INLINE
    _, sums = agree(
        summary, _explain_refused_sum, device=device, group=group, values=local_sums[:INLINE], read=is_large
    )
    if is_large:
        add_over_ranks(local_sums, group)
        sums = local_sums

    parts = torch.split(sums, [statistic.numel() for statistic in rows[0]])
    return tuple(part.view(statistic.shape) for part, statistic in zip(parts, rows[0], strict=True))


def _flatten(statistics: Sequence[Tensor]) -> Tensor:
    """Return all numbers of the statistics in one float64 vector."""
    return torch.cat([statistic.detach().double().reshape(-1) for statistic in statistics])


def _refuse_misuse(statistics: Sequence[object], *, scalars: bool = False) -> None:
    """Refuse statistics of this rank where no collective follows."""
    sentence = _explain_refused_sum([_summarise_statistics([statistics], scalars=scalars)])
    if sentence is not None:
        raise LossError(sentence)


def _summarise_statistics(rows: Sequence[Sequence[object]], *, scalars: bool) -> InputSummary:
    """Return the summary of the statistics of each micro-batch; ``scalars`` refuses those that have dimensions."""
    if not rows or not rows[0]:
        return InputSummary(misuse=_Misuse.NOTHING)
    for statistic in itertools.chain.from_iterable(rows):
        misuse = _misuse_of(statistic, scalars=scalars)
        if misuse is not None:
            return misuse
    shapes = [_shapes(row) for row in rows]
    if any(shapes_of_row != shapes[0] for shapes_of_row in shapes):
        return InputSummary(misuse=_Misuse.MICRO_BATCHES)
    return InputSummary(shapes=checksum(shapes[0]), count=len(shapes[0]), numbers=sum(map(math.prod, shapes[0])))


def _shapes(statistics: Sequence[object]) -> list[tuple[int, ...]]:
    return [tuple(statistic.shape) for statistic in statistics if isinstance(statistic, Tensor)]


def _misuse_of(statistic: object, *, scalars: bool) -> InputSummary | None:
    """Return the summary of a rank with a statistic that cannot be summed; None if it can be."""
    if isinstance(statistic, int | float):
        return InputSummary(misuse=_Misuse.NUMBER, count=float(statistic))
    if not isinstance(statistic, Tensor):
        return InputSummary(misuse=_Misuse.NO_TENSOR)
    if statistic.is_complex():
        return InputSummary(misuse=_Misuse.COMPLEX, count=8 * statistic.element_size())
    if scalars and statistic.dim() > 0:
        return InputSummary(misuse=_Misuse.NO_SCALAR, count=statistic.numel())
    return None


def _explain_refused_sum(summaries: Sequence[InputSummary]) -> str | None:
    """Return why the statistics of all ranks cannot be summed; None if they can."""
    misused = first_misuse(summaries)
    if misused is not None:
        return _explain_misuse(misused, summaries)
    different = first_different(summaries)
    if different is None:
        return None
    return (
        f"the statistics of rank {different} ({_describe_count(summaries[different])}) have other shapes than those of "
        f"rank 0 ({_describe_count(summaries[0])}), and are summed over ranks; give sums over samples, such as "
        "losses.sum(), not one number for each sample"
    )


def _describe_count(summary: InputSummary) -> str:
    return f"{summary.count:g} of {summary.numbers:g} numbers"


def _explain_misuse(rank: int, summaries: Sequence[InputSummary]) -> str:
    number = f"{summaries[rank].count:g}"
    where = rank_suffix(rank, summaries)
    match _Misuse(summaries[rank].misuse):
        case _Misuse.NOTHING:
            return (
                f"sum_statistics got no statistics{where}, and every rank must take part in the sum; give those of an "
                "empty share: sums over no samples, which are 0"
            )
        case _Misuse.NUMBER:
            return (
                f"a statistic is the number {number}{where}, and statistics are tensors, which are summed over ranks; "
                f"give what this rank has as torch.tensor({number}), or what the global batch has as global_count of "
                "weighted_mean or inside the function of additive_loss"
            )
        case _Misuse.NO_TENSOR:
            return (
                f"a statistic{where} is no tensor, and statistics are tensors, which are summed over ranks; give the "
                "sum over this rank's samples as a tensor"
            )
        case _Misuse.COMPLEX:
            return (
                f"a statistic is a complex{number} tensor{where}, and sums are made in float64, which would lose its "
                "imaginary part; give torch.view_as_real of it"
            )
        case _Misuse.NO_SCALAR:
            return (
                f"weighted_mean got a tensor of {number} numbers with a dimension{where}, and takes the sum over this "
                "rank's samples, a scalar, and what divides it; write losses.sum()"
            )
        case _Misuse.MICRO_BATCHES:
            return (
                f"the statistics of the micro-batches{where} are not as many, or not of the same shapes, and are "
                "summed; give sums over samples, such as losses.sum(), not one number for each sample"
            )
