"""Find the batch that another program's run uses from its steps per epoch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcddp.batch.refusals import PlanError, refuse_below_one
from hpcddp.batch.split import ceil_div, divide
from hpcddp.errors import counted

_WIDTH = 100
_MOST_CANDIDATES = 1000
_MOST_WRITTEN = 6
_MOST_SHARES = 8
Remainder = Literal["keep", "drop"]
_ROUNDED = {"keep": "ceil", "drop": "floor"}
_OPTION = {"keep": "", "drop": "(drop_last=True)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """One way of rounding, and the batch sizes that result in the observed steps.

    Args:
        sampler: the sampler's treatment of a remainder: ``keep`` repeats samples, ``drop`` is its ``drop_last=True``;
            None = no sampler: the global batch is split into uneven shares, and the sizes are global batches.
        loader: the loader's treatment of its last batch: ``keep`` makes it smaller, ``drop`` is its ``drop_last=True``.
        samples: M, the samples of each rank per epoch; without a sampler N.
        smallest: the smallest size that fits, >= 1.
        largest: the largest one; None = no limit.
    """

    sampler: Remainder | None
    loader: Remainder
    samples: int
    smallest: int
    largest: int | None

    def covers(self, size: int) -> bool:
        """Return whether batches of ``size`` samples result in the observed steps."""
        return size >= self.smallest and (self.largest is None or size <= self.largest)


def explain_steps(*, steps: int, samples: int, world_size: int, intended_batch: int | None = None) -> ObservedBatch:
    """Return the batches that result in the steps per epoch of a run.

    Args:
        steps: S >= 1, batches of each rank per epoch, as observed.
        samples: N >= 1, samples of the training data.
        world_size: W >= 1, ranks.
        intended_batch: the intended global batch; None = unknown.

    Returns:
        The batches per device, or, if there are none, global batches in uneven shares.

    Raises:
        PlanError: no batch results in that number of steps.
    """
    refuse_below_one(steps=steps, samples=samples, world_size=world_size, global_batch_size=intended_batch)
    roundings = _roundings_with_sampler(steps, samples, world_size)
    if not roundings:
        roundings = _roundings_without_sampler(steps, samples, world_size)
    if not roundings:
        raise PlanError(
            _explain_impossible(steps, samples, world_size), steps=steps, samples=samples, world_size=world_size
        )
    return ObservedBatch(
        steps=steps,
        samples=samples,
        world_size=world_size,
        roundings=tuple(roundings),
        intended_batch=intended_batch,
    )


def _roundings_with_sampler(steps: int, samples: int, world_size: int) -> list[Rounding]:
    """Return the ways of rounding of DistributedSampler and DataLoader that result in the observed steps."""
    roundings = _roundings("keep", ceil_div(samples, world_size), 1, steps)
    # If W divides N, both kinds of sampler give the same shares.
    if samples > world_size and samples % world_size:
        roundings += _roundings("drop", samples // world_size, 1, steps)
    return roundings


def _roundings_without_sampler(steps: int, samples: int, world_size: int) -> list[Rounding]:
    """Return the ways of rounding of a global batch, with a sample for each rank, that result in the observed steps."""
    return _roundings(None, samples, world_size, steps)


def _roundings(sampler: Remainder | None, samples: int, least: int, steps: int) -> list[Rounding]:
    """Return the sizes n >= ``least`` with ``ceil(M/n) = S`` (loader: keep) or ``floor(M/n) = S`` (loader: drop)."""
    smallest_with_ceil = ceil_div(samples, steps)
    largest_with_ceil = None if steps == 1 else (samples - 1) // (steps - 1)
    smallest_with_floor = samples // (steps + 1) + 1
    largest_with_floor = samples // steps
    ways: list[tuple[Remainder, int, int | None]] = [
        ("keep", smallest_with_ceil, largest_with_ceil),
        ("drop", smallest_with_floor, largest_with_floor),
    ]
    roundings = []
    for loader, smallest, largest in ways:
        rounding = Rounding(
            sampler=sampler, loader=loader, samples=samples, smallest=max(smallest, least), largest=largest
        )
        if rounding.covers(rounding.smallest):
            roundings.append(rounding)
    return roundings


def _explain_impossible(steps: int, samples: int, world_size: int) -> str:
    """Return why no batch results in the observed steps."""
    share = ceil_div(samples, world_size)
    size, steps_with_size, steps_above = _nearest_size(share, steps)
    if steps > share:
        nearest = f"1 sample per device, the fewest, makes {counted(steps_with_size, 'step')}"
    else:
        verb = "makes" if size == 1 else "make"
        nearest = (
            f"{counted(size, 'sample')} per device {verb} {steps_with_size:,} and {size + 1:,} make "
            f"{counted(steps_above, 'step')}"
        )
    return (
        f"{counted(steps, 'step')} per epoch cannot come from {counted(samples, 'sample')} on "
        f"{counted(world_size, 'rank')}: each rank has {share:,}, and {nearest}; check the three numbers, and "
        "where the run accumulates, multiply its optimizer steps by the micro-steps"
    )


def _nearest_size(share: int, steps: int) -> tuple[int, int, int]:
    """Return n = ``floor(M/S)``, at least 1, the number of steps with n samples per device, and that with n + 1."""
    size = max(1, share // steps)
    return size, ceil_div(share, size), ceil_div(share, size + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedBatch:
    """Batches that explain the steps per epoch of a run.

    Args:
        steps: S, batches of each rank per epoch, as observed.
        samples: N, samples of the training data.
        world_size: W, ranks.
        roundings: every way of rounding that results in S steps; never empty; all of them with a sampler, or none.
        intended_batch: the intended global batch; None = unknown.
    """

    steps: int
    samples: int
    world_size: int
    roundings: tuple[Rounding, ...]
    intended_batch: int | None = None

    @property
    def uneven(self) -> bool:
        """Whether no equal batch per device fits, so that the sizes are global batches in uneven shares."""
        return self.roundings[0].sampler is None

    @property
    def _factor(self) -> int:
        """The global batch divided by the size."""
        return 1 if self.uneven else self.world_size

    @property
    def candidates(self) -> tuple[int, ...] | None:
        """All sizes that fit, in order: per device, or global if ``uneven``; None when there are too many to list."""
        sizes: set[int] = set()
        for rounding in self.roundings:
            if rounding.largest is None or rounding.largest - rounding.smallest >= _MOST_CANDIDATES:
                return None
            sizes.update(range(rounding.smallest, rounding.largest + 1))
        return tuple(sorted(sizes))

    @property
    def missed_batch(self) -> int | None:
        """The intended global batch if the run has another one: as given, or else a likely power of two."""
        if self.intended_batch is None:
            return self._likely_batch()
        size, remainder = divmod(self.intended_batch, self._factor)
        if remainder == 0 and any(rounding.covers(size) for rounding in self.roundings):
            return None
        return self.intended_batch

    def _likely_batch(self) -> int | None:
        """Return the power of two from which ``int(B / W)`` has made the only size; None if the run has it, or none."""
        if self.uneven or self.candidates is None or len(self.candidates) != 1:
            return None
        # int(B/W) is the same n for each B from W * n to W * n + W - 1.
        smallest = self.world_size * self.candidates[0]
        largest = smallest + self.world_size - 1
        power = 1 << (largest.bit_length() - 1)
        return power if smallest < power else None

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``hpcddp plan --explain-steps --json``; a size of uneven shares is global."""
        candidates = [self._candidate_as_json(size) for size in self.candidates or ()]
        only: Mapping[str, Any] = candidates[0] if len(candidates) == 1 else {}
        missed = self.missed_batch
        return {
            "steps_per_epoch": self.steps,
            "samples": self.samples,
            "world_size": self.world_size,
            "per_device_batch_size": only.get("per_device_batch_size"),
            "global_batch_size": only.get("global_batch_size"),
            "candidates": candidates or None,
            "recipes": [
                {
                    "sampler": rounding.sampler,
                    "loader": rounding.loader,
                    "per_rank_samples": rounding.samples,
                    "smallest_per_device_batch_size": rounding.smallest,
                    "largest_per_device_batch_size": rounding.largest,
                }
                for rounding in self._equal_roundings
            ],
            "meant_global_batch_size": missed,
            "meant_steps_per_epoch": None if missed is None else ceil_div(self.samples, missed),
        }

    @property
    def _equal_roundings(self) -> tuple[Rounding, ...]:
        """The ways of rounding with equal batches per device."""
        return () if self.uneven else self.roundings

    def _candidate_as_json(self, size: int) -> dict[str, Any]:
        recipes = [[rounding.sampler, rounding.loader] for rounding in self._equal_roundings if rounding.covers(size)]
        return {
            "per_device_batch_size": None if self.uneven else size,
            "global_batch_size": self._factor * size,
            "recipes": recipes,
        }

    def explain(self) -> str:
        """Return the text of ``hpcddp plan --explain-steps``, lines of about 100 columns."""
        per_device = "uneven shares"
        global_batch = self._sizes_text(self._factor)
        if not self.uneven:
            per_device = self._sizes_text(1)
            global_batch += " (world size x per device)"
        steps = f"{counted(self.steps, 'step')} per epoch, from {counted(self.samples, 'sample')}"
        lines = [
            "Actual batch of this run",
            f"  seen             {steps} on {counted(self.world_size, 'rank')}",
            f"  per device       {per_device}",
            f"  global batch     {global_batch}",
            "",
            "Why",
        ]
        for sentence in self._reasons():
            lines += textwrap.wrap(sentence, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines) + "\n"

    def _sizes_text(self, factor: int) -> str:
        """Return the sizes that fit, each multiplied by ``factor``: a short list, or a range."""
        if self.candidates is not None and len(self.candidates) <= _MOST_WRITTEN:
            sizes = [f"{factor * size:,}" for size in self.candidates[:-1]]
            sizes.append(counted(factor * self.candidates[-1], "sample"))
            return " or ".join(sizes)
        smallest = factor * min(rounding.smallest for rounding in self.roundings)
        limits = [rounding.largest for rounding in self.roundings if rounding.largest is not None]
        text = f"{smallest:,} samples or more"
        if len(limits) == len(self.roundings):
            text = f"{smallest:,} to {factor * max(limits):,} samples"
        if factor > 1:
            text += f", in steps of {factor}"
        return text

    def _reasons(self) -> Iterator[str]:
        if self.uneven:
            share = ceil_div(self.samples, self.world_size)
            size, steps_with_size, steps_above = _nearest_size(share, self.steps)
            yield (
                f"No equal batch per device makes them: with DistributedSampler and DataLoader n = {size:,} gives "
                f"{counted(steps_with_size, 'step')}, and n = {size + 1:,} gives {steps_above:,}."
            )
        for rounding in self.roundings:
            yield self._rounding_text(rounding)
        missed = self.missed_batch
        if missed is not None:
            yield self._missed_text(missed)
        if not self.uneven:
            yield (
                "Steps are batches of the loader. Where a run accumulates and counts optimizer steps, multiply them by "
                "its micro-steps first; its global batch is as many times larger."
            )

    def _missed_text(self, missed: int) -> str:
        cut = ""
        if missed % self._factor:
            cut = f" (int({missed} / {self.world_size}) is {missed // self.world_size})"
        return (
            f"A global batch of {missed:,} is not what it has{cut}: with "
            f"{missed:,} an epoch would be ceil({self.samples:,} / {missed:,}) = "
            f"{ceil_div(self.samples, missed):,} steps."
        )

    def _rounding_text(self, rounding: Rounding) -> str:
        if rounding.sampler is None:
            return self._uneven_text(rounding)
        smallest = rounding.smallest
        largest = rounding.largest
        if largest is None:
            sizes = f"every n from {smallest:,} on"
        elif smallest == largest:
            sizes = f"n = {smallest:,} alone"
        else:
            sizes = f"n = {smallest:,} to {largest:,}"
        return (
            f"DistributedSampler{_OPTION[rounding.sampler]} gives each rank {_ROUNDED[rounding.sampler]}(N / W) = "
            f"{counted(rounding.samples, 'sample')}; DataLoader{_OPTION[rounding.loader]} makes "
            f"{_ROUNDED[rounding.loader]}({rounding.samples:,} / n) steps of n, which is {self.steps:,} for {sizes}."
        )

    def _uneven_text(self, rounding: Rounding) -> str:
        size = rounding.smallest
        text = (
            f"{_ROUNDED[rounding.loader]}({self.samples:,} / {size:,}) is {self.steps:,}: a global batch that is split "
            "without rounding, as hpcddp does"
        )
        if self.world_size <= _MOST_SHARES:
            shares = ", ".join(f"{share:,}" for share in divide(size, self.world_size))
            text += f", in shares of {shares}"
        return f"{text}."
