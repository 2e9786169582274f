"""Records of hpcddp 0.1.0, which name no format, are read."""

from __future__ import annotations

from pathlib import Path

from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import write_json
from hpcddp.run.job_records import newest_start, read_refusal, read_submission
from hpcddp.run.ranks import Rank, read_ranks
from hpcddp.run.result import read_result
from hpcddp.run.sweep import Chunk, read_sweep


def test_records_without_a_format_are_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    write_json(attempt.ranks, [{"host": "n1", "gpu": None}, {"host": "n2"}])
    assert read_ranks(attempt) == (Rank(host="n1"), Rank(host="n2"))
    write_json(tmp_path / "refused-7.json", "it belongs to another job 7")
    assert read_refusal(run, "7") == "it belongs to another job 7"
    # What a checkpointer of the user's own program wrote.
    write_json(attempt.start, {"host": "n1", "pid": 12, "job_id": None, "time": 1.5})
    start = newest_start(run)
    assert start is not None
    assert (start.host, start.pid, start.restart_count, start.token) == ("n1", 12, 0, "")
    write_json(run.submission, {"cluster": "slurm", "job_id": "7", "directory": "/", "python": "python"})
    submission = read_submission(run)
    assert submission is not None
    assert (submission.job_id, submission.time) == ("7", None)
    write_json(run.result, {"status": "failed", "reason": "why", "saved_step": None, "versions": {"torch": "2"}})
    result = read_result(run)
    assert result is not None
    assert result.as_json() == {
        "status": "failed", "reason": "why", "saved_step": None, "versions": {"torch": "2"},
    }  # fmt: skip
    write_json(tmp_path / "sweep.json", {"sweep_id": "s", "elements": [{"seed": 1}], "chunks": [
        {"job_id": "7", "first": 0, "count": 1}]})  # fmt: skip
    sweep = read_sweep(tmp_path)
    assert sweep is not None
    assert (sweep.elements, sweep.chunks) == (({"seed": 1},), (Chunk(job_id="7", first=0, count=1),))
