"""Explain why the elements of a sweep are in their states, those with the same reason together."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from hpcddp.manage.format import numbered_text
from hpcddp.manage.overview import SweepStatus
from hpcddp.manage.status import RunStatus
from hpcddp.manage.why import Answer, explain
from hpcddp.run.sweep import element_id
from hpcddp.slurm.states import State

# Hundreds of failed elements mostly share a few reasons.
_ANSWERS_SHOWN: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAnswer:
    """Why a sweep's elements are in their states.

    Args:
        groups: the indices of the elements that share an answer, with the answer of the first of them.
        called: what commands call the sweep.
    """

    status: SweepStatus
    groups: tuple[tuple[tuple[int, ...], Answer], ...]
    called: str

    def as_json(self) -> dict[str, Any]:
        """Return the document that ``--json`` prints."""
        groups = [{"elements": list(indices), **answer.as_json()} for indices, answer in self.groups]
        return {"sweep_id": self.status.sweep.sweep_id, "counts": self.status.as_json()["counts"], "groups": groups}

    def lines(self) -> Iterator[str]:
        """Yield what a person reads."""
        sweep = self.status.sweep
        yield f"{sweep.sweep_id} ({sweep.name}), a sweep of {len(sweep.elements)}: {self.status.sentence}"
        for indices, answer in self.groups[:_ANSWERS_SHOWN]:
            state = answer.status.state
            why = str(state)
            if not state.has_nodes and state is not State.FINISHED:
                why += f": {answer.why}"
            yield f"  {numbered_text('element', indices)} {why}"
            if answer.advice is not None:
                yield f"    {answer.advice}"
        if len(self.groups) > _ANSWERS_SHOWN:
            yield f"  and {len(self.groups) - _ANSWERS_SHOWN} more answers; --json holds all"
        if not self.groups:
            yield "it has no elements"
            return
        first = element_id(self.called, self.groups[0][0][0])
        yield f"next: {shlex.join(['hpcddp', 'why', first])}"
        others = {answer.status.state for _, answer in self.groups} - {State.FINISHED, State.UNKNOWN}
        if any(not state.is_alive for state in others):
            resume = shlex.join(["hpcddp", "submit", "--resume", self.called])
            yield f"to resume those that ended without finishing: {resume}"


def explain_sweep(status: SweepStatus, *, unanswered: bool, called: str | None = None) -> SweepAnswer:
    """Return why the elements of a sweep are in their states; those that have finished or run as they should come last.

    Args:
        unanswered: whether Slurm could not be queried.
        called: what commands call the sweep; None is its id.
    """
    called = called or status.sweep.sweep_id
    indices_by_reason: dict[tuple[State, str], list[int]] = {}
    for index, element in enumerate(status.elements):
        indices_by_reason.setdefault((element.state, _reason(element)), []).append(index)
    order = [State.FAILED, State.LOST, State.TIMED_OUT, State.PREEMPTED, State.STOPPED, State.HELD, *State]
    groups = sorted(indices_by_reason.items(), key=lambda group: (order.index(group[0][0]), group[1]))
    answers = []
    for _, indices in groups:
        first = indices[0]
        answer = explain(status.elements[first], unanswered=unanswered, called=element_id(called, first))
        answers.append((tuple(indices), answer))
    return SweepAnswer(status=status, groups=tuple(answers), called=called)


def _reason(element: RunStatus) -> str:
    """Return the reason of its result, or that for which Slurm lets its job wait; empty without one."""
    if element.files.result is not None and element.files.result.reason:
        return element.files.result.reason
    return "" if element.job is None else element.job.reason
