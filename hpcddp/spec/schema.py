"""The job file's JSON schema, for editors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from hpcddp.spec.job import JobSpec
from hpcddp.spec.timefields import Every, format_every
from hpcddp.spec.units import format_duration

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def default_text(value: Any) -> Any:  # noqa: ANN401
    """Return a default as the job file would spell it."""
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
    """Leaves out the titles that only repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ANN401, ARG002
        return False

    def encode_default(self, dft: Any) -> Any:  # noqa: ANN401
        return default_text(dft)


def job_schema() -> dict[str, Any]:
    """Return the schema of a job file (JSON Schema 2020-12)."""
    schema = JobSpec.model_json_schema(schema_generator=_Schema, mode="validation")
    schema.pop("title", None)
    return {"$schema": DIALECT, "title": "hpcddp job file", **schema}
