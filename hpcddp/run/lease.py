"""Who owns a run: its newest attempt. Claiming one creates its directory, which fences those before it."""

from __future__ import annotations

from typing import ClassVar

from hpcddp.errors import HpcddpError
from hpcddp.run.directory import RunDirectory
from hpcddp.stop.exit_codes import ExitCode


class FencedError(HpcddpError):
    """Another attempt owns the run; this one must not write."""

    kind = "fenced"
    exit_code: ClassVar[int] = ExitCode.FENCED


def raise_if_fenced(run: RunDirectory, attempt: int) -> None:
    """Refuse to write for an attempt that is no longer the newest.

    Raises:
        FencedError: another attempt owns the run.
    """
    newest = run.newest_attempt()
    if newest is not None and newest != attempt:
        raise FencedError(
            f"attempt {newest} owns the run {run.run_id}, so attempt {attempt} must not write; it ends here"
        )
