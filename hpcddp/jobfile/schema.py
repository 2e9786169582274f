"""The job file's JSON schema, for editors, and its reference page."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined

from hpcddp.jobfile.document import Path, dotted
from hpcddp.jobfile.field_facts import OnResume, facts_of
from hpcddp.jobfile.fields import Every, Section, format_every
from hpcddp.jobfile.job import JobSpec, field_paths, key_type_of
from hpcddp.jobfile.units import format_duration

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def default_text(value: object) -> object:
    """Return a default as it is written in a job file."""
    match value:
        case timedelta():
            return format_duration(value)
        case Every():
            return format_every(value)
        case tuple():
            return list(value)
        case _:
            return value


class _Schema(GenerateJsonSchema):
    """Schema without the titles that only repeat the keys."""

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002  pydantic calls it with this
        return False

    def encode_default(self, dft: Any) -> Any:  # noqa: ANN401  as pydantic declares it
        return default_text(dft)


def job_schema() -> dict[str, Any]:
    """Return the schema of a job file (JSON Schema 2020-12)."""
    schema = JobSpec.model_json_schema(schema_generator=_Schema, mode="validation")
    schema.pop("title", None)
    return {"$schema": DIALECT, "title": "hpcddp job file", **schema}


_HEAD = """\
# The job file

Written by `scripts/generate-docs` from the types: change a description there, not here.

Every job file needs `name`, and one of `train`, `command` and `entrypoint`. `train` needs `train.model`,
`train.dataset` and `batch.global_batch_size`. The tables mark what a section needs as required. All other fields have a
default.

A job file is YAML 1.2. Unknown keys, duplicate keys, tags, anchors and aliases are errors. `--set key.path=value`
overrides any field. A field that neither it nor the job file gives takes the profile's value, then the default:
`environment.env`, `resources.sbatch` and `resources.srun` merge key by key, lists are replaced, `null` takes a
profile's value away.

A profile is a YAML file, `~/.config/hpcddp/profiles/NAME.yaml` (below `$XDG_CONFIG_HOME`, where that is set), with
`run_root` and the sections `resources`, `environment`, `checkpoint`, `requeue` and `launch`. The one named `default` is
used where the job file names none.

Times (`resources.time_limit`) follow Slurm: a bare number is minutes, `10:00` is minutes and seconds; `1:30:00`,
`2-00:00:00`, `90min`, `2h` and `unlimited` work too. Durations are numbers with their
units: `90s`, `10min`, `2h`, `1d` or `1h30m`. A time may have these forms too.
"""
_ON_RESUME = """\
## What a resumption may change

A run goes on with other values of these fields, or of fields of these sections: {always}.

It goes on with another value of these only if the command line of the resumption names the field: {by_name}. The
epochs may only become more.

Another value of any other field would make another training, and is refused with both values.
"""
_TABLE = "| key | type | unit | default | meaning |\n|---|---|---|---|---|\n"
_LONGEST_ENUM = 10
# Bounds from here on are limits of the number format, which the page does not print.
_ANY = 2**31 - 1


def job_reference() -> str:
    """Return the page as Markdown: a table of fields for every section."""
    return "\n".join([_HEAD, *_sections(JobSpec, ()), _on_resume()])


def _on_resume() -> str:
    """Return the section about the fields that a resumption may change."""
    keys: dict[OnResume | None, list[str]] = {}
    for path, field in field_paths():
        keys.setdefault(facts_of(field).on_resume, []).append(f"`{dotted(path)}`")
    return _ON_RESUME.format(always=", ".join(keys["always"]), by_name=", ".join(keys["by name"]))


def _sections(section: type[Section], path: Path) -> Iterator[str]:
    rows: list[str] = []
    below: list[tuple[type[Section], Path]] = []
    schema = job_schema()
    schemas = (schema if section is JobSpec else schema["$defs"][section.__name__])["properties"]
    for name, field in section.model_fields.items():
        inner = key_type_of(field).section
        if inner is not None:
            below.append((inner, (*path, name)))
        else:
            rows.append(_row(name, field, schemas[name]))
    title = f"## `{dotted(path)}`" if path else "## At the top level"
    yield f"{title}\n\n{inspect.getdoc(section)}\n\n{_TABLE}" + "\n".join(rows) + "\n"
    for inner, inner_path in below:
        yield from _sections(inner, inner_path)


def _row(name: str, field: FieldInfo, schema: dict[str, Any]) -> str:
    cells = (f"`{name}`", _type(schema), _unit(schema), _default(field), str(field.description))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return f"`{json.dumps(default_text(value))}`".replace('"', "")


def _unit(schema: dict[str, Any]) -> str:
    """Return the unit of a field; for a nullable field it is in one of the alternatives."""
    choices = (schema, *schema.get("anyOf", ()))
    return next((choice["unit"] for choice in choices if "unit" in choice), "")


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(choice) for choice in schema["anyOf"]))
    if "enum" in schema:
        names = schema["enum"]
        if len(names) <= _LONGEST_ENUM:
            return ", ".join(f"`{name}`" for name in names)
        return "a torchvision name"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return " or ".join(_KINDS[kind](schema) for kind in kinds)


def _list_type(schema: dict[str, Any]) -> str:
    return f"list of {_type(schema['items'] if 'items' in schema else schema['prefixItems'][0])}"


def _mapping_type(schema: dict[str, Any]) -> str:
    properties = schema.get("properties", {})
    values = (f"{key}: {'N' if value.get('type') == 'integer' else '...'}" for key, value in properties.items())
    return f"`{{{', '.join(values)}}}`" if properties else "mapping"


_KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "array": _list_type,
    "boolean": lambda _: "true or false",
    "integer": lambda schema: f"integer{_bounds(schema)}",
    "null": lambda _: "null",
    "number": lambda schema: f"number{_bounds(schema)}",
    "object": _mapping_type,
    "string": lambda _: "string",
}
_SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _bounds(schema: dict[str, Any]) -> str:
    bounds = [f"{sign} {schema[key]:g}" for key, sign in _SIGNS.items() if abs(schema.get(key, _ANY)) < _ANY]
    return f" {', '.join(bounds)}" if bounds else ""
