"""The one change that would help a run, or the next one like it, most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcddp.manage.attempt_times import AttemptTimes, Goodput, Phase
from hpcddp.manage.format import duration_text
from hpcddp.run.events import Event
from hpcddp.stop.reasons import Cause

_GOOD_GOODPUT: Final = 0.95
_LOAD_FASTER: Final = (
    "Load the data faster: the ranks waited for it. Ask for more CPUs for each task (resources.cpus_per_task), which "
    "train.num_workers follows, or read from a faster disk (environment.stage)."
)
_INSTRUCTIONS: Final[Mapping[Phase, str]] = {
    Phase.START_UP: "Shorten the start-up: put environment and data on a faster disk.",
    Phase.EVALUATION: "Evaluate less often (train.eval_every).",
    Phase.SAVE: "Save less often (checkpoint.every), or to a faster disk: the training waited for its saves.",
    Phase.STOP: "Shorten the end: what runs after the last step, the save at a stop, and hooks of the job.",
}
_OTHER_INSTRUCTION: Final = (
    "Profile the loop between its steps: this time is neither in steps nor in recorded evaluations and saves."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The one change that would help most.

    Args:
        sentence: what to do, and how much time it is about.
        phase: the phase that it shortens; None if nothing needs to be done.
    """

    sentence: str
    phase: Phase | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``--json``."""
        return {"sentence": self.sentence, "phase": None if self.phase is None else str(self.phase)}


def advice_for(
    run_id: str, goodput: Goodput, *, events: Sequence[Event], data_wait_share: float, is_local: bool
) -> Advice:
    """Return the one change that would help a run, or the next one like it, most.

    Args:
        data_wait_share: the part of the duration of its steps in which they waited for data, 0..1; 0 if it is unknown.
        is_local: whether it ran without a job of its own in Slurm, so that it has no queue and no time limit.
    """
    if goodput.value is None:
        return Advice(sentence=f"The goodput is unknown: {goodput.unknown}.")
    attempts_with_loss = _attempts_with_loss(goodput, events)
    phase = _largest_phase_to_shorten(goodput, has_loss=bool(attempts_with_loss))
    phase_share = 0.0
    if phase is not None:
        phase_share = goodput.share(phase)

    data_wait_of_all = data_wait_share * goodput.share(Phase.TRAINING)
    if data_wait_of_all > 1 - _GOOD_GOODPUT and data_wait_of_all > phase_share:
        sentence = f"{_LOAD_FASTER} That was {data_wait_of_all:.0%} of the time on the nodes."
        return Advice(sentence=sentence, phase=Phase.TRAINING)

    if phase is None or goodput.value >= _GOOD_GOODPUT:
        sentence = f"Nothing to change: {goodput.value:.1%} of the time on the nodes was training that counts."
        return Advice(sentence=sentence)

    if phase is Phase.LOST:
        instruction = _save_more_often(goodput, events, attempts_with_loss)
    elif phase is Phase.HANG:
        command = f"hpcddp logs {run_id} --first-error"
        instruction = f"Remove the cause of the hang; {command} shows which rank hung, and where."
    elif phase is Phase.START_UP and not is_local:
        instruction = _start_less_often(goodput, events)
    else:
        instruction = _INSTRUCTIONS.get(phase, _OTHER_INSTRUCTION)
    duration = duration_text(goodput.seconds[phase])
    sentence = f"{instruction} That was {duration}, {phase_share:.0%} of the time on the nodes"
    queue_s = goodput.seconds.get(Phase.QUEUE, 0.0)
    if not is_local and queue_s > _on_nodes_s(goodput):
        sentence += (
            f". The queue took longer, {duration_text(queue_s)}: fewer nodes or a shorter time limit may start earlier"
        )
    return Advice(sentence=f"{sentence}.", phase=phase)


def _largest_phase_to_shorten(goodput: Goodput, *, has_loss: bool) -> Phase | None:
    """Return the phase with the largest part of the time on the nodes, except the training; None without one."""
    phases = [phase for phase in goodput.seconds if phase not in {Phase.QUEUE, Phase.TRAINING}]
    if not has_loss and Phase.LOST in phases:
        # The user has cancelled the attempts that lost steps.
        phases.remove(Phase.LOST)
    return max(phases, key=goodput.share, default=None)


def _attempts_with_loss(goodput: Goodput, events: Sequence[Event]) -> list[AttemptTimes]:
    """Return the attempts that lost steps, without those that the user has cancelled."""
    cancelled = _attempts_ended_by(events, Cause.CANCELLED)
    attempts = [attempt for attempt in goodput.attempts if attempt.seconds.get(Phase.LOST)]
    return [attempt for attempt in attempts if attempt.number not in cancelled]


def _attempts_ended_by(events: Sequence[Event], *causes: Cause) -> set[int]:
    """Return the numbers of the attempts that ended for one of these causes."""
    return {event.attempt for event in events if event.cause in causes}


def _on_nodes_s(goodput: Goodput) -> float:
    return sum(attempt.on_nodes_s for attempt in goodput.attempts)


def _save_more_often(goodput: Goodput, events: Sequence[Event], attempts_with_loss: Sequence[AttemptTimes]) -> str:
    count = len(attempts_with_loss)
    lost = f"{count} of {len(goodput.attempts)} attempts lost steps that were not saved."
    interval_s = _best_interval_s(events, time_between_failures_s=_on_nodes_s(goodput) / count)
    if interval_s is None:
        return f"Save more often (checkpoint.every): {lost}"
    minutes = max(1, round(interval_s / 60))
    return f"Save every {minutes} minutes (checkpoint.every: {minutes}min): {lost}"


def _best_interval_s(events: Sequence[Event], *, time_between_failures_s: float) -> float | None:
    """Return the interval between saves that loses least, in seconds, or None if the cost of a save is not known.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974:
    sqrt(2 * cost of a save * mean time between failures).
    """
    costs = []
    for event in events:
        if event.kind == "save":
            cost = event.facts.get("blocked_s", event.facts.get("seconds"))
            if isinstance(cost, int | float):
                costs.append(float(cost))
    if not costs:
        return None
    mean_cost = sum(costs) / len(costs)
    return math.sqrt(2 * max(0.1, mean_cost) * time_between_failures_s)


def _start_less_often(goodput: Goodput, events: Sequence[Event]) -> str:
    """Return how a run on Slurm spends less time in its start-ups."""
    ended_by_slurm = _attempts_ended_by(events, Cause.PREEMPTION, Cause.TIME_LIMIT)
    if not ended_by_slurm:
        return f"{_INSTRUCTIONS[Phase.START_UP].removesuffix('.')}, or train longer in a job."
    return (
        f"Start less often: {len(ended_by_slurm)} of {len(goodput.attempts)} attempts ended at the time limit or by a "
        "preemption. A longer time_limit, or a QOS that is not preempted, makes fewer."
    )
