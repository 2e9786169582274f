"""Chains of jobs on a Slurm that refuses every requeue, and whose nodes may not submit."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from hpcddp.run.job_records import chain_of
from tests.cluster.commands import script, start
from tests.cluster.jobs import HPCDDP
from tests.cluster.sandbox import Sandbox
from tests.cluster.tracked_run import TrackedRun
from tests.waiting import wait_until

# What the refused commands print is what Slurm prints.
_SCONTROL = """#!/bin/bash
case $* in
*requeue* | *Requeue=1*)
  echo "$*" >>{log}
  echo "slurm_requeue error: Access/permission denied" >&2
  exit 1
  ;;
esac
exec {program} "$@"
"""
_SBATCH = """#!/bin/bash
if [[ -v SLURM_JOB_ID ]]; then
  echo "$*" >>{log}
  echo "sbatch: error: Access/permission denied" >&2
  exit 1
fi
exec {program} "$@"
"""
# It is told of the end of its time, and has work for three jobs.
_WORK = """
    import os, pathlib, signal, sys, time
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
    pathlib.Path("began-" + os.environ["HPCDDP_ATTEMPT"]).touch()
    if os.environ["HPCDDP_ATTEMPT"] != "2":
        time.sleep(600)
"""
_WAITS = """
    import os, pathlib, time
    pathlib.Path("began-" + os.environ["HPCDDP_ATTEMPT"]).touch()
    if os.environ["HPCDDP_ATTEMPT"] != "2":
        time.sleep(600)
"""
# It listens to nothing, so that it lives until KillWait is over.
_STUBBORN = """
    import os, signal, time
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    end = time.monotonic() + 600
    while os.environ["HPCDDP_ATTEMPT"] == "0" and time.monotonic() < end:
        time.sleep(1)
"""


def strict_site(sandbox: Sandbox, directory: Path) -> dict[str, str]:
    """Return the environment of a site whose jobs may neither be requeued nor submit others."""
    programs = directory / "strict"
    programs.mkdir()
    for name, text in (("scontrol", _SCONTROL), ("sbatch", _SBATCH)):
        program = sandbox.run("which", name).stdout.strip()
        path = programs / name
        path.write_text(text.format(log=directory / "refused", program=program))
        path.chmod(0o700)
    return {"PATH": f"{programs}:{os.environ['PATH']}"}


def start_chain(
    sandbox: Sandbox, directory: Path, count: int, program: str, *words: str
) -> tuple[TrackedRun, tuple[str, ...]]:
    """Submit a chain of jobs of a minute, or as ``words`` say."""
    words = ("--time", "1", "--chain", str(count), *words, "--", sys.executable, str(script(directory, program)))
    tracked = start(sandbox, directory, *words, env=strict_site(sandbox, directory))
    return tracked, chain_of(tracked.run)


def batch_script_of(job_id: str) -> int:
    """Return the process id of the batch script of a job that runs."""
    ending = f"/job{int(job_id):05}/slurm_script\0".encode()
    (path,) = [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.read_bytes().endswith(ending)]
    return int(path.parent.name)


def test_a_chain_goes_on_over_time_limits_and_its_rest_ends_well(sandbox: Sandbox, tmp_path: Path) -> None:
    tracked, chain = start_chain(sandbox, tmp_path, 4, _WORK)
    sandbox.wait(chain[3], timeout=400)
    ends = [(fields["JobState"], fields["ExitCode"]) for fields in map(sandbox.job, chain)]
    assert ends == [("FAILED", "75:0")] * 2 + [("COMPLETED", "0:0")] * 2
    assert tracked.result["status"] == "finished"
    assert [event.facts["job_id"] for event in tracked.events("start")] == list(chain[:3])
    requeues = [(event.cause, event.by, event.facts["job_id"]) for event in tracked.events("requeue")]
    assert requeues == [("time_limit", "chain", chain[1]), ("time_limit", "chain", chain[2])]
    assert "hpcddp: this run has ended already; nothing to do\n" in tracked.log()
    assert not (tmp_path / "refused").exists()


def test_a_cancel_ends_every_job_of_a_chain(sandbox: Sandbox, tmp_path: Path) -> None:
    tracked, chain = start_chain(sandbox, tmp_path, 4, _WORK.replace("signal.SIGUSR2", "signal.SIGUSR1"))
    tracked.wait_until((tmp_path / "began-0").exists, "the first attempt")
    # Another run of the same job does not wait for this one.
    words = ("--time", "1", "--chain", "2", "--", sys.executable, "-c", "print(1)")
    other = start(sandbox, tmp_path, *words)
    sandbox.wait(chain_of(other.run)[1])
    assert other.result["status"] == "finished"
    shown = sandbox.run(*HPCDDP, "why", tracked.run.path, cwd=tmp_path).stdout
    assert f"job {chain[0]} is number 1 of the 4 of its chain" in shown
    sandbox.run(*HPCDDP, "cancel", tracked.run.path, cwd=tmp_path)

    def states() -> list[str]:
        return [sandbox.job(job_id)["JobState"] for job_id in chain]

    wait_until(lambda: set(states()) <= {"CANCELLED", "FAILED"}, lambda: f"the end of the chain: {states()}")
    assert states()[1:] == ["CANCELLED"] * 3
    assert (tracked.result["status"], tracked.attempts) == ("cancelled", 1)
    assert tracked.result["resume"].endswith(" --chain 4")


def test_a_chain_goes_on_after_a_killed_script_and_a_preemption(sandbox: Sandbox, tmp_path: Path) -> None:
    on_one = ("--time", "10", "--partition", "low", "--nodelist", "n1")
    tracked, chain = start_chain(sandbox, tmp_path, 4, _WAITS, *on_one)
    tracked.wait_until((tmp_path / "began-0").exists, "the first attempt")
    os.kill(batch_script_of(chain[0]), signal.SIGKILL)
    wait_until((tmp_path / "began-1").exists, "the second attempt")
    sandbox.submit("--partition=high", "--exclusive", "--nodelist=n1", "--output=/dev/null", "--wrap=true")
    sandbox.wait(chain[3], timeout=120)
    assert tracked.result["status"] == "finished"
    assert [event.facts["job_id"] for event in tracked.events("start")] == list(chain[:3])
    requeues = tracked.events("requeue")
    assert [(event.by, event.facts["job_id"]) for event in requeues] == [("chain", chain[1]), ("chain", chain[2])]
    assert requeues[1].cause == "preemption"
    history = sandbox.run(*HPCDDP, "why", tracked.run.path, cwd=tmp_path).stdout
    assert "attempt 0 stopped, the next job of its chain goes on: its job was killed\n" in history


@pytest.mark.long("tests/supervise/test_chain.py begins a job while the one before it ends")
def test_a_job_of_a_chain_waits_for_the_one_before_it_which_is_over_its_limit(sandbox: Sandbox, tmp_path: Path) -> None:
    tracked, chain = start_chain(sandbox, tmp_path, 2, _STUBBORN)
    sandbox.wait(chain[1], timeout=400)
    first = tracked.events("requeue")
    assert [(event.cause, event.by) for event in first] == [("time_limit", "chain")]
    assert (tracked.result["status"], tracked.attempts) == ("finished", 2)
    assert "is taken" not in tracked.log()
