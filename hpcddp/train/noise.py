"""The gradient noise scale: how large a batch still pays (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).

Each rank's gradient is one over a small batch, the averaged one is one over the global batch, and both are there in
every step. Their squared lengths tell the true gradient G from its noise. With n_r samples on the R ranks that have
some, b in all, g_r the mean gradient of a rank and g that of the global batch::

    E |g_r|^2 = |G|^2 + tr(S) / n_r          E |g|^2 = |G|^2 + tr(S) / b

    tr(S)  is estimated by  (mean |g_r|^2 - |g|^2) / (mean 1/n_r - 1/b)
    |G|^2  is estimated by  |g|^2 - tr(S) / b

without bias; the noise scale is tr(S) / |G|^2, in samples. Of one step both are mostly noise themselves, and a ratio
of noisy numbers has a bias: each is averaged over steps first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, not marked so
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpcddp.batch.noise_scale import verdict
from hpcddp.train.gradients import gradients

# About 500 steps: steadier estimates need more steps than the noise scale stays the same for.
_DECAY: Final = 0.998
_FEW_STEPS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The estimate, as far as it is; travels in the checkpoint.

    Args:
        trace: moving average of the estimates of tr(S), from 0 on.
        signal: moving average of the estimates of |G|^2, from 0 on; both are too small by the same factor.
        steps: steps that were observed.
    """

    trace: float = 0.0
    signal: float = 0.0
    steps: int = 0

    @property
    def samples(self) -> float | None:
        """The noise scale, in samples; None while nothing sensible is known."""
        return self.trace / self.signal if self.signal > 0 and self.trace > 0 else None

    def observed(self, *, small: float, large: float, shares: Sequence[int]) -> NoiseScale:
        """Return the estimate after one more step.

        Args:
            small: sum over ranks with samples of the squared length of their mean gradient.
            large: squared length of the global batch's mean gradient.
            shares: n_r of every rank.
        """
        sizes = [share for share in shares if share]
        batch = sum(sizes)
        apart = math.fsum(1 / size for size in sizes) / len(sizes) - 1 / batch
        if len(sizes) == 1 or not (math.isfinite(small) and math.isfinite(large)):
            return self
        trace = (small / len(sizes) - large) / apart
        signal = large - trace / batch
        return NoiseScale(
            trace=_DECAY * self.trace + (1 - _DECAY) * trace,
            signal=_DECAY * self.signal + (1 - _DECAY) * signal,
            steps=self.steps + 1,
        )

    def advice(self, global_batch_size: int) -> str:
        """Return the sentence on whether a larger batch would still pay.

        Args:
            global_batch_size: B.
        """
        noise = self.samples
        if noise is None:
            return f"gradient noise scale: not known after {self.steps} steps, the gradient is too small to be told"
        early = f" (of {self.steps} steps, few for an estimate)" if self.steps < _FEW_STEPS else ""
        return f"gradient noise scale {noise:.4g} samples{early}, global batch {global_batch_size}: " + verdict(
            noise, global_batch_size
        )


class GradientNorms:
    """Lengths of this rank's own gradient, taken by a hook where DDP is about to average it.

    Args:
        parallel: the model in DDP; it averages as before, to rounding.
    """

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self._ranks = dist.get_world_size()
        self._squares: list[Tensor] = []
        # DDP wants annotations to be types, and ours are text: a lambda has none.
        parallel.register_comm_hook(None, lambda _, bucket: self._average(bucket))

    def _average(self, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        self._squares.append(torch.linalg.vector_norm(buffer, dtype=torch.float64).square())
        buffer.mul_(1 / self._ranks)
        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def begin(self) -> None:
        """Forget the gradient before."""
        self._squares.clear()

    def read(self, model: nn.Module, *, share: int, samples: int, scale: float = 1.0) -> Tensor:
        """Return this rank's part of (small, large) for ``NoiseScale.observed``, float64 ``[2]``, to be summed.

        DDP's own input is ``sum over a of W * n[r,a] / b * (mean gradient)``, so that the rank's mean gradient is
        ``b / (W * n_r)`` times that.

        Args:
            model: the model; its gradients are averaged and unscaled.
            share: n_r.
            samples: b.
            scale: what fp16's scaler multiplied the gradient by.
        """
        small = torch.stack(self._squares).sum()
        small *= (samples / (self._ranks * share * scale)) ** 2 if share else 0
        large = nn.utils.get_total_norm(gradients(model)).double().square() / self._ranks
        return torch.stack([small, large])
