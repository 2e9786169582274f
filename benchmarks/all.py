"""Run every comparison with the peers that needs no Slurm, and write the tables of ``docs/measurements.md``.

    python -m benchmarks.all [--only NAME ...] [--tables]

Each comparison writes its raw numbers to ``benchmarks/results/NAME.json``. Ratios that became a fifth worse than those
of the last file are named at the end. ``--tables`` measures nothing: it writes the tables from the files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks import command_line, data, save, start, step
from benchmarks.turns import report

COMPARISONS: Final = {"step": step, "start": start, "data": data, "save": save, "command_line": command_line}
ROUNDS: Final = {"step": 3, "start": 3, "data": 9, "save": 15, "command_line": 20}
RESULTS: Final = Path(__file__).with_name("results")
PAGE: Final = Path(__file__).parents[1] / "docs" / "measurements.md"
BEGIN, END = "<!-- from benchmarks/results: {} -->", "<!-- end -->"
WORSE: Final = 1.2


def table(document: Mapping[str, Any]) -> str:
    """Return a result as a table in Markdown."""
    lines = ["| case | contender | median | ratio (range) |", "|---|---|---|---|"]
    for case in document["cases"]:
        for way, median in case["median"].items():
            low, high = case["range"][way]
            ratio = "1" if way == case["base"] else f"{case['ratio'][way]:.2f} ({low:.2f}-{high:.2f})"
            lines.append(f"| {case['case']} | {way} | {median:,.4g} {case['unit']} | {ratio} |")
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    valid = "" if document["valid"] else ", so that only the ratios count"
    lines += ["", f"{document['date'][:10]}, load {document['load_at_start']} at the start{valid}; {versions}."]
    return "\n".join(lines)


def write_tables() -> None:
    """Write all tables into the page."""
    text = PAGE.read_text()
    for name in COMPARISONS:
        path = RESULTS / f"{name}.json"
        if path.exists():
            before, _, rest = text.partition(BEGIN.format(name))
            _, _, after = rest.partition(END)
            middle = f"{BEGIN.format(name)}\n{table(json.loads(path.read_text()))}\n{END}"
            text = f"{before}{middle}{after}"
    PAGE.write_text(text)


def worse(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each ratio of hpcddp that became worse."""
    old = {case["case"]: case["ratio"] for case in before["cases"]}
    for case in now["cases"]:
        for way, ratio in case["ratio"].items():
            was = old.get(case["case"], {}).get(way)
            if was is not None and way == "hpcddp" and ratio > WORSE * was:
                yield f"{name}: {case['case']}: {way} is {ratio:.2f} of {case['base']}, and was {was:.2f}"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options = parser.parse_args()
    sentences: list[str] = []
    for name in () if options.tables else options.only:
        document = report(lambda name=name: COMPARISONS[name].cases(ROUNDS[name]))  # type: ignore[misc]
        path = RESULTS / f"{name}.json"
        if path.exists():
            sentences += worse(name, json.loads(path.read_text()), document)
        path.write_text(json.dumps(document, indent=2) + "\n")
        print(f"{name}: written to {path}")
    write_tables()
    print("\n".join(sentences) or "no ratio became a fifth worse")


if __name__ == "__main__":
    main()
