"""What ``hpcddp render --json`` says: the script, its directives, the plan, and where each value came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcddp.batch.job import plan_job
from hpcddp.launch.render import RenderedScript
from hpcddp.spec.document import Path, dotted
from hpcddp.spec.fieldtree import leaf_paths
from hpcddp.spec.read import ResolvedJob
from hpcddp.spec.sweep import tabulate

SET = "<set>"
"""Stands for the value of an environment variable: the script needs it, a record of fields does not."""


def describe(job: ResolvedJob, script: RenderedScript) -> dict[str, Any]:
    """Return the document of ``render --json``.

    Args:
        job: the job.
        script: its script.
    """
    return {
        "script": script.text,
        "directives": [{"flag": directive.flag, "value": directive.value} for directive in script.directives],
        "plan": None if job.spec.batch.global_batch_size is None else plan_job(job.spec, samples=None).as_json(),
        "elements": None if job.spec.sweep is None else tabulate(job.spec.sweep).elements(),
        "fields": {dotted(path): {"value": value, "origin": job.origins[dotted(path)]} for path, value in _fields(job)},
    }


def _fields(job: ResolvedJob) -> Iterator[tuple[Path, Any]]:
    """Yield every field that is no section, and what is in it one by one where the user names the keys."""
    document = job.spec.model_dump(mode="json")
    document["environment"]["env"] = dict.fromkeys(job.spec.environment.env, SET)
    for path, field in leaf_paths(job.spec):
        value: Any = document
        for key in path:
            value = value[key]
        yield path, value
        if isinstance(field, Mapping):
            yield from (((*path, key), entry) for key, entry in value.items())
