"""Find the batch that another program's run uses from its steps per epoch."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hpcddp.batch.refusals import PlanError, count, refuse_below_one
from hpcddp.batch.split import ceil_div, divide

_WIDTH = 100
_MOST_CANDIDATES = 1000
_MOST_WRITTEN = 6
_MOST_SHARES = 8
Last = Literal["keep", "drop"]


def explain_steps(
    *, steps: int, samples: int, world_size: int, asked_for: int | None = None
) -> ObservedBatch | UnevenBatch:
    """Return the batches that result in the steps per epoch of a run.

    Args:
        steps: S >= 1, batches of each rank per epoch, as observed.
        samples: N >= 1, samples of the training data.
        world_size: W >= 1, ranks.
        asked_for: the intended global batch; None = unknown.

    Returns:
        The batches per device, or, if there are none, global batches in uneven shares.

    Raises:
        PlanError: no batch results in that number of steps.
    """
    refuse_below_one(steps=steps, samples=samples, world_size=world_size, global_batch_size=asked_for)
    # If W divides N, both kinds of sampler give the same shares.
    samplers: dict[Last, int] = {"keep": ceil_div(samples, world_size)}
    if samples % world_size:
        samplers["drop"] = samples // world_size
    loaders: tuple[Last, Last] = ("keep", "drop")
    found = (
        _recipe(sampler, loader, steps, samplers[sampler]) for sampler, loader in itertools.product(samplers, loaders)
    )
    recipes = tuple(recipe for recipe in found if recipe is not None)
    if not recipes:
        uneven = uneven_batch(steps=steps, samples=samples, world_size=world_size, asked_for=asked_for)
        if uneven is None:
            raise _impossible(steps, samples, world_size)
        return uneven
    return ObservedBatch(steps=steps, samples=samples, world_size=world_size, recipes=recipes, asked_for=asked_for)


def _recipe(sampler: Last, loader: Last, steps: int, share: int) -> Recipe | None:
    """Return the n with ``ceil(M/n) = S`` (keep) or ``floor(M/n) = S`` (drop), or None where there is none."""
    if share == 0:
        return None
    if loader == "keep":
        first, last = ceil_div(share, steps), None if steps == 1 else (share - 1) // (steps - 1)
    else:
        first, last = share // (steps + 1) + 1, share // steps
    if last is not None and first > last:
        return None
    return Recipe(sampler=sampler, loader=loader, per_rank_samples=share, smallest=first, largest=last)


def _impossible(steps: int, samples: int, world_size: int) -> PlanError:
    share = ceil_div(samples, world_size)
    size = max(1, share // steps)
    here = f"{count(size, 'sample')} per device {'makes' if size == 1 else 'make'} {ceil_div(share, size):,}"
    between = f"{here} and {size + 1:,} make {count(ceil_div(share, size + 1), 'step')}"
    why = f"1 sample per device, the fewest, makes {count(share, 'step')}" if steps > share else between
    return PlanError(
        f"{count(steps, 'step')} per epoch cannot come from {count(samples, 'sample')} on {count(world_size, 'rank')}: "
        f"each rank has {share:,}, and {why}; check the three numbers, and where the run accumulates, multiply "
        "its optimizer steps by the micro-steps",
        steps=steps,
        samples=samples,
        world_size=world_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way of rounding, and the batches per device that result in the observed steps.

    Args:
        sampler: the sampler's treatment of a remainder: ``keep`` repeats samples, ``drop`` is its ``drop_last=True``.
        loader: the loader's treatment of its last batch: ``keep`` makes it smaller, ``drop`` is its ``drop_last=True``.
        per_rank_samples: M, samples of each rank per epoch.
        smallest: the smallest n that fits, >= 1.
        largest: the largest one; None = no limit.
    """

    sampler: Last
    loader: Last
    per_rank_samples: int
    smallest: int
    largest: int | None

    def covers(self, size: int) -> bool:
        """Return whether ``size`` samples per device result in the observed steps."""
        return size >= self.smallest and (self.largest is None or size <= self.largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedBatch:
    """Equal batches per device that explain the steps per epoch of a run.

    Args:
        steps: S, batches of each rank per epoch, as observed.
        samples: N, samples of the training data.
        world_size: W, ranks.
        recipes: every way of rounding that results in S steps; never empty.
        asked_for: the intended global batch; None = unknown.
    """

    steps: int
    samples: int
    world_size: int
    recipes: tuple[Recipe, ...]
    asked_for: int | None = None

    @property
    def smallest(self) -> int:
        """The smallest batch per device that fits."""
        return min(recipe.smallest for recipe in self.recipes)

    @property
    def largest(self) -> int | None:
        """The largest batch per device that fits; None = no limit."""
        limits = [recipe.largest for recipe in self.recipes if recipe.largest is not None]
        return max(limits) if len(limits) == len(self.recipes) else None

    @property
    def candidates(self) -> tuple[int, ...] | None:
        """All batches per device that fit, in order; None when there are too many to list."""
        spans = [(recipe.smallest, recipe.largest) for recipe in self.recipes]
        if any(last is None or last - first >= _MOST_CANDIDATES for first, last in spans):
            return None
        return tuple(sorted({size for first, last in spans for size in range(first, (last or first) + 1)}))

    @property
    def meant(self) -> int | None:
        """The intended global batch, where the run has another: as given, or else a likely power of two."""
        sizes = self.candidates
        if self.asked_for is not None:
            size, rest = divmod(self.asked_for, self.world_size)
            return None if rest == 0 and any(recipe.covers(size) for recipe in self.recipes) else self.asked_for
        if sizes is None or len(sizes) != 1:
            return None
        first = self.world_size * sizes[0]
        # int(B/W) is the same n for several B, of which a power of two is the most likely choice.
        power = 1 << (first + self.world_size - 1).bit_length() - 1
        return power if first < power else None

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``hpcddp plan --explain-steps --json``."""
        sizes = self.candidates
        return {
            "steps_per_epoch": self.steps,
            "samples": self.samples,
            "world_size": self.world_size,
            "per_device_batch_size": sizes[0] if sizes is not None and len(sizes) == 1 else None,
            "global_batch_size": self.world_size * sizes[0] if sizes is not None and len(sizes) == 1 else None,
            "candidates": None if sizes is None else [self._candidate(size) for size in sizes],
            "recipes": [
                {
                    "sampler": recipe.sampler,
                    "loader": recipe.loader,
                    "per_rank_samples": recipe.per_rank_samples,
                    "smallest_per_device_batch_size": recipe.smallest,
                    "largest_per_device_batch_size": recipe.largest,
                }
                for recipe in self.recipes
            ],
            "meant_global_batch_size": self.meant,
            "meant_steps_per_epoch": None if self.meant is None else ceil_div(self.samples, self.meant),
        }

    def _candidate(self, size: int) -> dict[str, Any]:
        return {
            "per_device_batch_size": size,
            "global_batch_size": self.world_size * size,
            "recipes": [[recipe.sampler, recipe.loader] for recipe in self.recipes if recipe.covers(size)],
        }

    def explain(self) -> str:
        """Return the text of ``hpcddp plan --explain-steps``, lines of about 100 columns."""
        rows = [
            ("seen", f"{count(self.steps, 'step')} per epoch, from {count(self.samples, 'sample')} on {self._ranks()}"),
            ("per device", self._sizes(1)),
            ("global batch", f"{self._sizes(self.world_size)} (world size x per device)"),
        ]
        lines = ["Batch that this run really has", *(f"  {label:17}{text}" for label, text in rows), "", "Why"]
        for sentence in self._reasons():
            lines += textwrap.wrap(sentence, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines) + "\n"

    def _ranks(self) -> str:
        return count(self.world_size, "rank")

    def _sizes(self, factor: int) -> str:
        sizes = self.candidates
        if sizes is not None and len(sizes) <= _MOST_WRITTEN:
            *first, last = (count(factor * size, "sample") for size in sizes)
            return " or ".join([*(text.partition(" ")[0] for text in first), last])
        steps = "" if factor == 1 else f", in steps of {factor}"
        if self.largest is None:
            return f"{factor * self.smallest:,} samples or more{steps}"
        return f"{factor * self.smallest:,} to {factor * self.largest:,} samples{steps}"

    def _reasons(self) -> Iterator[str]:
        for recipe in self.recipes:
            yield (
                f"{_SAMPLER[recipe.sampler]} gives each rank {_MARKS[recipe.sampler]}(N / W) = "
                f"{count(recipe.per_rank_samples, 'sample')}; {_LOADER[recipe.loader]} makes {_MARKS[recipe.loader]}"
                f"({recipe.per_rank_samples:,} / n) steps of n, which is {self.steps:,} for {_span(recipe)}."
            )
        if self.meant is not None:
            per_device = self.meant // self.world_size
            cut = f" (int({self.meant} / {self.world_size}) is {per_device})" if self.meant % self.world_size else ""
            yield (
                f"A global batch of {self.meant:,} is not what it has{cut}: with {self.meant:,} an epoch would be "
                f"ceil({self.samples:,} / {self.meant:,}) = {ceil_div(self.samples, self.meant):,} steps."
            )
        yield (
            "Steps are batches of the loader. Where a run accumulates and counts optimizer steps, multiply them by its "
            "micro-steps first; its global batch is as many times larger."
        )


_MARKS = {"keep": "ceil", "drop": "floor"}
_SAMPLER = {"keep": "DistributedSampler", "drop": "DistributedSampler(drop_last=True)"}
_LOADER = {"keep": "DataLoader", "drop": "DataLoader(drop_last=True)"}


def _span(recipe: Recipe) -> str:
    if recipe.largest is None:
        return f"every n from {recipe.smallest:,} on"
    if recipe.smallest == recipe.largest:
        return f"n = {recipe.smallest:,} alone"
    return f"n = {recipe.smallest:,} to {recipe.largest:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenBatch:
    """Global batches in uneven shares that explain the steps per epoch of a run.

    Args:
        steps: S, steps per epoch, as observed.
        samples: N, samples of the training data.
        world_size: W, ranks.
        kept: global batches B with ``ceil(N/B) = S``, the last one smaller; may be empty.
        dropped: global batches B with ``floor(N/B) = S``, the last one left out; may be empty.
        asked_for: the intended global batch; None = unknown.
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
        """The intended global batch, where the run has another."""
        # ``in`` is fast only for an int: for other types a range is searched.
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
    """Return the global batches of at least W samples that result in the steps, or None if there are none.

    Args:
        steps: S >= 2, for which there is no equal batch per device.
        samples: N.
        world_size: W.
        asked_for: the intended global batch; None = unknown.
    """
    kept = range(max(world_size, ceil_div(samples, steps)), (samples - 1) // (steps - 1) + 1)
    dropped = range(max(world_size, samples // (steps + 1) + 1), samples // steps + 1)
    if not (kept or dropped):
        return None
    return UnevenBatch(
        steps=steps, samples=samples, world_size=world_size, kept=kept, dropped=dropped, asked_for=asked_for
    )
