"""One element of a sweep as a job of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcddp.spec.job import JobSpec
from hpcddp.spec.sweep_fields import read_field, with_values


def element_spec(spec: JobSpec, values: Mapping[str, Any]) -> JobSpec:
    """Return the job of an element: its values filled in, and no sweep.

    Args:
        spec: a valid job with a sweep.
        values: the element's values by key path.
    """
    typed = {key: read_field(key, value) for key, value in values.items()}
    return with_values(spec, {**typed, "sweep": None, "max_parallel": None})
