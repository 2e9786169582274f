"""Find the batch that another program's run uses from its steps per epoch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
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
_LOADERS: tuple[Remainder, Remainder] = ("keep", "drop")
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
    # (sampler, M, smallest batch). If W divides N, both kinds of sampler give the same shares.
    equal: list[tuple[Remainder | None, int, int]] = [("keep", ceil_div(samples, world_size), 1)]
    if samples > world_size and samples % world_size:
        equal.append(("drop", samples // world_size, 1))
    for table in (equal, [(None, samples, world_size)]):
        found = [_rounding(*row, loader, steps) for row in table for loader in _LOADERS]
        if roundings := tuple(rounding for rounding in found if rounding is not None):
            return ObservedBatch(
                steps=steps, samples=samples, world_size=world_size, roundings=roundings, intended_batch=intended_batch
            )
    share = ceil_div(samples, world_size)
    size, (here, above) = _nearest_size(share, steps)
    makes = f"{counted(size, 'sample')} per device {'makes' if size == 1 else 'make'} {here:,} and {size + 1:,} make"
    why = "1 sample per device, the fewest, makes" if steps > share else makes
    made = counted(here if steps > share else above, "step")
    raise PlanError(
        f"{counted(steps, 'step')} per epoch cannot come from {counted(samples, 'sample')} on "
        f"{counted(world_size, 'rank')}: each rank has {share:,}, and {why} {made}; check the three numbers, and "
        "where the run accumulates, multiply its optimizer steps by the micro-steps",
        steps=steps,
        samples=samples,
        world_size=world_size,
    )


def _rounding(sampler: Remainder | None, samples: int, least: int, loader: Remainder, steps: int) -> Rounding | None:
    """Return the sizes n >= ``least`` with ``ceil(M/n) = S`` (keep) or ``floor(M/n) = S`` (drop); None without any."""
    if loader == "keep":
        first, last = ceil_div(samples, steps), None if steps == 1 else (samples - 1) // (steps - 1)
    else:
        first, last = samples // (steps + 1) + 1, samples // steps
    rounding = Rounding(sampler=sampler, loader=loader, samples=samples, smallest=max(first, least), largest=last)
    return rounding if rounding.covers(rounding.smallest) else None


def _nearest_size(share: int, steps: int) -> tuple[int, tuple[int, int]]:
    """Return n = ``floor(M/S)``, at least 1, and the numbers of steps with n and with n + 1 samples per device."""
    size = max(1, share // steps)
    return size, (ceil_div(share, size), ceil_div(share, size + 1))


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
        spans = [(rounding.smallest, rounding.largest) for rounding in self.roundings]
        if any(last is None or last - first >= _MOST_CANDIDATES for first, last in spans):
            return None
        return tuple(sorted({size for first, last in spans for size in range(first, (last or first) + 1)}))

    @property
    def missed_batch(self) -> int | None:
        """The intended global batch if the run has another one: as given, or else a likely power of two."""
        if self.intended_batch is not None:
            size, rest = divmod(self.intended_batch, self._factor)
            return (
                None if rest == 0 and any(rounding.covers(size) for rounding in self.roundings) else self.intended_batch
            )
        if self.uneven or self.candidates is None or len(self.candidates) != 1:
            return None
        first = self.world_size * self.candidates[0]
        # int(B/W) is the same n for several B, of which a power of two is the most likely choice.
        power = 1 << (first + self.world_size - 1).bit_length() - 1
        return power if first < power else None

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``hpcddp plan --explain-steps --json``; a size of uneven shares is global."""
        equal = () if self.uneven else self.roundings
        candidates = [
            {
                "per_device_batch_size": None if self.uneven else size,
                "global_batch_size": self._factor * size,
                "recipes": [[rounding.sampler, rounding.loader] for rounding in equal if rounding.covers(size)],
            }
            for size in self.candidates or ()
        ]
        only = candidates[0] if len(candidates) == 1 else {}
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
                for rounding in equal
            ],
            "meant_global_batch_size": self.missed_batch,
            "meant_steps_per_epoch": None if self.missed_batch is None else ceil_div(self.samples, self.missed_batch),
        }

    def explain(self) -> str:
        """Return the text of ``hpcddp plan --explain-steps``, lines of about 100 columns."""
        seen = f"{counted(self.steps, 'step')} per epoch, from {counted(self.samples, 'sample')}"
        per_device = self._sizes(1), " (world size x per device)"
        local, product = ("uneven shares", "") if self.uneven else per_device
        lines = [
            "Actual batch of this run",
            f"  seen             {seen} on {counted(self.world_size, 'rank')}",
            f"  per device       {local}",
            f"  global batch     {self._sizes(self._factor)}{product}",
            "",
            "Why",
        ]
        for sentence in self._reasons():
            lines += textwrap.wrap(sentence, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines) + "\n"

    def _sizes(self, factor: int) -> str:
        if self.candidates is not None and len(self.candidates) <= _MOST_WRITTEN:
            *first, last = self.candidates
            return " or ".join([*(f"{factor * size:,}" for size in first), counted(factor * last, "sample")])
        smallest, largest = min(one.smallest for one in self.roundings), [one.largest for one in self.roundings]
        most = "samples or more" if None in largest else f"to {factor * max(filter(None, largest)):,} samples"
        return f"{factor * smallest:,} {most}{'' if factor == 1 else f', in steps of {factor}'}"

    def _reasons(self) -> Iterator[str]:
        if self.uneven:
            size, (here, above) = _nearest_size(ceil_div(self.samples, self.world_size), self.steps)
            yield (
                f"No equal batch per device makes them: with DistributedSampler and DataLoader n = {size:,} gives "
                f"{counted(here, 'step')}, and n = {size + 1:,} gives {above:,}."
            )
        yield from map(self._reason, self.roundings)
        if (missed := self.missed_batch) is not None:
            cut = f" (int({missed} / {self.world_size}) is {missed // self.world_size})"
            yield (
                f"A global batch of {missed:,} is not what it has{cut if missed % self._factor else ''}: with "
                f"{missed:,} an epoch would be ceil({self.samples:,} / {missed:,}) = "
                f"{ceil_div(self.samples, missed):,} steps."
            )
        if not self.uneven:
            yield (
                "Steps are batches of the loader. Where a run accumulates and counts optimizer steps, multiply them by "
                "its micro-steps first; its global batch is as many times larger."
            )

    def _reason(self, rounding: Rounding) -> str:
        rounded, first, last = _ROUNDED[rounding.loader], rounding.smallest, rounding.largest
        if rounding.sampler is None:
            few = self.world_size <= _MOST_SHARES
            shares = ", ".join(f"{share:,}" for share in divide(first, self.world_size)) if few else ""
            return (
                f"{rounded}({self.samples:,} / {first:,}) is {self.steps:,}: a global batch that is split without "
                f"rounding, as hpcddp does{f', in shares of {shares}' if few else ''}."
            )
        span = f"every n from {first:,} on" if last is None else f"n = {first:,} to {last:,}"
        return (
            f"DistributedSampler{_OPTION[rounding.sampler]} gives each rank {_ROUNDED[rounding.sampler]}(N / W) = "
            f"{counted(rounding.samples, 'sample')}; DataLoader{_OPTION[rounding.loader]} makes {rounded}"
            f"({rounding.samples:,} / n) steps of n, which is {self.steps:,} for "
            f"{f'n = {first:,} alone' if first == last else span}."
        )
