"""Write a job as YAML text that reads back equal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpcddp.jobfile.document import DocumentError, dotted, read_document, read_scalar
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.merge import JOB_FILE, MergedValues, Source
from hpcddp.jobfile.problems import JobFileError, Problem
from hpcddp.jobfile.validation import check_values

RESOLVED = "the resolved job"

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*", re.ASCII)
# Characters that JSON does not escape and YAML requires escaped (YAML 1.2.2, rule c-printable).
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_INDENT = "  "


def dump_job(spec: JobSpec, *, environment_values: bool) -> str:
    """Return the job as YAML: every field, in the order of the types, the same text for the same job.

    The default of ``learning_rate.base`` is left out where it is no value of the job.

    Args:
        spec: the job.
        environment_values: whether the values of ``environment.env`` are written; without them it is ``{}``.
    """
    data = spec.model_dump(mode="json")
    if not environment_values:
        data["environment"]["env"] = {}
    if not spec.states_learning_rate:
        del data["learning_rate"]["base"]
    return "".join(f"{line}\n" for line in _mapping_lines(data, ""))


def write_values(values: Mapping[str, Any]) -> str:
    """Return some values of a job file as YAML, the longer texts of a list in lines of their own.

    Args:
        values: the values, with sections as mappings.
    """
    return "".join(f"{line}\n" for line in _mapping_lines(values, "", longest_list=_LONGEST_LIST))


_LONGEST_LIST = 100


# What a literal block cannot hold, or would change (YAML 1.2.2, 8.1).
_NO_BLOCK = re.compile(r"\A\s|\n\Z|[^\n\x20-\x7e\xa1-\u2027\u202a-\ud7ff]")


def _item_lines(item: object, indent: str) -> Iterator[str]:
    if isinstance(item, str) and "\n" in item and not _NO_BLOCK.search(item):
        yield f"{indent}- |-"
        for line in item.split("\n"):
            yield f"{indent}{_INDENT}{line}" if line else ""
    else:
        yield f"{indent}- {_flow(item)}"


def parse_resolved(text: str) -> JobSpec:
    """Read the YAML that ``dump_job`` wrote.

    The elements of a sweep are not checked: ``element_spec`` checks the one that runs.

    Raises:
        JobFileError: the text was changed and is not a valid job.
    """
    try:
        document = read_document(text)
    except DocumentError as error:
        problem = Problem(file=RESOLVED, line=error.line, key=dotted(error.path), sentence=error.sentence)
        raise JobFileError.of([problem]) from None
    source = Source(origin=JOB_FILE, file=RESOLVED, lines=document.lines, written=document.written)
    merged = MergedValues()
    merged.merge(document.value, source)
    faults = [Problem(file=RESOLVED, line=f.line, key=dotted(f.path), sentence=f.sentence) for f in document.faults]
    spec, problems = check_values(merged, source, [fault.path for fault in document.faults], elements=False)
    if faults or problems or spec is None:
        raise JobFileError.of([*faults, *problems])
    return spec


def _mapping_lines(data: Mapping[str, Any], indent: str, *, longest_list: int | None = None) -> Iterator[str]:
    """Yield the lines of a mapping; a list longer than ``longest_list`` characters has a line for each item."""
    for key, value in data.items():
        name = f"{indent}{_scalar(key)}:"
        if isinstance(value, Mapping) and value:
            yield name
            yield from _mapping_lines(value, indent + _INDENT, longest_list=longest_list)
        elif isinstance(value, list) and longest_list is not None and len(_flow(value)) > longest_list:
            yield name
            for item in value:
                yield from _item_lines(item, indent + _INDENT)
        else:
            yield f"{name} {_flow(value)}"


def _flow(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: object) -> str:
    if isinstance(value, int):
        return str(value).lower()
    if not isinstance(value, str):
        return json.dumps(value, allow_nan=False)
    if _PLAIN.fullmatch(value) and isinstance(read_scalar(value), str):
        return value
    # JSON strings are strings of YAML, but for the characters that only YAML requires escaped.
    quoted = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)
