"""Compare contenders in turn: what the benchmarks of ``benchmarks.all`` share."""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import resource
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from hpcddp.version import __version__

# With more load at the start a measurement is invalid.
QUIET: Final = 0.5
_PACKAGES: Final = ("torch", "torchvision", "typer", "submitit", "accelerate", "lightning", "torchx", "pillow")


@dataclass(frozen=True, slots=True)
class Case:
    """The values of several contenders, one per round.

    Args:
        name: what is compared.
        unit: of the values.
        base: the contender that the others are divided by.
        values: by contender; round i of each was measured in turn with round i of the others.
    """

    name: str
    unit: str
    base: str
    values: Mapping[str, Sequence[float]]

    def as_document(self) -> dict[str, Any]:
        """Return medians, and medians and ranges of the ratios to the base, round by round."""
        ratios = {
            way: sorted(one / other for one, other in zip(values, self.values[self.base], strict=True))
            for way, values in self.values.items()
        }
        return {
            "case": self.name,
            "unit": self.unit,
            "base": self.base,
            "median": {way: _rounded(statistics.median(values)) for way, values in self.values.items()},
            "ratio": {way: _rounded(statistics.median(found)) for way, found in ratios.items()},
            "range": {way: [_rounded(found[0]), _rounded(found[-1])] for way, found in ratios.items()},
            "values": {way: [_rounded(value) for value in values] for way, values in self.values.items()},
        }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def in_turn(
    name: str, ways: Mapping[str, Callable[[], float]], *, base: str, unit: str, rounds: int, warm_up: bool = True
) -> Case:
    """Measure every contender once per round.

    Args:
        name: what is compared.
        ways: the contenders, each with a function that measures it once.
        base: the contender that the others are divided by.
        unit: of the values.
        rounds: how often each is measured.
        warm_up: measure each once before, which is not counted.
    """
    if warm_up:
        for measure in ways.values():
            measure()
    values: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, measure in ways.items():
            values[way].append(measure())
    return Case(name=name, unit=unit, base=base, values=values)


def cpu_of_children(call: Callable[[], object]) -> float:
    """Return the CPU seconds of the processes that a call starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def report(cases: Callable[[], Iterable[Case]], *, load: float | None = None) -> dict[str, Any]:
    """Measure, and return the document of a result file.

    Args:
        cases: the comparisons.
        load: the load average before the first of several documents; None takes that of now.
    """
    # As in an installed package. Otherwise each process compiles it anew where bytecode is not written.
    compileall.compile_dir(Path(__file__).parents[1] / "hpcddp", quiet=1)
    load = os.getloadavg()[0] if load is None else load
    return {
        "load_at_start": round(load, 2),
        "valid": load <= QUIET,
        "cases": [case.as_document() for case in cases()],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {"hpcddp": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main(program: str, description: str, cases: Callable[[int], Iterable[Case]], *, rounds: int) -> None:
    """Run one benchmark as a program.

    Args:
        program: its name, as after ``python -m``.
        description: the first line is for the help text.
        cases: returns the cases for a number of rounds.
        rounds: the usual number of rounds.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--output", type=Path, help="a file for the result")
    options = parser.parse_args()
    text = json.dumps(report(lambda: cases(options.rounds)), indent=2) + "\n"
    sys.stdout.write(text)
    if options.output is not None:
        options.output.write_text(text)
