"""Run every comparison with the peers, and write the tables and figures of ``docs/measurements.md`` and ``README.md``.

    python -m benchmarks.all [--only NAME ...] [--tables]

Each comparison writes its raw numbers to ``benchmarks/results/NAME.json``. Ratios that became a fifth worse than those
of the last file are named at the end. ``--tables`` measures nothing: it writes the tables from the files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import command_line, data, report, sampler, save, start, step, sweep
from benchmarks.turns import report as measure

COMPARISONS: Final = {
    "step": step, "start": start, "sampler": sampler, "data": data, "save": save, "command_line": command_line,
    "sweep": sweep, "report": report,
}  # fmt: skip
ROUNDS: Final = {
    "step": 5,
    "start": 3,
    "sampler": 3,
    "data": 9,
    "save": 15,
    "command_line": 20,
    "sweep": 7,
    "report": 5,
}
RESULTS: Final = Path(__file__).with_name("results")
README: Final = Path(__file__).parents[1] / "README.md"
PAGE: Final = README.parent / "docs" / "measurements.md"
FIGURE: Final = README.parent / "docs" / "_static" / "benchmarks.svg"
BEGIN, END = "<!-- from benchmarks/results: {} -->", "<!-- end -->"
WORSE: Final = 1.2


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer of README's table and of the figure.

    Args:
        comparison: its name in ``COMPARISONS``.
        case: the case.
        name: the contender that hpcddp is divided by.
        what: what is compared, as a reader says it.
    """

    comparison: str
    case: str
    name: str
    what: str


PEERS: Final = (
    Peer("step", "step of mlp, 1 rank", "ddp", "step of a small model, 1 rank: DDP written by hand"),
    Peer("step", "step of mlp, 2 ranks", "ddp", "step of a small model, 2 ranks: DDP written by hand"),
    Peer("step", "step of mlp, 2 ranks", "accelerate", "step of a small model, 2 ranks: accelerate"),
    Peer("step", "step of mlp, 1 rank", "lightning", "step of a small model, 1 rank: Lightning"),
    Peer("step", "step of resnet18, 2 ranks", "ddp", "step of ResNet-18, 2 ranks: DDP written by hand"),
    Peer("start", "first step of 8 ranks", "ddp", "CPU time to the first step: DDP written by hand"),
    Peer("start", "first step of 8 ranks of a script", "torchrun", "8 ranks of a script to their first step: torchrun"),
    Peer("data", "image of 500 x 375 pixels to 224 x 224", "torchvision", "an image of a folder: torchvision"),
    Peer("save", "save of 202 MB, until the training continues", "torch.save", "a save: torch.save"),
    Peer("save", "save of 202 MB, until the training continues", "dcp.async_save", "a save: dcp.async_save"),
    Peer("command_line", "render", "torchx", "script of a job: torchx"),
    Peer("sweep", "submission of 1000 runs", "map_array", "submission of 1,000 runs: submitit's map_array"),
    Peer("sampler", "first index at the middle of 1e8 samples", "DistributedSampler",
         "first index at half of 1e8 samples: DistributedSampler"),
)  # fmt: skip


def number(ratio: float) -> str:
    """Return a ratio with two digits after the point, or two that count."""
    return f"{ratio:.2f}" if ratio >= 0.1 else np.format_float_positional(float(f"{ratio:.1g}"), trim="-")  # noqa: PLR2004  0.1


def table(document: Mapping[str, Any]) -> str:
    """Return a result as a table in Markdown."""
    lines = ["| case | contender | median | ratio (range) |", "|---|---|---|---|"]
    for case in document["cases"]:
        for way, median in case["median"].items():
            low, high = case["range"][way]
            ratio = "1" if way == case["base"] else f"{number(case['ratio'][way])} ({number(low)}-{number(high)})"
            lines.append(f"| {case['case']} | {way} | {median:,.4g} {case['unit']} | {ratio} |")
    hpcddp = document["versions"]["hpcddp"]
    valid = "" if document["valid"] else ", so that only the ratios count"
    lines += ["", f"{document['date'][:10]}, load {document['load_at_start']} at the start{valid}; hpcddp {hpcddp}."]
    return "\n".join(lines)


def read_results() -> dict[str, dict[str, Any]]:
    """Return the documents that were measured, by comparison."""
    paths = {name: RESULTS / f"{name}.json" for name in COMPARISONS}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def ratios(results: Mapping[str, Mapping[str, Any]], peer: Peer) -> list[float]:
    """Return hpcddp's values divided by those of a peer, round by round; none if they were not measured."""
    cases = results.get(peer.comparison, {"cases": []})["cases"]
    values: dict[str, list[float]] = next((case["values"] for case in cases if case["case"] == peer.case), {})
    if peer.name not in values:
        return []
    return [one / other for one, other in zip(values["hpcddp"], values[peer.name], strict=True)]


def short_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of ``README.md``."""
    lines = ["| what: beside what | ratio (range) |", "|---|---|"]
    for peer in PEERS:
        if found := ratios(results, peer):
            median = number(statistics.median(found))
            lines.append(f"| {peer.what} | {median} ({number(min(found))}-{number(max(found))}) |")
    return "\n".join(lines)


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the ratios to the peers, with their ranges, as an SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found = {peer.what: values for peer in PEERS if (values := ratios(results, peer))}
    medians = [statistics.median(values) for values in found.values()]
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hpcddp", "font.size": 9})
    figure = Figure(figsize=(9, 0.8 + 0.3 * len(found)), layout="constrained")
    axes = figure.subplots()
    colours = ["#3b6ea5" if median <= 1 else "#c8963e" for median in medians]
    axes.barh(list(found), [median - 1 for median in medians], left=1, color=colours, height=0.6)
    for row, values in enumerate(found.values()):
        axes.plot([min(values), max(values)], [row, row], color="#222", linewidth=1)
        axes.text(3.1, row, number(medians[row]), va="center")
    axes.axvline(1, color="#222", linewidth=0.8)
    axes.set(xscale="log", xlim=(0.01, 3), xlabel="time of hpcddp / time of the other (less is better)")
    axes.set_xticks([0.01, 0.1, 0.5, 1, 2], ["0.01", "0.1", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


def write_tables() -> None:
    """Write all tables and the figure."""
    results = read_results()
    for page, texts in {
        PAGE: {name: table(document) for name, document in results.items()},
        README: {"all": short_table(results)},
    }.items():
        text = page.read_text()
        for name, shown in texts.items():
            before, begin, rest = text.partition(BEGIN.format(name))
            if begin:
                text = f"{before}{begin}\n{shown}\n{END}{rest.partition(END)[2]}"
        page.write_text(text)
    draw(results, FIGURE)


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
    # A comparison is part of the load of the next one.
    load = os.getloadavg()[0]
    for name in () if options.tables else options.only:
        document = measure(lambda name=name: COMPARISONS[name].cases(ROUNDS[name]), load=load)  # type: ignore[misc]
        path = RESULTS / f"{name}.json"
        if path.exists():
            sentences += worse(name, json.loads(path.read_text()), document)
        path.write_text(json.dumps(document, indent=2) + "\n")
        print(f"{name}: written to {path}")
    write_tables()
    print("\n".join(sentences) or "no ratio became a fifth worse")


if __name__ == "__main__":
    main()
