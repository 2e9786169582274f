"""Write a job as YAML text that reads back equal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

from hpcddp.errors import UserError
from hpcddp.jobfile.document import Document, read_document, read_scalar
from hpcddp.jobfile.fields import Section
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.merge import JOB_FILE, MergedValues
from hpcddp.jobfile.problems import JobFileError
from hpcddp.jobfile.validation import check_values
from hpcddp.version import __version__

RESOLVED = "the resolved job"

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*", re.ASCII)
# Characters that JSON does not escape and YAML requires escaped (YAML 1.2.2, rule c-printable).
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_INDENT = "  "


def dump_job(spec: JobSpec, *, environment_values: bool) -> str:
    """Return the job as YAML: every field, in the order of the types, the same text for the same job.

    Args:
        environment_values: whether the values of ``environment.env`` are written; without them it is ``{}``.
    """
    data = spec.values()
    if not environment_values:
        data["environment"]["env"] = {}
    return write_values(data, longest_list=None)


_VERSION: Final = "hpcddp_version"
"""The key in the job of a script that says which version has the defaults of its other fields."""


class OtherDefaultsError(UserError):
    """A script leaves out fields for which this version of hpcddp may have other defaults."""

    kind = "other_defaults"


class DamagedJobError(UserError):
    """The job in a script cannot be read."""

    kind = "damaged_job"

    @classmethod
    def because(cls, reason: str) -> Self:
        """Return the error with what is wrong with the job."""
        return cls(f"the job in the script is damaged: {reason}; render the script again", reason=reason)


def dump_for_script(spec: JobSpec) -> str:
    """Return the job as YAML as a script carries it: the version, and the fields that differ from its defaults.

    The values of ``environment.env`` are left out. ``parse_from_script`` reads the text.
    """
    without_values = spec.environment.model_copy(update={"env": {}})
    spec = spec.model_copy(update={"environment": without_values})
    data = _differing_fields(spec, spec.model_dump(mode="json"))
    if spec.train is None and spec.states_learning_rate:
        # Its default is a value of the job only where it is written.
        data.setdefault("learning_rate", {})["base"] = spec.learning_rate.base
    return write_values({_VERSION: __version__, **data}, longest_list=None)


def _differing_fields(section: Section, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a section that differ from their defaults.

    Args:
        data: the section as JSON.
    """
    differing = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            below = _differing_fields(value, data[name])
            # The default is none, or a section with its own defaults.
            if below or field.default_factory is None:
                differing[name] = below
        elif value != field.get_default(call_default_factory=True):
            differing[name] = data[name]
    return differing


_LONGEST_LIST = 100


def write_values(values: Mapping[str, Any], *, longest_list: int | None = _LONGEST_LIST) -> str:
    """Return some values of a job file as YAML.

    Args:
        values: the values, with sections as mappings.
        longest_list: a list with more characters has a line for each item; None for none.
    """
    return "".join(f"{line}\n" for line in _mapping_lines(values, "", longest_list=longest_list))


# What a literal block cannot hold, or would change (YAML 1.2.2, 8.1). It takes 2 ms to compile, and few jobs need it.
_NO_BLOCK = r"\A\s|\n\Z|[^\n\x20-\x7e\xa1-\u2027\u202a-\ud7ff]"


def _item_lines(item: object, indent: str) -> Iterator[str]:
    if isinstance(item, str) and "\n" in item and not re.search(_NO_BLOCK, item):
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
    return _check_resolved(_read_resolved(text))


def parse_from_script(text: str) -> JobSpec:
    """Read the YAML that ``dump_for_script`` wrote.

    Raises:
        OtherDefaultsError: another version of hpcddp wrote it, which may have other fields or other defaults.
        DamagedJobError: the text was changed and is not a valid job.
    """
    try:
        document = _read_resolved(text)
        version = document.value.pop(_VERSION, None)
        if not isinstance(version, str):
            raise DamagedJobError.because(
                f"{_VERSION} is missing, so that the values of the fields that the script leaves out are unknown"
            )
        if version != __version__:
            raise OtherDefaultsError(
                f"the script was rendered by hpcddp {version}, and hpcddp {__version__}, which runs it, may have other "
                f"defaults; render it again, or run it with hpcddp {version}"
            )
        return _check_resolved(document)
    except JobFileError as error:
        problem = error.problems[0]
        place = "it"
        if problem.line is not None:
            place = f"line {problem.line}"
        if problem.key:
            place = problem.key
        # What follows is what to write in a job file.
        fault = problem.sentence.partition("; ")[0]
        raise DamagedJobError.because(f"{place} {fault}") from None


def _read_resolved(text: str) -> Document:
    """Read the YAML of a resolved job, unchecked."""
    return read_document(text, origin=JOB_FILE, file=RESOLVED)


def _check_resolved(document: Document) -> JobSpec:
    """Return the job in a document, without a check of the elements of a sweep."""
    merged = MergedValues()
    merged.merge(document.value, document.source)
    spec, problems = check_values(merged, document.source, [fault.path for fault in document.faults], elements=False)
    if document.faults or problems or spec is None:
        raise JobFileError.of([*document.problems, *problems])
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
