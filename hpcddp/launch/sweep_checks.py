"""What would make an element of a sweep fail although the job file is right, found before any is submitted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from hpcddp.errors import UserError
from hpcddp.launch.submission import Cluster
from hpcddp.launch.submittable import SubmissionError, check_again, check_submittable
from hpcddp.spec.element import element_spec
from hpcddp.spec.job import JobSpec
from hpcddp.spec.sweep import Combination, as_text, assignment, tabulate

# What the batch plan and the data depend on, and what is below it but matters to neither.
_PLANNED = ("batch", "learning_rate", "train", "entrypoint", "command")
_UNPLANNED = frozenset({"train.seed"})


def check_sweep_submittable(spec: JobSpec, cluster: Cluster, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Check a sweep as ``check_submittable`` checks a job.

    Elements that differ in nothing that matters here are checked once.

    Args:
        spec: a valid job with a sweep.
        cluster: where it goes.
        environment: the submitter's environment.

    Returns:
        What the user should know although the elements may run, a sentence each.

    Raises:
        SubmissionError: it is to run on this machine, or an element cannot run; its values are named.
    """
    if cluster == "local":
        first = tabulate(spec.sweep).element(0)
        words = [word for key, value in first.items() for word in ("--set", f"{key}={as_text(value)}")]
        raise SubmissionError(
            "a sweep is a job array of Slurm, and --cluster local runs one job on this machine; to try one element "
            f"here, write: --set sweep=null {shlex.join(words)}"
        )
    notes: dict[str, None] = {}
    check = check_submittable
    for combination in _kinds(spec):
        try:
            notes |= dict.fromkeys(check(element_spec(spec, combination.values), cluster, environment))
        except UserError as error:
            if not combination.values:
                raise
            more = f" and {len(combination.elements) - 1} more" if len(combination.elements) > 1 else ""
            raise SubmissionError(
                f"element {combination.elements[0]}{more} of the sweep, with {assignment(combination.values)}: "
                f"{error.message}"
            ) from error
        # All elements share an environment, and looking at it may take seconds.
        check = check_again
    return tuple(notes)


def _kinds(spec: JobSpec) -> Iterator[Combination]:
    """Yield the choices of values that differ in what is checked here."""
    table = tabulate(spec.sweep)
    keys = [key for key in table.keys if key not in _UNPLANNED and key.partition(".")[0] in _PLANNED]
    return table.combinations(keys)
