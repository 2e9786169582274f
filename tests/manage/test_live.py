"""Commands inside a run: which node, and which runs have none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcddp.cli import boundary
from hpcddp.cli.main import app
from hpcddp.errors import UserError
from hpcddp.jobfile.read import load_job
from hpcddp.jobfile.write import dump_job
from hpcddp.manage.live import LiveRun, NotLiveError, live_run, run_inside, stacks
from hpcddp.manage.run_files import read_run_files
from hpcddp.manage.status import RunStatus, statuses
from hpcddp.run.job_records import Rank, write_ranks
from hpcddp.slurm.commands import QueuedJob, SlurmCommandError, overlapping_step
from hpcddp.task.stacks import ProcessStacks
from tests.manage.runs import NOON, FakeRun, make, queued
from tests.messages import GoldenMessages
from tests.slurm.programs import program
from tests.waiting import wait_until

JOB = "name: digits\nresources: {nodes: 2, tasks_per_node: 2}\ncommand: [torchrun, t.py]\n"
OTHER = "name: digits\nresources: {nodes: 2, tasks_per_node: 2}\ncommand: [python, t.py]\n"


def look(made: FakeRun, *jobs: QueuedJob) -> RunStatus:
    return statuses([read_run_files(made.run)], ask=lambda: jobs, now=NOON + 100).runs[0]


def running(tmp_path: Path, job: str) -> LiveRun:
    path = tmp_path / "job.yaml"
    path.write_text(job)
    made = make(tmp_path).submitted().started()
    made.run.job_file.write_text(dump_job(load_job(path).spec, environment_values=False))
    return live_run(look(made, queued(node_list="n[3,7]")))


@pytest.mark.parametrize("job", [JOB, OTHER], ids=["a task on each node starts a launcher", "a task is a rank"])
def test_the_node_of_a_rank_is_known_before_the_ranks_have_met(tmp_path: Path, job: str) -> None:
    live = running(tmp_path, job)
    assert [live.node_of(rank) for rank in range(4)] == ["n3", "n3", "n7", "n7"]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist_is_refused_with_those_that_do(
    tmp_path: Path, rank: int, golden: GoldenMessages
) -> None:
    with pytest.raises(UserError, match=f"--rank is {rank}, ") as caught:
        running(tmp_path, OTHER).node_of(rank)
    assert "ranks 0 to 3; write one" in golden.message(caught.value)


def test_the_stacks_of_a_rank_that_does_not_exist_are_refused_with_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    live = running(tmp_path, OTHER)
    monkeypatch.setattr("hpcddp.slurm.commands.queue", lambda _: [queued(node_list="n[3,7]")])
    assert boundary.run(app, ["stacks", str(live.attempt.run.path), "--rank", "5"]) == 2
    said = golden.message(capsys.readouterr().err)
    assert said.startswith("hpcddp: --rank is 5, ")
    assert "ranks 0 to 3; write one" in said


@pytest.mark.parametrize("form", [(), ("--json",)])
@pytest.mark.parametrize(("lines", "code"), [(("py-spy is needed",), 1), (("Thread 0x1", '  File "a.py"'), 0)])
def test_stacks_that_nobody_could_read_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...], code: int, form: tuple[str, ...]
) -> None:
    live = running(tmp_path, OTHER)
    monkeypatch.setattr("hpcddp.slurm.commands.queue", lambda _: [queued(node_list="n[3,7]")])
    found = ProcessStacks(rank=0, host="n3", pid=1, command="python t.py", lines=lines)
    monkeypatch.setattr("hpcddp.manage.live.stacks", lambda *_: [found])
    assert boundary.run(app, ["stacks", str(live.attempt.run.path), *form]) == code


def test_a_run_without_nodes_is_refused_with_what_to_do(tmp_path: Path, golden: GoldenMessages) -> None:
    made = make(tmp_path).submitted()
    with pytest.raises(NotLiveError, match="run-1 is pending") as caught:
        live_run(look(made, queued(state="PENDING")))
    assert "; wait until" in golden.message(caught.value)
    made.started().ended("finished")
    with pytest.raises(NotLiveError, match="run-1 is finished") as caught:
        live_run(look(made))
    assert golden.message(caught.value).endswith(": hpcddp logs run-1")


def test_a_run_on_this_machine_needs_no_slurm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    live = running(tmp_path, OTHER)
    here = LiveRun(attempt=live.attempt, job_id=live.job_id, spec=live.spec, nodes=())
    code = run_inside(
        here,
        0,
        ["sh", "-c", "echo $HPCDDP_RUN_ID $RANK; exit 4"],
        {"RANK": "", "PATH": "/bin:/usr/bin"},
        terminal=False,
    )
    assert (code, capfd.readouterr().out) == (4, "run-1\n")
    with pytest.raises(UserError, match="no-such-program was not found"):
        run_inside(here, 0, ["no-such-program"], {"PATH": ""}, terminal=False)


def test_a_run_in_an_allocation_is_reached_on_the_hosts_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(OTHER)
    made = make(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "n1")
    # The script, as far as the kernel shows it.
    with subprocess.Popen(["bash", "-c", "read", str(made.run.script)], stdin=subprocess.PIPE) as script:
        own = str(script.pid)
        # At the end of exec the kernel shows an empty command line for a moment.
        wait_until(Path(f"/proc/{own}/cmdline").read_bytes, "the script")
        made.submitted(own, cluster="here").started(own, is_local=True, allocation="12")
        made.run.job_file.write_text(dump_job(load_job(path).spec, environment_values=False))
        with pytest.raises(NotLiveError, match="run-1 have not met yet") as caught:
            live_run(look(made))
        assert "; try again" in golden.message(caught.value)
        write_ranks(made.run.attempt(0), [Rank(host=host, gpu=None) for host in ("n3", "n3", "n7", "n7")])
        live = live_run(look(made))
    assert (live.job_id, live.nodes) == ("12", ("n3", "n7"))
    assert [live.node_of(rank) for rank in range(4)] == ["n3", "n3", "n7", "n7"]


def test_the_step_shares_the_nodes_with_the_tasks() -> None:
    step = overlapping_step("7", [sys.executable], nodes=["n3"], directory=Path("/x"), terminal=True)
    assert step == [
        "srun", "--jobid=7", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--nodelist=n3",
        "--mem=0", "--mpi=none", "--chdir=/x", "--pty", sys.executable,
    ]  # fmt: skip


def test_srun_gets_the_number_of_an_element_of_a_job_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], golden: GoldenMessages
) -> None:
    live = replace(running(tmp_path, OTHER), job_id="1_0")
    program(tmp_path, "scontrol", 'echo "JobId=2 ArrayJobId=1 ArrayTaskId=0 JobName=$4"')
    environment = program(tmp_path, "srun", 'echo "$1"')
    monkeypatch.setenv("PATH", environment["PATH"])
    assert run_inside(live, 0, ["true"], environment, terminal=False) == 0
    assert capfd.readouterr().out == "--jobid=2\n"
    program(tmp_path, "srun", 'echo "$1" >&2; exit 1')
    with pytest.raises(SlurmCommandError, match=r"srun failed: --jobid=2$"):
        stacks(live, environment)
    program(tmp_path, "scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    with pytest.raises(NotLiveError, match="does not know job 1_0 ") as caught:
        stacks(live, environment)
    assert "; try again" in golden.message(caught.value)


def test_a_suspended_run_is_not_asked(tmp_path: Path, golden: GoldenMessages) -> None:
    made = make(tmp_path).submitted().started().event("train")
    with pytest.raises(NotLiveError, match="run-1 is suspended") as caught:
        live_run(look(made, queued(state="SUSPENDED")))
    assert golden.message(caught.value).endswith("(scontrol resume 7)")
