"""Types of the fields of a job file, each with its validation and its JSON schema."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import ROUND_CEILING, Decimal
from importlib.resources import files
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from hpcddp.errors import nearest
from hpcddp.jobfile.datasets import DATASETS
from hpcddp.jobfile.units import DURATION_FORMS, TIME_FORMS, TimeLimit, UnitError, format_duration, parse_duration

REFUSED = "refused"
LISTED_NAMES = 8
# A table, because the list in torchvision itself would load torch.
_TABLE = files("hpcddp.jobfile").joinpath("torchvision_models.txt").read_text(encoding="utf-8")
TORCHVISION_MODELS = tuple(line for line in _TABLE.splitlines() if line and not line.startswith("#"))
"""The names of torchvision's classification models, sorted."""
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
PROFILE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
VARIABLE_PATTERN = r"[A-Za-z_][A-Za-z0-9_]*"
GPU_TYPE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
MEMORY_PATTERN = r"0|[1-9][0-9]{0,12}[KMGT]"
_UNITS = "KMGT"
# 64G, 64GB and 64GiB are the same for Slurm.
_SIZE = r"((?=[0-9.]*[1-9])[0-9]{1,9}(?:\.[0-9]{1,3})?)([KMGTkmgt])(?:[iI]?[bB])?"
GRES_PATTERN = r"[A-Za-z_][A-Za-z0-9_.-]*(?::[A-Za-z0-9][A-Za-z0-9_.-]*)?"


class Section(BaseModel):
    """A mapping of the job file: no unknown keys, no silent conversions, never changed after validation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        validate_default=False,
        defer_build=True,
    )


def refusal(why: str, instead: str) -> PydanticCustomError:
    """Return the error that the validator of a field raises.

    Args:
        why: why the value is wrong, as the middle of a sentence.
        instead: what to write instead, as the end of the sentence.
    """
    return PydanticCustomError(REFUSED, "{why}; {instead}", {"why": why, "instead": instead})


def matching(pattern: str, *, why: str, instead: str) -> AfterValidator:
    """Return a validator for texts that match ``pattern`` as a whole."""
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise refusal(why, instead)
        return text

    return AfterValidator(check)


def _without(characters: dict[str, str], place: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        for character, word in characters.items():
            if character in text:
                raise refusal(f"it holds a {word}, which {place} cannot carry", "remove it")
        return text

    return check


def _not_empty(text: str) -> str:
    if not text.strip():
        raise refusal("it is empty", "write a text, or leave the key out")
    return text


_NUL = {"\0": "NUL character"}
_LINE_BREAKS = {"\n": "line break", "\r": "carriage return", **_NUL}
Text = Annotated[str, AfterValidator(_without(_NUL, "the environment of a process"))]
"""Text without NUL, as a shell or an argument list requires."""
Line = Annotated[str, AfterValidator(_not_empty), AfterValidator(_without(_LINE_BREAKS, "one line of a script"))]
"""Text of one line, as an ``#SBATCH`` directive requires."""
INTERACTIVE_JOB_NAMES: Final = frozenset({"bash", "interactive"})
"""Lightning takes jobs of these names for interactive ones: it neither saves nor requeues them at a signal
(``lightning.fabric.plugins.environments.slurm``)."""
UNNAMED_JOB: Final = "command"
"""The name of a job whose command has none."""
Name = Annotated[
    str,
    matching(
        NAME_PATTERN,
        why="a name is 1 to 64 ASCII letters, digits, '.', '_' and '-', and begins with a letter or digit",
        instead="write for example resnet50-imagenet",
    ),
    Field(json_schema_extra={"pattern": f"^{NAME_PATTERN}$"}),
]
ProfileName = Annotated[
    str,
    matching(
        PROFILE_PATTERN,
        why="the name of a profile is ASCII letters, digits, '.', '_' and '-', and begins with a letter or digit",
        instead="write the name of a file in the directory of profiles, without .yaml",
    ),
]
VariableName = Annotated[
    str,
    matching(
        VARIABLE_PATTERN,
        why="the name of an environment variable is ASCII letters, digits and '_', and begins with no digit",
        instead="rename it, for example MY_VARIABLE",
    ),
    Field(json_schema_extra={"pattern": f"^{VARIABLE_PATTERN}$"}),
]


def _no_count(text: str) -> str:
    kind, _, count = text.rpartition(":")
    if count.isdecimal() and (kind := kind.removeprefix("gpu:")):
        raise refusal(
            "a GPU type has no count",
            f"write gpu_type {kind}, and the count in gpus_per_node, here {count}",
        )
    return text


GpuType = Annotated[
    str,
    AfterValidator(_no_count),
    matching(
        GPU_TYPE_PATTERN,
        why="a GPU type is ASCII letters, digits, '_', '.' and '-'",
        instead="write the type as sinfo -o %G shows it, for example a100",
    ),
]


def _function_reference(text: str) -> str:
    module, _, function = text.partition(":")
    words = [*module.split("."), *function.split(".")]
    if not all(word.isidentifier() and not keyword.iskeyword(word) for word in words):
        instead = _with_colon(text) or "write for example my_package.models:build"
        raise refusal("it is not of the form pkg.module:function", instead)
    return text


def _with_colon(text: str) -> str | None:
    """Return the question for a function whose colon is a dot, ``pkg.module.function``; None for another text."""
    module, dot, function = text.rpartition(".")
    words = [*module.split("."), function]
    if dot and all(word.isidentifier() for word in words):
        return f"did you mean {module}:{function}?"
    return None


FunctionReference = Annotated[str, AfterValidator(_function_reference)]


def is_reference(name: str) -> bool:
    """Return whether a name of a model or a data set is that of the user's function, ``pkg.module:function``."""
    return ":" in name


def _model_name(text: str) -> str:
    if is_reference(text):
        return _function_reference(text)
    if text not in TORCHVISION_MODELS:
        raise refusal("torchvision has no classification model of that name", _known(text, TORCHVISION_MODELS))
    return text


def _dataset_name(text: str) -> str:
    if is_reference(text):
        return _function_reference(text)
    if text not in DATASETS:
        raise refusal("no dataset has that name", _known(text, tuple(DATASETS)))
    return text


def _known(text: str, names: Sequence[str]) -> str:
    if (question := _with_colon(text)) is not None:
        return question
    near = nearest(text, names)
    own = "write pkg.module:function for your own"
    if near is not None:
        return f"did you mean {near}? Or {own}"
    return f"write one of {', '.join(names)}, or {own}" if len(names) <= LISTED_NAMES else own


def _names_or_function(names: Sequence[str]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"enum": list(names)}, {"type": "string", "pattern": "^[^:]+:[^:]+$"}]})


ModelName = Annotated[str, AfterValidator(_model_name), _names_or_function(TORCHVISION_MODELS)]
DatasetName = Annotated[str, AfterValidator(_dataset_name), _names_or_function(tuple(DATASETS))]


def _memory(value: object) -> object:
    if value in (0, "0") and not isinstance(value, bool):
        return "0"
    number = isinstance(value, int) and not isinstance(value, bool)
    if number or (isinstance(value, str) and re.fullmatch("[0-9]+", value, re.ASCII)):
        raise refusal(
            "Slurm would read a number without a unit as megabytes", f"write {value}G for gigabytes or {value}M"
        )
    if not isinstance(value, str) or (size := re.fullmatch(_SIZE, value, re.ASCII)) is None:
        return value
    amount = Decimal(size[1])
    unit = size[2].upper()
    # Slurm reads whole numbers only; 1 T is 1024 G (sbatch(1), --mem).
    while amount != amount.to_integral_value() and unit != _UNITS[0]:
        amount = amount * 1024
        unit = _UNITS[_UNITS.index(unit) - 1]
    return f"{amount.to_integral_value(ROUND_CEILING):f}{unit}"


def _exclusive(value: object) -> bool | str:
    if not isinstance(value, bool) and value not in EXCLUSIVE:
        why = "a string in YAML 1.2" if value in {"yes", "no", "on", "off"} else "not a way to share nodes"
        raise refusal(f"it is {why}", f"write true, false, {', '.join(EXCLUSIVE)}")
    return value if isinstance(value, bool) else str(value)


EXCLUSIVE = ("user", "mcs", "topo")
"""Whose jobs may share the nodes of a job (sbatch(1), --exclusive)."""
Exclusive = Annotated[
    bool | str,
    PlainValidator(_exclusive),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": list(EXCLUSIVE)}]}),
]


def _gres_name(name: str) -> str:
    if name.partition(":")[0] == "gpu":
        raise refusal("GPUs have fields of their own", "write gpus_per_node and gpu_type in place of it")
    return name


GresName = Annotated[
    str,
    matching(
        GRES_PATTERN,
        why="a generic resource is a name, or NAME:TYPE",
        instead="write the name as sinfo -o %G shows it, for example nvme",
    ),
    AfterValidator(_gres_name),
    Field(json_schema_extra={"pattern": f"^{GRES_PATTERN}$"}),
]


def _gres_count(value: object) -> str:
    text = str(value).upper() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if re.fullmatch("[1-9][0-9]{0,17}[KMGTP]?", text, re.ASCII) is None:
        raise refusal("it is not a count of a generic resource", "write for example 1, or 100G")
    return text


GresCount = Annotated[
    str,
    PlainValidator(_gres_count),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[1-9][0-9]*[KMGTPkmgtp]?$"}]}
    ),
]

Memory = Annotated[
    str,
    matching(MEMORY_PATTERN, why="a memory size is a number with K, M, G or T", instead="write for example 64G"),
    BeforeValidator(_memory),
    WithJsonSchema(
        {
            "unit": "K, M, G or T",
            "anyOf": [{"const": 0}, {"type": "string", "pattern": f"^(0|{_SIZE})$"}],
        }
    ),
]


def _time_limit(value: object) -> TimeLimit:
    if isinstance(value, TimeLimit):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise refusal("it is not a time that Slurm accepts", f"write {TIME_FORMS}")
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
            "unit": "minutes, if without a unit",
            "examples": ["12:00:00", "2-00:00:00", "90min", "1h30m", "unlimited"],
        }
    ),
]


def _duration(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise refusal("it is not a duration", f"write {DURATION_FORMS}")
    try:
        return parse_duration(str(value))
    except UnitError as error:
        raise refusal(str(error), f"write {DURATION_FORMS}") from None


DURATION_SCHEMA: dict[str, Any] = {
    "type": "string",
    "unit": "s, min, h or d",
    "pattern": r"^[0-9]{1,18}(\.[0-9]{1,6})? ?[A-Za-z]+( ?[0-9]{1,18}(\.[0-9]{1,6})? ?[A-Za-z]+){0,3}$",
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
    """An interval: exactly one of the three is given.

    Args:
        duration: in time.
        steps: in optimizer steps, at least 1.
        epochs: in epochs, at least 1.
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
        raise refusal("it must have either steps or epochs", _EVERY_FORMS)
    unit, count = next(iter(value.items()))
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise refusal(f"{unit} is not an integer of at least 1", _EVERY_FORMS)
    return Every(steps=count) if unit == "steps" else Every(epochs=count)


def format_every(every: Every) -> str | dict[str, int]:
    """Return the interval as it is written in a job file."""
    if every.duration is not None:
        return format_duration(every.duration)
    if every.steps is not None:
        return {"steps": every.steps}
    return {"epochs": every.epochs or 1}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The metric whose best evaluation has a checkpoint of its own.

    Args:
        metric: its name in ``metrics.jsonl``.
        mode: whether its largest or its smallest value is the best; None = as its name says.
    """

    metric: str
    mode: Literal["max", "min"] | None = None


_BEST_FORMS = "write the name of a metric (val_accuracy), or {metric: val_f1, mode: max}"
_METRIC = r"[A-Za-z0-9_][A-Za-z0-9_./@-]{0,99}"


def _best(value: object) -> Best:
    if isinstance(value, Best):
        return value
    given = {"metric": value} if isinstance(value, str) else value
    if not isinstance(given, dict) or "metric" not in given or not set(given) <= {"metric", "mode"}:
        raise refusal("it is neither a name nor a mapping of metric and mode", _BEST_FORMS)
    metric = given["metric"]
    mode = given.get("mode")
    if not isinstance(metric, str) or not re.fullmatch(_METRIC, metric, re.ASCII):
        raise refusal("that is not the name of a metric", _BEST_FORMS)
    if mode not in (None, "max", "min"):
        raise refusal("mode is neither max nor min", _BEST_FORMS)
    return Best(metric=metric, mode=mode)


def _format_best(best: Best) -> str | dict[str, str]:
    return best.metric if best.mode is None else {"metric": best.metric, "mode": best.mode}


_METRIC_SCHEMA = {"type": "string", "pattern": f"^{_METRIC}$"}
BestField = Annotated[
    Best,
    PlainValidator(_best),
    PlainSerializer(_format_best),
    WithJsonSchema(
        {
            "anyOf": [
                _METRIC_SCHEMA,
                {
                    "type": "object",
                    "properties": {"metric": _METRIC_SCHEMA, "mode": {"enum": ["max", "min"]}},
                    "required": ["metric"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


LARGEST_SWEEP = 100_000
"""The most elements of a sweep. Above Slurm's limit (MaxArraySize) a sweep becomes several arrays."""

Grid = Mapping[str, tuple[Any, ...]]
Listed = tuple[Mapping[str, Any], ...]

_RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})", re.ASCII)
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
UNEXPANDED_RANGE: Final = re.compile(rf"{_NUMBER}\.\.{_NUMBER}", re.ASCII)
"""A text that looks like a range, also of numbers that are no integers; ``expand_ranges`` leaves no other range."""


def expand_ranges(values: Iterable[Any], *, as_texts: bool = False) -> Iterator[Any]:
    """Yield values, with the numbers of each range: ``0..4`` is 0, 1, 2, 3, 4.

    A range that is empty, or longer than ``LARGEST_SWEEP``, is not expanded.

    Args:
        as_texts: whether the numbers of a range are texts, as the values of environment variables are.
    """
    for value in values:
        match = _RANGE.fullmatch(value) if isinstance(value, str) else None
        first, last = (int(match[1]), int(match[2])) if match else (0, -1)
        if first <= last < first + LARGEST_SWEEP:
            yield from map(str if as_texts else int, range(first, last + 1))
        else:
            yield value


def _sweep(value: object) -> Grid | Listed | None:
    """Return a sweep as a grid or a list of elements; ``hpcddp.jobfile.sweep`` checks keys and values."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {
            str(key): tuple(
                expand_ranges(
                    values if isinstance(values, list | tuple) else [values],
                    as_texts=str(key).startswith("environment.env."),
                )
            )
            for key, values in value.items()
        }
    if isinstance(value, list | tuple) and all(isinstance(element, Mapping) for element in value):
        return tuple({str(key): entry for key, entry in element.items()} for element in value)
    raise refusal(
        "a sweep is a mapping from key paths to lists of values, or a list of mappings",
        "write for example {train.seed: [0, 1, 2]}",
    )


SweepField = Annotated[
    Any,
    PlainValidator(_sweep),
    WithJsonSchema(
        {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    ),
]
"""A grid (key paths with lists of values), a list of elements, or null."""
