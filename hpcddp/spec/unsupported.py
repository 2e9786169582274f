"""Fields of the job file that this version reads but does not act on: refused, never accepted and ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic_core import PydanticUndefined

from hpcddp.spec.fields import Section
from hpcddp.spec.job import JobSpec

# Every field that has to keep its default, with what helps until it does not.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "environment.container": "load what the job needs in environment.modules or environment.setup",
    }
)


def refuse_unsupported(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield every field that asks for what this version does not do, with the sentence about it.

    Args:
        spec: a job whose fields fit their types.
    """
    for key, instead in UNSUPPORTED.items():
        value, default = _value_and_default(spec, key)
        if value != default:
            shown = f"is {_plain(value)}" if isinstance(value, bool | int | float | str) else "is given"
            yield key, f"{shown}, and this version of hpcddp does not act on it yet; {instead}"


def _value_and_default(spec: JobSpec, key: str) -> tuple[Any, Any]:
    section: Section = spec
    *above, name = key.split(".")
    for part in above:
        below = getattr(section, part)
        if below is None:
            return None, None
        section = below
    default = type(section).model_fields[name].default
    return getattr(section, name), None if default is PydanticUndefined else default


def _plain(value: bool | float | str) -> str:  # noqa: FBT001
    return str(value).lower() if isinstance(value, bool) else str(value)
