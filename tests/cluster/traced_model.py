"""A model that writes down every batch it is trained on, so that what was computed is known from outside the library.

A copy of this file lies beside the job files of the tests. Each training forward appends one line to the attempt's
``trace-RANK``: the time, the samples, a digest of the batch. On request it misbehaves at its n-th training forward.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch  # noqa: TID253
from torch import Tensor, nn  # noqa: TID253

# The library tries a model with so many samples before it trains; no rank's share is as small.
_TRIED = 2
FAST = Path(__file__).with_name("fast")


class Traced(nn.Module):
    """A small network; ``behaviour`` is what ``build`` takes."""

    def __init__(self, num_classes: int, behaviour: dict[str, float]) -> None:
        super().__init__()
        layers = (nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, num_classes))
        self.layers = nn.Sequential(*layers)
        self.behaviour, self.forwards = behaviour, 0
        self.rank = int(os.environ["RANK"])
        attempt = Path(os.environ["HPCDDP_ATTEMPT_DIR"])
        path = attempt / f"trace-{self.rank}"
        self.trace = repeated(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return self._scores(images)
        if len(images) == _TRIED:
            return self._scores(images)
        self.forwards += 1
        digest = hashlib.blake2b(images.numpy().tobytes(), digest_size=8).hexdigest()
        line = f"{time.time():.4f} {len(images)} {digest}\n".encode()
        while line:
            written = repeated(partial(os.write, self.trace, line))
            line = line[written:]
        slow = self.rank == self.behaviour.get("slow_rank")
        if self.behaviour.get("seconds") and not FAST.exists():
            time.sleep(self.behaviour["seconds"] * (3 if slow else 1))
        return self._misbehave(self._scores(images))

    def _scores(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores

    def _misbehave(self, scores: Tensor) -> Tensor:
        if self.rank != self.behaviour.get("rank", 1):
            return scores
        if self.forwards == self.behaviour.get("raise_at"):
            raise ValueError("a bug in the user's model")
        if self.forwards == self.behaviour.get("stuck_at"):
            time.sleep(3600)
        if self.forwards == self.behaviour.get("exit_at"):
            os._exit(0)
        return scores * torch.nan if self.forwards == self.behaviour.get("nan_at") else scores


def repeated(action: Callable[[], int]) -> int:
    """Do what fails on a full disk or in a directory that is away, again for up to a minute."""
    for _ in range(600):
        with suppress(OSError):
            return action()
        time.sleep(0.1)
    return action()


def build(num_classes: int, *, missing_on: int | None = None, **behaviour: float) -> nn.Module:
    """Return the model.

    Args:
        num_classes: the data's.
        missing_on: a rank that looks for a file that is not there.
        behaviour: ``seconds`` that a step takes until there is a file ``fast``, three times as long on ``slow_rank``;
            and what ``rank`` (1 if not given) does at its n-th forward: ``raise_at``, ``stuck_at``, ``exit_at``
            (0), ``nan_at``.
    """
    if os.environ["RANK"] == str(missing_on):
        Path("/no/such/place/weights.pt").read_bytes()
    return Traced(num_classes, behaviour)
