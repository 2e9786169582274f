"""The checks of a sweep before it is submitted: those of a job, for each kind of element."""

from __future__ import annotations

import shlex
from dataclasses import replace

from hpcddp.errors import UserError
from hpcddp.jobfile.sweep import SweepTable, as_text, assignment, element_spec
from hpcddp.submit.checks.job import CHECKS, CHECKS_OF_ELEMENT, check_submittable
from hpcddp.submit.checks.obstacle import SubmissionError
from hpcddp.submit.request import SubmitRequest

# The fields that the batch plan and the data depend on, and one below them that changes neither.
_PLANNED = ("batch", "learning_rate", "train", "entrypoint", "command")
_UNPLANNED = frozenset({"train.seed"})


def check_sweep_submittable(request: SubmitRequest, table: SweepTable) -> tuple[str, ...]:
    """Check a sweep as ``check_submittable`` checks a job.

    Elements that differ only in values without influence on the checks are checked once.

    Args:
        request: the request.
        table: its elements.

    Returns:
        What may keep the elements from running, a sentence each.

    Raises:
        SubmissionError: the sweep is for this machine, or an element cannot run; its values are named.
    """
    if request.cluster == "local":
        first = table.element(0)
        words = [word for key, value in first.items() for word in ("--set", f"{key}={as_text(value)}")]
        raise SubmissionError(
            "a sweep is a job array of Slurm, and --cluster local runs one job on this machine; to try one element "
            f"here, write: --set sweep=null {shlex.join(words)}"
        )
    notes: dict[str, None] = {}
    checks = CHECKS
    for combination in table.combinations(_checked_keys(table)):
        try:
            job = replace(request.job, spec=element_spec(request.job.spec, combination.values))
            notes |= dict.fromkeys(check_submittable(replace(request, job=job), checks))
        except UserError as error:
            if not combination.values:
                raise
            more = f" and {len(combination.elements) - 1} more" if len(combination.elements) > 1 else ""
            raise SubmissionError(
                f"element {combination.elements[0]}{more} of the sweep, with {assignment(combination.values)}: "
                f"{error.message}"
            ) from error
        # All elements share one environment, and checking it may take seconds.
        checks = CHECKS_OF_ELEMENT
    return tuple(notes)


def _checked_keys(table: SweepTable) -> list[str]:
    """Return the keys of a sweep whose values have influence on the checks."""
    return [key for key in table.keys if key not in _UNPLANNED and key.partition(".")[0] in _PLANNED]
