"""From the averaged gradient to new weights: the end of an optimizer step (batch contract, section 4).

The gradient is averaged over ranks already, so that what is decided here is decided alike by all of them.
"""

from __future__ import annotations

from torch import Tensor, nn

from hpcddp.train.replica import Replica


def update(replica: Replica, clip_grad_norm: float | None, overflowed: Tensor | None = None) -> None:
    """Clip once, step, and move the averaged weights; the gradient is averaged and unscaled.

    Args:
        replica: what is trained.
        clip_grad_norm: the largest norm of the averaged gradient; None does not clip.
        overflowed: a scalar on the device that is not 0 if fp16's scaler is going to leave the step out; None = it is
            not.
    """
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(replica.model.parameters(), clip_grad_norm)
    replica.scaler.step(replica.optimizer)
    if replica.ema is not None:
        replica.ema.update(replica.model, overflowed)
