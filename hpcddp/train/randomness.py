"""One root seed, many keyed ones (batch contract, section 5)."""

from __future__ import annotations

import hashlib

import torch


def keyed_seed(*key: int | str) -> int:
    """Return a 63-bit seed that depends on every part of ``key``, and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_initialisation(seed: int) -> None:
    """Make the next draws the same on all ranks: parameters begin alike."""
    torch.manual_seed(keyed_seed("initialisation", seed))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make forward noise such as dropout depend on (seed, step, rank) alone, so that a rerun repeats it.

    Args:
        seed: the root seed.
        step: optimizer steps done before this one.
        rank: the rank; masks differ between ranks.
    """
    torch.manual_seed(keyed_seed("step", seed, step, rank))
