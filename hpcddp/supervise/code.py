"""Compare the code of the project with that of the submission, at the start of every attempt."""

from __future__ import annotations

import time
from typing import Final, NoReturn

from hpcddp.errors import HpcddpError, printable, write_message
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.code import CodeChanges, CodeError, changes_since, read_code, read_copy
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.events import append_event
from hpcddp.run.result import resume_command
from hpcddp.supervise.refusals import write_unfinished

_LISTED: Final = 20


def compare_code(run: RunDirectory, spec: JobSpec) -> CodeChanges:
    """Return what differs from the submission; nothing where its code is not known.

    Raises:
        CodeError: it differs, and the code is frozen; or no copy was made of code that is to run from one.
        RecordError: the record is damaged, and the job depends on it.
    """
    mode = spec.environment.code
    try:
        if mode == "snapshot":
            return changes_since(read_copy(run)[0])
        code = read_code(run)
    except HpcddpError as error:
        if mode != "live":
            raise
        write_message(f"warning: {error.message}")
        return CodeChanges()
    if code is None and mode == "frozen":
        raise CodeError(
            f"environment.code is frozen, and nothing is known of the code that the run {run.run_id} was submitted "
            "with; submit the job with hpcddp submit"
        )
    if code is None:
        return CodeChanges()
    changes = changes_since(code.record)
    if changes and mode == "frozen":
        _refuse_frozen(run, changes)
    return changes


def _refuse_frozen(run: RunDirectory, changes: CodeChanges) -> NoReturn:
    """Write the result of a run whose frozen code has changed, and refuse the attempt."""
    why = f"environment.code is frozen, and {printable(changes.sentence)}"
    resume = f"{resume_command(run)} --code now"
    write_unfinished(run, "stopped", why, CodeError.exit_code, resume=resume)
    append_event(run.events, kind="refusal", time=time.time(), attempt=run.newest_attempt() or 0, reason=why)
    raise CodeError(
        f"run {run.run_id} is not started: {why}. Undo the change and resume: {resume_command(run)}. Or run the code "
        f"as it is now: {resume}"
    )


def record_changes(attempt: AttemptDirectory, spec: JobSpec, changes: CodeChanges) -> None:
    """Record in the event log, and print, that the code of an attempt is not that of the submission."""
    if not changes:
        return
    runs_copy = spec.environment.code == "snapshot"
    reason = f"{printable(changes.sentence)}; this attempt runs the new one"
    if runs_copy:
        reason = f"{printable(changes.sentence)}; this attempt runs the copy of the submission"
    append_event(
        attempt.run.events,
        kind="code",
        time=time.time(),
        attempt=attempt.number,
        reason=reason,
        edited=list(changes.edited[:_LISTED]),
        removed=list(changes.removed[:_LISTED]),
    )
    write_message(reason if runs_copy else f"warning: {reason}")
