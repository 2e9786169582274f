"""Make the table of faults from the reports of the tests on the real Slurm.

usage: HPCDDP_PROOF=proof.jsonl scripts/test --long tests/cluster -k stop; python -m benchmarks.proof proof.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Trial = dict[str, Any]


def table(trials: list[Trial]) -> str:
    """Return the table in Markdown: one line for each fault, in the order in which faults first appeared."""
    by_fault: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_fault[trial["fault"]].append(trial)
    head = "| fault | trials | steps lost | pause, s | outcome |\n|---|---|---|---|---|\n"
    return head + "".join(_line(fault, some) for fault, some in by_fault.items())


def _line(fault: str, trials: list[Trial]) -> str:
    accounts = [trial["account"] for trial in trials if trial["account"] is not None]
    pauses = [account["pause_s"] for account in accounts if account["pause_s"] is not None]
    cells = (
        fault,
        str(len(trials)),
        _most([account["steps_lost"] for account in accounts]),
        f"{statistics.median(pauses):.1f}" if pauses else "-",
        ", ".join(f"{_times(count)}{outcome}" for outcome, count in Counter(map(_outcome, trials)).items()),
    )
    return f"| {' | '.join(cells)} |\n"


def _most(numbers: list[int]) -> str:
    """Return the sum if it is 0, else the mean and the maximum."""
    if not numbers:
        return "-"
    return "0" if not any(numbers) else f"{statistics.mean(numbers):.1f}, at most {max(numbers)}"


def _times(count: int) -> str:
    return "" if count == 1 else f"{count} x "


def _outcome(trial: Trial) -> str:
    account = trial["account"]
    if account is None:
        return f"{trial['state']} {trial['exit']}"
    same = account["same_parameters"] and account["same_losses"] and account["samples_missing"] == 0
    restarts = f"{trial['restarts']} restart{'' if trial['restarts'] == 1 else 's'}"
    return f"finished, {restarts}, {'equal' if same else 'NOT THE SAME'}"


def main() -> None:
    """Print the table of the reports that the command line names."""
    trials = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    sys.stdout.write(table(trials))


if __name__ == "__main__":
    main()
