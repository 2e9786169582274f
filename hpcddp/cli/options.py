"""Options that several commands share, as annotated types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (YAML).")]
JobFileOrNone = Annotated[
    Path | None, typer.Argument(metavar="JOB", help="The job file (YAML); not needed with a command.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field of the job file; repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def profiles_directory(environment: Mapping[str, str]) -> Path:
    """Return where the user's cluster profiles are (XDG Base Directory Specification)."""
    configuration = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME") or "~").expanduser() / ".config"
    return Path(configuration) / "hpcddp" / "profiles"
