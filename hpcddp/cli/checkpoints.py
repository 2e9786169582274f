"""``hpcddp checkpoints``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, Run, RunRoot
from hpcddp.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcddp.run.checkpoints import CheckpointState


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(checkpoints)


def checkpoints(
    run: Run = None,
    *,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run.

    The list has the age and size of each checkpoint, and says whether the checkpoint is valid, or why not. The command
    reads every file and compares it with its checksum.

    Example: hpcddp checkpoints 20260314-1544

    Example: hpcddp checkpoints runs/my-job/20260314-154412-ab12 --json
    """
    from hpcddp.manage.overview import one_run
    from hpcddp.run.checkpoints import survey
    from hpcddp.run.find import chosen_run

    chosen = one_run(chosen_run(run, run_root))
    states = survey(chosen.checkpoints)
    if as_json:
        document = {"run": str(chosen.path), "checkpoints": [state.as_json() for state in states]}
        echo(json.dumps(document, indent=2))
        return
    for line in _lines(chosen.checkpoints, states, now=time.time()):
        echo(line)


def _lines(folder: Path, states: Sequence[CheckpointState], *, now: float) -> list[str]:
    from hpcddp.manage.format import duration_text, size_text
    from hpcddp.manage.table import Column, table_lines

    if not states:
        return [f"{folder} holds no checkpoint"]
    columns = [
        Column(title="step", cells=[str(state.step) for state in states], is_number=True),
        Column(title="size", cells=[size_text(state.size) for state in states], is_number=True),
        Column(title="age", cells=[duration_text(now - state.time) for state in states], is_number=True),
        Column(title="attempt", cells=[_attempt_text(state) for state in states], is_number=True),
        Column(title="", cells=[_verdict(state) for state in states]),
    ]
    lines = table_lines(columns)
    if all(state.damage for state in states):
        lines.append("None of them is valid: a resume refuses to start anew, and ends with exit code 65.")
    return lines


def _attempt_text(state: CheckpointState) -> str:
    return "?" if state.attempt is None else str(state.attempt)


def _verdict(state: CheckpointState) -> str:
    if state.damage is not None:
        return f"not valid: {state.damage}"
    verdict = "valid"
    if state.is_best:
        verdict += "; the best, checkpoints/best"
    if state.resumes:
        verdict += "; a resume goes on from here"
    return verdict
