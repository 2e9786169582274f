"""The output of squeue."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.slurm import commands
from hpcddp.slurm.commands import FORMAT, QueuedJob, parse_queue, seconds_in
from tests.facts import assert_facts
from tests.messages import GoldenMessages
from tests.slurm.programs import program

# As printed by Slurm 22.05.8, widths shortened.
PRINTED = """\
2_3  |CANCELLED |0  |2026-11-21T15:45:43 |2026-11-21T15:48:44 |0:29 |UNLIMITED |3 |n[1-3]|(null) |0 |None |
12   |PENDING   |1  |2026-11-21T15:45:43 |N/A |0:00 |20:00 |4 | |afterok:8(unfulfilled) |0:0 |(ReqNodeNotAvail, x|y) |
8    |RUNNING   |0  |2026-11-21T16:00:31 |2026-11-21T16:00:33 |1-02:03:04 |365-00:00:00 |1 |n1|(null) |0 |None |
squeue: a site's own word
"""


def test_every_field_is_read_and_other_lines_are_skipped() -> None:
    array, waiting, running = parse_queue(PRINTED)
    assert array == QueuedJob(
        job_id="2_3", state="CANCELLED", submit_time="2026-11-21T15:45:43", start_time="2026-11-21T15:48:44", used_s=29,
        limit_s=None, nodes=3, node_list="n[1-3]", reason="None",
    )  # fmt: skip
    assert (waiting.restarts, waiting.start_time, waiting.limit_s, waiting.node_list) == (1, None, 1200, "")
    assert (array.dependency, waiting.dependency) == ("", "afterok:8(unfulfilled)")
    assert waiting.reason == "(ReqNodeNotAvail, x|y)"
    assert (running.used_s, running.limit_s) == (93784, 31536000)


@pytest.mark.parametrize(
    ("exit_code", "exit_signal"),
    # As squeue 22.05.8 prints them, and as 24.11.5 and 26.05.5 do; a code that is not known prints nothing there.
    [("4021", 53), ("9", 9), ("768", None), ("0", None), ("-2", None), ("0:53", 53), ("3:0", None), ("", None)],
)
def test_the_signal_that_ended_a_job_is_read(exit_code: str, exit_signal: int | None) -> None:
    (job,) = parse_queue(f"3 |FAILED |0 |N/A |N/A |0:00 |20:00 |1 |n1 |(null) |{exit_code} |JobLaunchFailure |\n")
    assert job.exit_signal == exit_signal


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:05", 5), ("12:00", 720), ("1:00:00", 3600), ("2-00:00:01", 172801), ("UNLIMITED", None), ("INVALID", None)],
)
def test_times_are_seconds(text: str, seconds: int | None) -> None:
    assert seconds_in(text) == seconds


def test_one_squeue_call_lists_the_jobs_whatever_the_user_has_set(tmp_path: Path) -> None:
    told = f'printf "%s\\n" "$@" > {tmp_path}/argv; env > {tmp_path}/env; printf "%s" "{PRINTED}"'
    env = program(tmp_path, "squeue", told)
    jobs = commands.queue({**env, "SQUEUE_STATES": "RUNNING", "SQUEUE_PARTITION": "x", "SLURM_TIME_FORMAT": "relative"})
    assert [job.job_id for job in jobs] == ["2_3", "12", "8"]
    words = (tmp_path / "argv").read_text().split("\n")[:-1]
    assert words == ["--me", "--array", "--states=all", "--noheader", f"--Format={FORMAT}"]
    environment = (tmp_path / "env").read_text()
    assert "SQUEUE_" not in environment
    assert "SLURM_TIME_FORMAT=standard" in environment


def test_a_controller_that_is_away_is_told_from_a_refusal(tmp_path: Path) -> None:
    env = program(tmp_path, "squeue", 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(commands.SlurmUnavailableError, match="squeue failed: slurm_load_jobs error: Unable to contact"):
        commands.queue(env)
    env = program(tmp_path, "squeue", 'echo "squeue: error: Access denied" >&2; exit 1')
    with pytest.raises(commands.SlurmCommandError, match="squeue failed: squeue: error: Access denied"):
        commands.queue(env)


def test_jobs_are_ended_and_signalled_by_scancel(tmp_path: Path) -> None:
    env = program(tmp_path, "scancel", f'echo "$@" >> {tmp_path}/argv')
    commands.cancel(["7", "50_[2-3]"], env)
    commands.cancel(["7"], env, signal="USR2")
    assert (tmp_path / "argv").read_text() == "7 50_[2-3]\n--signal=USR2 7\n"


def test_a_cancel_that_is_refused_carries_scancels_reason(tmp_path: Path) -> None:
    env = program(tmp_path, "scancel", 'echo "scancel: error: Kill job error on job id 7: Access denied" >&2; exit 1')
    with pytest.raises(commands.SlurmCommandError, match="scancel failed: scancel: error: Kill job error"):
        commands.cancel(["7"], env)


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        ('echo "JOBID PRIORITY AGE"; echo "7 100 5"', "JOBID PRIORITY AGE\n7 100 5\n"),
        ('echo "JOBID PRIORITY AGE"', None),
        ('echo "You are not running a supported priority plugin" >&2; exit 1', None),
    ],
)
def test_a_priority_is_returned_if_slurm_computes_one(tmp_path: Path, body: str, priority: str | None) -> None:
    assert commands.priority("7", program(tmp_path, "sprio", body)) == priority
    assert commands.priority("7", {"PATH": str(tmp_path / "nothing")}) is None


def test_a_configuration_that_is_gone_is_said_at_once(tmp_path: Path, golden: GoldenMessages) -> None:
    """Slurm's commands wait a minute for the file."""
    gone = str(tmp_path / "slurm.conf")
    env = {**program(tmp_path, "squeue", "exec sleep 30"), "SLURM_CONF": gone}
    with pytest.raises(commands.SlurmUnavailableError) as caught:
        commands.queue(env)
    assert_facts(golden.message(caught.value), f"SLURM_CONF is {gone!r}", "correct or unset it")
