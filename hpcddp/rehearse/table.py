"""The result of a rehearsal as text: a table with a row for each fault, and what differs below it."""

from __future__ import annotations

from collections.abc import Iterator

from hpcddp.errors import counted
from hpcddp.manage.table import Column, table_lines
from hpcddp.rehearse.rehearsal import RehearsalReport, TrialReport

_NAMED = 3
_TITLES = ("fault", "verdict", "after step", "repeated", "restart")


def lines_of(report: RehearsalReport) -> Iterator[str]:
    """Yield the lines of the result."""
    steps = len(report.undisturbed.steps)
    made = f", {counted(steps, 'step')} reported" if steps else ""
    yield f"{report.name} on {counted(report.ranks, 'rank')}: {report.undisturbed.seconds:.0f} s without a fault{made}"
    yield ""
    rows = [_row(trial) for trial in report.trials]
    columns = [Column(title=title, cells=[row[index] for row in rows]) for index, title in enumerate(_TITLES)]
    yield from table_lines(columns)
    for trial in report.trials:
        details = list(_details(trial))
        if details:
            yield ""
            yield f"{trial.fault.name}: {details[0]}"
            yield from (f"    {line}" for line in details[1:])
    yield from _not_compared(report)
    yield ""
    bad_faults = [trial.fault.name for trial in report.trials if not trial.is_good]
    if bad_faults:
        yield f"The run does not come back as it was after: {', '.join(bad_faults)}."
    else:
        yield f"The run comes back after {counted(len(report.trials), 'fault')}."


def _not_compared(report: RehearsalReport) -> Iterator[str]:
    """Yield a sentence about the saved files that could not be loaded, in any trial."""
    comparisons = [trial.comparison for trial in report.trials if trial.comparison is not None]
    names = list(dict.fromkeys(name for comparison in comparisons for name in comparison.saved.unreadable))
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield ""
        yield f"not compared, because weights_only=True does not load them: {', '.join(names[:_NAMED])}{more}"


def _row(trial: TrialReport) -> tuple[str, ...]:
    disturbed = trial.disturbed
    repeated = disturbed.course.steps_repeated()
    return (
        trial.fault.name,
        trial.verdict,
        "-" if disturbed.step is None else str(disturbed.step),
        "-" if repeated is None else str(repeated),
        "-" if disturbed.restart_s is None else f"{disturbed.restart_s:.1f} s",
    )


def _details(trial: TrialReport) -> Iterator[str]:
    """Yield what is to be known about a trial besides its row: a problem, or what differs."""
    disturbed = trial.disturbed
    comparison = trial.comparison
    if disturbed.not_tried is not None:
        yield disturbed.not_tried
    if disturbed.problem is not None:
        yield disturbed.problem
        yield from disturbed.output
    if comparison is None:
        return
    yield from comparison.sentences()
    if trial.verdict == "came back" and not comparison.is_equal:
        yield "with another number of ranks sums have another order, so the difference does not count"
    if trial.verdict == "not compared":
        yield "the program reports no metric (hpcddp.log) and saves no file with tensors, so nothing was compared"
