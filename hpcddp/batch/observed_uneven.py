"""Steps per epoch that no equal batch per device makes, and a global batch in uneven shares does."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcddp.batch.refusals import count
from hpcddp.batch.split import ceil_div, divide

_WIDTH = 100
# Longer lists than these explain nothing to anyone.
_MOST_SHARES = 8
_MOST_CANDIDATES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenBatch:
    """What the steps per epoch say about a run whose ranks cannot have had equal batches.

    Args:
        steps: S, steps per epoch, as seen.
        samples: N, samples of the training data.
        world_size: W, ranks.
        kept: global batches B with ``ceil(N/B) = S``, the last one smaller; may be empty.
        dropped: global batches B with ``floor(N/B) = S``, the last one left out; may be empty.
        asked_for: the global batch that the run was meant to have; None = unknown.
    """

    steps: int
    samples: int
    world_size: int
    kept: range
    dropped: range
    asked_for: int | None = None

    @property
    def candidates(self) -> tuple[int, ...] | None:
        """The global batches that fit, in order, fewer than 2 W; None when there are too many to list."""
        if len(self.kept) + len(self.dropped) > _MOST_CANDIDATES:
            return None
        return tuple(sorted({*self.kept, *self.dropped}))

    @property
    def meant(self) -> int | None:
        """The global batch that was asked for, where the run had another."""
        # A range looks for anything but an int by walking through it.
        if self.asked_for is None or self.asked_for in self.kept or self.asked_for in self.dropped:
            return None
        return self.asked_for

    @property
    def _ends(self) -> tuple[int, int]:
        """The smallest and the largest global batch that fits."""
        ranges = [sizes for sizes in (self.kept, self.dropped) if sizes]
        return min(sizes[0] for sizes in ranges), max(sizes[-1] for sizes in ranges)

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``hpcddp plan --explain-steps --json``: no size per device is the same on all."""
        sizes = self.candidates
        smallest, largest = self._ends
        return {
            "steps_per_epoch": self.steps,
            "samples": self.samples,
            "world_size": self.world_size,
            "per_device_batch_size": None,
            "global_batch_size": smallest if smallest == largest else None,
            "candidates": None if sizes is None else [self._candidate(size) for size in sizes],
            "recipes": [],
            "meant_global_batch_size": self.meant,
            "meant_steps_per_epoch": None if self.meant is None else ceil_div(self.samples, self.meant),
        }

    @staticmethod
    def _candidate(size: int) -> dict[str, Any]:
        return {"per_device_batch_size": None, "global_batch_size": size, "recipes": []}

    def explain(self) -> str:
        """Return the text of ``hpcddp plan --explain-steps``, lines of about 100 columns."""
        smallest, largest = self._ends
        ranks = count(self.world_size, "rank")
        seen = f"{count(self.steps, 'step')} per epoch, from {count(self.samples, 'sample')} on {ranks}"
        many = count(smallest, "sample") if smallest == largest else f"{smallest:,} to {largest:,} samples"
        rows = (("seen", seen), ("per device", "uneven shares"), ("global batch", many))
        lines = ["Batch that this run really has", *(f"  {label:17}{text}" for label, text in rows), "", "Why"]
        for sentence in self._reasons():
            lines += textwrap.wrap(sentence, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines) + "\n"

    def _reasons(self) -> Iterator[str]:
        size = max(1, ceil_div(self.samples, self.world_size) // self.steps)
        below, above = (ceil_div(ceil_div(self.samples, self.world_size), n) for n in (size, size + 1))
        yield (
            f"No equal batch per device makes them: with DistributedSampler and DataLoader n = {size:,} gives "
            f"{count(below, 'step')}, and n = {size + 1:,} gives {above:,}."
        )
        for mark, fitting in (("ceil", self.kept), ("floor", self.dropped)):
            if fitting:
                yield (
                    f"{mark}({self.samples:,} / {fitting[0]:,}) is {self.steps:,}: a global batch that is shared as it "
                    f"is, as hpcddp does{self._shares(fitting[0])}."
                )
        if self.meant is not None:
            yield (
                f"A global batch of {self.meant:,} is not what it has: with {self.meant:,} an epoch would be "
                f"ceil({self.samples:,} / {self.meant:,}) = {ceil_div(self.samples, self.meant):,} steps."
            )

    def _shares(self, batch: int) -> str:
        if self.world_size > _MOST_SHARES:
            return ""
        return f", in shares of {', '.join(f'{share:,}' for share in divide(batch, self.world_size))}"


def uneven_batch(*, steps: int, samples: int, world_size: int, asked_for: int | None = None) -> UnevenBatch | None:
    """Return the global batches of W samples or more that make the steps, or None where there is none.

    Args:
        steps: S >= 2, where no equal batch per device makes as many.
        samples: N.
        world_size: W.
        asked_for: the global batch that the run was meant to have; None = unknown.
    """
    kept = range(max(world_size, ceil_div(samples, steps)), (samples - 1) // (steps - 1) + 1)
    dropped = range(max(world_size, samples // (steps + 1) + 1), samples // steps + 1)
    if not (kept or dropped):
        return None
    return UnevenBatch(
        steps=steps, samples=samples, world_size=world_size, kept=kept, dropped=dropped, asked_for=asked_for
    )
