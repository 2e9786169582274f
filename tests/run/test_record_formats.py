"""The files of format 1, and the job file: what a version must find in them, and must go on writing."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import get_type_hints

import pytest

import hpcddp.run
from hpcddp.jobfile.document import dotted
from hpcddp.jobfile.job import field_paths
from hpcddp.run.record import FORMAT, Record
from hpcddp.supervise.stage import Staged
from tests.messages import GoldenMessages

for module in pkgutil.iter_modules(hpcddp.run.__path__):
    importlib.import_module(f"hpcddp.run.{module.name}")
# A dataclass with slots is a second class of the same name.
RECORDS = {kind.__name__: kind for kind in (*Record.__subclasses__(), Staged) if kind.__module__.startswith("hpcddp.")}


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_keys_of_a_record_stay_those_of_format_1(name: str, golden: GoldenMessages) -> None:
    """A key may be added with a default; a key that goes, or changes its type, needs a new format.

    Runs of the previous minor release must resume (CONTRIBUTING.md, "Release").
    """
    assert FORMAT == 1
    kind = RECORDS[name]
    hints = get_type_hints(kind)
    keys = []
    for field in dataclasses.fields(kind):
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        need = "optional" if has_default else "required"
        keys.append(f"{field.metadata.get('key', field.name)}: {need}, {hints[field.name]}")
    golden.message("\n".join(keys))


def test_the_fields_of_the_job_file_stay(golden: GoldenMessages) -> None:
    """A field may be added with a default; one that goes, or gets another name, is read for one minor release more.

    A run of the previous minor release has its job file, with all fields.
    """
    golden.message("\n".join(dotted(path) for path, _ in field_paths()))
