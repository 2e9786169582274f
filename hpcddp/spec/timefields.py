"""Fields that hold a time: time limits, durations, and how often something happens."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from hpcddp.spec.fields import refusal
from hpcddp.spec.units import DURATION_FORMS, TIME_FORMS, TimeLimit, UnitError, format_duration, parse_duration


def _time_limit(value: object) -> TimeLimit:
    if isinstance(value, TimeLimit):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise refusal("it is no time that Slurm reads", f"write {TIME_FORMS}")
    try:
        return TimeLimit.parse(str(value))
    except UnitError as error:
        raise refusal(str(error), f"write {TIME_FORMS}") from None


TimeLimitField = Annotated[
    TimeLimit,
    PlainValidator(_time_limit),
    PlainSerializer(str, return_type=str),
    WithJsonSchema(
        {
            "type": ["string", "integer"],
            "unit": "minutes unless said",
            "examples": ["12:00:00", "2-00:00:00", "90min", "unlimited"],
        }
    ),
]


def _duration(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise refusal("it is no duration", f"write {DURATION_FORMS}")
    try:
        return parse_duration(str(value))
    except UnitError as error:
        raise refusal(str(error), f"write {DURATION_FORMS}") from None


DURATION_SCHEMA: dict[str, Any] = {
    "type": "string",
    "unit": "s, min or h",
    "pattern": r"^[0-9]{1,10}(\.[0-9]{1,6})? ?(s|min|h)$",
    "examples": ["90s", "10min", "2h"],
}
Duration = Annotated[
    timedelta,
    PlainValidator(_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema(DURATION_SCHEMA),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """How often something happens: exactly one of the three is given.

    Args:
        duration: by the clock.
        steps: by optimizer steps, at least 1.
        epochs: by epochs, at least 1.
    """

    duration: timedelta | None = None
    steps: int | None = None
    epochs: int | None = None


_EVERY_FORMS = "write a duration (10min), {steps: 500} or {epochs: 1}"


def _every(value: object) -> Every:
    if isinstance(value, Every):
        return value
    if not isinstance(value, dict):
        try:
            return Every(duration=_duration(value))
        except PydanticCustomError as error:
            raise refusal(str((error.context or {})["why"]), _EVERY_FORMS) from None
    if len(value) != 1 or not set(value) <= {"steps", "epochs"}:
        raise refusal("it is not one of steps and epochs", _EVERY_FORMS)
    unit, count = next(iter(value.items()))
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise refusal(f"{unit} is not a whole number of at least 1", _EVERY_FORMS)
    return Every(steps=count) if unit == "steps" else Every(epochs=count)


def format_every(every: Every) -> str | dict[str, int]:
    """Return the value that a job file holds for this interval."""
    if every.duration is not None:
        return format_duration(every.duration)
    return {"steps": every.steps} if every.steps is not None else {"epochs": every.epochs or 1}


_COUNT = {"type": "integer", "minimum": 1}
EveryField = Annotated[
    Every,
    PlainValidator(_every),
    PlainSerializer(format_every),
    WithJsonSchema(
        {
            "anyOf": [
                DURATION_SCHEMA,
                *(
                    {"type": "object", "properties": {unit: _COUNT}, "required": [unit], "additionalProperties": False}
                    for unit in ("steps", "epochs")
                ),
            ]
        }
    ),
]
