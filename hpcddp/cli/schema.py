"""``hpcddp schema``."""

from __future__ import annotations

import json

import typer

from hpcddp.cli.options import AsJson
from hpcddp.cli.output import echo


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(schema)


def schema(*, as_json: AsJson = False) -> None:  # noqa: ARG001  the schema is JSON in any case
    """Print the job file's JSON schema, for editors.

    The schema is one JSON document, with and without --json. An editor that knows the schema completes and checks a
    job file whose first line is: # yaml-language-server: $schema=job.schema.json

    Example: hpcddp schema > job.schema.json
    """
    from hpcddp.jobfile.schema import job_schema

    echo(json.dumps(job_schema(), indent=2))
