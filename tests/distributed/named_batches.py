"""Names another batch for a run, as a submission does that resumes it."""

from __future__ import annotations

from pathlib import Path

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import Change, SubmissionRecord, write_submission_record


def name_batch(run: Path, *batches: int) -> None:
    """Record what the command line of resumptions has named."""
    changes = tuple(Change(key="batch.global_batch_size", before=32, after=batch, attempt=1) for batch in batches)
    run.mkdir(parents=True, exist_ok=True)
    record = SubmissionRecord(
        cluster="local", job_id="1", directory="/", python="python3", time=0.0, changes=changes, run_dir=str(run)
    )
    write_submission_record(RunDirectory(run), record)
