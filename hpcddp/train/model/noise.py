"""Checks and norms of a model's gradients, and the gradient noise scale that is estimated from them.

The noise scale is tr(S) / |G|^2, with S the covariance of the gradients of single samples and G their mean
(McCandlish et al. 2018, arXiv 1812.06162). It is estimated from the norms of each rank's gradient and of the gradient
of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpcddp.batch.noise_scale import larger_batch_text
from hpcddp.train.buffers import as_real
from hpcddp.train.model.average import Bucket, average, use_hook

# About 500 steps: steadier estimates need more steps than the noise scale stays the same for.
_DECAY: Final = 0.998
_FEW_STEPS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The estimate after some steps; it is part of the checkpoint.

    Args:
        trace: moving average of the estimates of tr(S), starting at 0.
        signal: moving average of the estimates of |G|^2, starting at 0; both are too small by the same factor.
        steps: observed steps.
    """

    trace: float = 0.0
    signal: float = 0.0
    steps: int = 0

    @property
    def samples(self) -> float | None:
        """The noise scale, in samples; None while an estimate is not positive."""
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
        """Return a sentence that says whether a larger global batch would be worth it."""
        noise = self.samples
        if noise is None:
            return f"gradient noise scale: not known after {self.steps} steps, the gradient is too small to measure it"
        early = f" (of {self.steps} steps, few for an estimate)" if self.steps < _FEW_STEPS else ""
        return (
            f"gradient noise scale {noise:.4g} samples{early}, global batch {global_batch_size}: "
            + larger_batch_text(noise, global_batch_size)
        )


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters that have one."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def nonfinite_gradient(model: nn.Module) -> Tensor:
    """Return a float64 scalar on the device: 1 if some gradient is infinite or not a number, else 0."""
    # The maximum norm: a sum of squares could overflow although every entry is finite.
    largest = nn.utils.get_total_norm(gradients(model), norm_type=math.inf)
    return torch.isfinite(largest).logical_not().double()


class GradientNorms:
    """Norm of this rank's own gradient, measured by a DDP communication hook before the gradients are averaged.

    Args:
        parallel: the model in DDP; it averages as without the hook.
    """

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self._ranks = dist.get_world_size()
        self._squares: list[Tensor] = []
        use_hook(parallel, self._average)

    def _average(self, bucket: Bucket) -> Future[Tensor]:
        buffer = as_real(bucket.buffer())
        self._squares.append(torch.linalg.vector_norm(buffer, dtype=torch.float64).square())
        return average(bucket)

    def begin(self) -> None:
        """Discard the norms of the last step."""
        self._squares.clear()

    def read(self, model: nn.Module, *, share: int, samples: int, scale: Tensor | float = 1.0) -> Tensor:
        """Return this rank's part of (small, large) for ``NoiseScale.observed``, float64 ``[2]``, to be summed.

        The input of DDP's all-reduce is ``sum over a of W * n[r,a] / b * (mean gradient)``, so the rank's mean gradient
        is ``b / (W * n_r)`` times that.

        Args:
            model: the model; its gradients are averaged and unscaled.
            share: n_r, samples of this rank.
            samples: b, samples of the global batch.
            scale: the factor of fp16's GradScaler, on the device.
        """
        small = torch.stack(self._squares).sum()
        small *= (samples / (self._ranks * share)) ** 2 if share else 0
        small /= scale**2
        large = nn.utils.get_total_norm(gradients(model)).double().square() / self._ranks
        return torch.stack([small, large])
