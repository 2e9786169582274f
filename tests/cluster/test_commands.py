"""Programs and functions of the user's own on the real Slurm: they see the right world, hear signals, and come back."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_records import read_ranks
from tests.cluster.commands import RAISES, SAVES, script, start
from tests.cluster.jobs import HPCDDP, result_of
from tests.cluster.sandbox import Sandbox
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.cluster.slurm_faults import link_cut, without_slurmd
from tests.cluster.tracked_run import TrackedRun
from tests.examples import examples
from tests.waiting import wait_for_text

# Everything that a shell, sbatch, YAML or a terminal might take for its own.
HOSTILE = st.text(
    st.one_of(
        st.sampled_from(" \t\n\r\"'`$\\*?[]{}()<>|&;#!~%=,:-"),
        st.characters(codec="utf-8", exclude_characters="\0"),
    ),
    max_size=12,
)
FIXED = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "$HOME",
    "$(id)",
    "`id`",
    "*",
    "?",
    "~",
    "\\",
    "\n",
    "a\nb",
    "--",
    "-x",
    "#",
    "é😀",
    "\t",
    "!!",
]


def as_yaml(job: Any) -> str:
    """Write a job as JSON, with what YAML reads only where it is escaped (YAML 1.2.2, rule c-printable)."""
    text = json.dumps(job, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def test_a_task_finds_the_environment_of_torchrun_and_the_numbers_of_the_batch(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    program = script(
        tmp_path,
        """
        import json, os, pathlib
        pathlib.Path(f"seen-{os.environ['RANK']}").write_text(json.dumps(dict(os.environ)))
        """,
    )
    words = ("--nodes", "2", "--tasks-per-node", "2", "--cpus-per-task", "2", "--time", "10")
    batch = ("--global-batch-size", "64", "--set", "batch.max_per_device_batch_size=8")
    start(
        sandbox, tmp_path, *words, *batch, "--", sys.executable, program, env={"OMP_NUM_THREADS": ""}
    ).wait_until_finished()
    seen = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(4)]
    named = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [[found[name] for name in named] for found in seen] == [
        ["0", "0", "4", "2", "0"],
        ["1", "1", "4", "2", "0"],
        ["2", "0", "4", "2", "1"],
        ["3", "1", "4", "2", "1"],
    ]
    assert len({(found["MASTER_ADDR"], found["MASTER_PORT"]) for found in seen}) == 1
    for found in seen:
        assert {name: value for name, value in found.items() if name.startswith("HPCDDP_") and "BATCH" in name} == {
            "HPCDDP_GLOBAL_BATCH_SIZE": "64",
            "HPCDDP_RANK_BATCH_SIZE": "16",
            "HPCDDP_PER_DEVICE_BATCH_SIZE": "8",
        }
        assert found["HPCDDP_GRAD_ACCUM_STEPS"] == "2"


@settings(
    examples(0.02),
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(words=st.lists(HOSTILE, min_size=20, max_size=40), values=st.lists(HOSTILE, min_size=10, max_size=20))
def test_arguments_and_values_of_the_environment_arrive_unchanged(
    sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory, words: list[str], values: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("hostile")
    program = script(
        directory,
        """
        import json, os, pathlib, sys
        found = {name: value for name, value in os.environ.items() if name.startswith("VALUE_")}
        pathlib.Path("seen").write_text(json.dumps([sys.argv[1:], found]))
        """,
    )
    words, values = [*FIXED, *words], [*FIXED, *values]
    env = {f"VALUE_{number}": value for number, value in enumerate(values)}
    job = directory / "job.yaml"
    resources, environment = {"time_limit": 10}, {"env": env}
    work = {"name": "hostile", "resources": resources, "environment": environment}
    job.write_text(as_yaml({**work, "command": [sys.executable, str(program), *words]}))
    start(sandbox, directory, job).wait_until_finished()
    assert json.loads((directory / "seen").read_text()) == [words, env]
    (directory / "seen").unlink()
    # The same words behind `--`, and the values as the job file has them.
    job.write_text(as_yaml(work))
    start(sandbox, directory, job, "--", sys.executable, program, *words).wait_until_finished()
    assert json.loads((directory / "seen").read_text()) == [words, env]


@pytest.mark.parametrize(
    "code", [0, *(pytest.param(code, marks=pytest.mark.long("the decision has a table of codes")) for code in (3, 75))]
)
def test_a_preempted_command_comes_back_whatever_its_exit_code(sandbox: Sandbox, tmp_path: Path, code: int) -> None:
    program = script(tmp_path, SAVES.replace("CODE", str(code)))
    on = ("--nodes", "2", "--nodelist", "n1,n2", "--partition", "low", "--time", "10")
    tracked = start(sandbox, tmp_path, *on, "--", sys.executable, program)
    wait_for_text(tracked.run.attempts / "0" / "rank-0.log", "begins at 0")
    wait_for_text(tracked.run.attempts / "0" / "rank-1.log", "begins at 0")
    high = ("--partition=high", "--exclusive", "--nodelist=n1,n2", "--nodes=2", "--output=/dev/null")
    sandbox.submit(*high, "--wrap=sleep 2")
    tracked.wait_until_finished(timeout_s=180)
    assert tracked.attempts == 2
    assert [event.cause for event in tracked.events("requeue")] == ["preemption"]
    (again,) = re.findall(r"begins at (\d+)", (tracked.run.attempts / "1" / "rank-0.log").read_text())
    assert int(again) > 0
    assert tracked.result["status"] == "finished"


def test_a_command_that_asks_to_go_on_is_run_again_until_it_does_not(sandbox: Sandbox, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import os, pathlib, sys
        attempt = int(os.environ["HPCDDP_ATTEMPT"])
        pathlib.Path(os.environ["HPCDDP_PROGRESS_FILE"]).touch()
        if attempt == 1:
            pathlib.Path(os.environ["HPCDDP_REQUEUE_FILE"]).touch()
        sys.exit(75 if attempt == 0 else 0)
        """,
    )
    tracked = start(sandbox, tmp_path, "--time", "10", "--", sys.executable, program)
    tracked.wait_until_finished(timeout_s=180)
    assert tracked.attempts == 3
    assert [event.cause for event in tracked.events("requeue")] == ["unknown"] * 2


@pytest.mark.long("tests/supervise/test_end_of_commands.py counts what such a command asks")
def test_a_command_that_only_ever_asks_to_go_on_is_ended_by_the_budget(sandbox: Sandbox, tmp_path: Path) -> None:
    tracked = start(sandbox, tmp_path, "--time", "10", "--", "sh", "-c", "exit 75")
    fields = tracked.wait_for_end("FAILED")
    assert (fields["ExitCode"], tracked.attempts) == ("93:0", 2)
    assert "max_attempts_without_progress" in tracked.result["reason"]


def test_a_failed_command_is_not_run_again_and_names_the_first_rank(sandbox: Sandbox, tmp_path: Path) -> None:
    program = script(tmp_path, RAISES.format(rank=1))
    words = ("--nodes", "2", "--time", "10", "--follow", "--json", "--", sys.executable, program)
    done = sandbox.run(*HPCDDP, "submit", *words, cwd=tmp_path, check=False, timeout=300)
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert (document["status"], document["result"]["exit_code"]) == ("failed", 70)
    assert re.search(r"rank 1 on n\d failed first: ValueError: my own mistake", document["result"]["reason"])
    fields = sandbox.wait(document["job_id"], states={"FAILED"})
    assert (fields["ExitCode"], fields["Restarts"]) == ("70:0", "0")
    log = RunDirectory(Path(document["run_dir"])).batch_log
    assert 'raise ValueError("my own mistake")' in log.read_text()


def test_a_cancelled_command_stays_cancelled(sandbox: Sandbox, tmp_path: Path) -> None:
    program = script(tmp_path, SAVES.replace("CODE", "75"))
    tracked = start(sandbox, tmp_path, "--time", "10", "--", sys.executable, program)
    wait_for_text(tracked.run.attempts / "0" / "rank-0.log", "begins at 0")
    sandbox.run("scancel", tracked.job_id)
    tracked.wait_for_end("CANCELLED")
    wait_for_text(tracked.run.result, "cancelled")
    assert result_of(tracked.run)["status"] == "cancelled"
    assert (tmp_path / "saved").exists()


WAITS = """
    import os, pathlib, time
    pathlib.Path(f"up-{os.environ['HPCDDP_ATTEMPT']}-{os.environ['RANK']}").touch()
    time.sleep(600)
"""
# What every interpreter of the job imports first: the task of rank 1 leaves when both programs are at work.
LEAVES = """
import os, pathlib, sys, threading, time
def leave():
    attempt = os.path.basename(os.environ["HPCDDP_ATTEMPT_DIR"])
    while not all(pathlib.Path(f"up-{attempt}-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.1)
    os._exit(3)
if "hpcddp.task" in sys.orig_argv and os.environ["SLURM_PROCID"] == "1":
    threading.Thread(target=leave, daemon=True).start()
"""


def wait_for_work(tracked: TrackedRun, directory: Path, attempt: int, *, ranks: int = 2) -> None:
    """Wait until the programs of all ranks of an attempt are at work."""
    ups = [directory / f"up-{attempt}-{rank}" for rank in range(ranks)]
    tracked.wait_until(lambda: all(up.exists() for up in ups), f"the programs of attempt {attempt}")


@pytest.mark.parametrize(
    ("how", "max_failures"),
    [
        ("its program is killed", 1),
        ("it leaves", 0),
        *(
            pytest.param(how, count, marks=pytest.mark.long("a way to end and a budget meet in no code"))
            for how, count in [("its program is killed", 0), ("it is killed", 0), ("it is killed", 1), ("it leaves", 1)]
        ),
    ],
)
def test_a_command_whose_task_fails_is_run_again_as_often_as_max_failures_says(
    sandbox: Sandbox, tmp_path: Path, how: str, max_failures: int
) -> None:
    program = script(tmp_path, WAITS)
    (tmp_path / "sitecustomize.py").write_text(LEAVES if how == "it leaves" else "")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    sets = ("--set", f"requeue.max_failures={max_failures}", "--set", "requeue.max_attempts_without_progress=9")
    words = ("--nodes", "2", "--time", "10", *sets)
    tracked = start(sandbox, tmp_path, *words, "--", sys.executable, program, env={"PYTHONPATH": path})
    for attempt in range(max_failures + 1):
        wait_for_work(tracked, tmp_path, attempt)
        if how != "it leaves":
            victims = tracked.workers(1) if how == "its program is killed" else [tracked.ranks()[1]]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
    fields = tracked.wait_for_end("FAILED")
    assert (fields["ExitCode"], fields["Restarts"]) == ("71:0", "0")
    assert [event.cause for event in tracked.events("restart")] == ["crash"] * max_failures
    assert tracked.attempts == max_failures + 1
    assert re.search(r"^rank 1 on n\d", tracked.result["reason"])


@pytest.mark.parametrize(
    "lost", [without_slurmd, pytest.param(link_cut, marks=pytest.mark.long("Slurm tells both in the same way"))]
)
def test_a_lost_node_is_no_failure_of_a_command_and_ends_it_when_no_progress_is_made(
    tmp_path: Path, lost: Callable[[Sandbox, str], AbstractContextManager[None]]
) -> None:
    with sandbox_with(*QUICK) as sandbox:
        tracked = start(
            sandbox, tmp_path, "--nodes", "2", "--time", "10", "--", sys.executable, script(tmp_path, WAITS)
        )
        wait_for_work(tracked, tmp_path, 0)
        with lost(sandbox, node_of(tracked, 1)):
            wait_for_work(tracked, tmp_path, 1)
            sandbox.run("scontrol", "update", f"NodeName={node_of(tracked, 1)}", "State=DOWN", "Reason=test")
            fields = tracked.sandbox.wait(tracked.job_id, states={"FAILED"}, timeout=240)
        assert (fields["ExitCode"], fields["Restarts"]) == ("93:0", "2")
        assert [event.cause for event in tracked.events("requeue")] == ["node_failure"] * 2
        assert "requeue.max_attempts_without_progress is 2" in tracked.result["reason"]


def node_of(tracked: TrackedRun, rank: int) -> str:
    ranks = read_ranks(tracked.attempt)
    assert ranks is not None
    return ranks[rank].host


@pytest.mark.long("tests/supervise/test_end_of_commands.py counts such preemptions")
def test_a_command_that_never_says_how_far_it_is_may_be_preempted_without_a_grace_time_again_and_again(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    on = ("--nodelist", "n1", "--partition", "low0", "--time", "10")
    tracked = start(sandbox, tmp_path, *on, "--", sys.executable, script(tmp_path, WAITS))
    for attempt in range(3):
        wait_for_work(tracked, tmp_path, attempt, ranks=1)
        sandbox.submit("--partition=high", "--exclusive", "--nodelist=n1", "--output=/dev/null", "--wrap=true")
    wait_for_work(tracked, tmp_path, 3, ranks=1)
    assert [event.cause for event in tracked.events("requeue")] == ["preemption"] * 3


@pytest.mark.long("tests/supervise/test_end_of_commands.py counts such requeues")
def test_no_budget_counts_a_requeue_of_a_command_that_its_user_asks_hpcddp_for(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    words = ("--time", "10", "--", sys.executable, script(tmp_path, WAITS))
    tracked = start(sandbox, tmp_path, *words)
    for attempt in range(3):
        wait_for_work(tracked, tmp_path, attempt, ranks=1)
        sandbox.run(*HPCDDP, "requeue", tracked.run.path, cwd=tmp_path)
    wait_for_work(tracked, tmp_path, 3, ranks=1)
    assert [event.by for event in tracked.events("requeue")] == ["user"] * 3


@pytest.mark.long("tests/supervise/test_end_of_commands.py counts such requeues")
def test_a_command_that_somebody_requeues_by_scontrol_goes_on_until_it_makes_no_progress(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    words = ("--time", "10", "--", sys.executable, script(tmp_path, WAITS))
    tracked = start(sandbox, tmp_path, *words)
    for attempt in range(2):
        wait_for_work(tracked, tmp_path, attempt, ranks=1)
        sandbox.run("scontrol", "requeue", tracked.job_id)
    fields = tracked.wait_for_end("FAILED")
    assert (fields["ExitCode"], fields["Restarts"]) == ("93:0", "2")
    assert [event.cause for event in tracked.events("requeue")] == ["requeued"] * 2


@pytest.mark.long
@pytest.mark.parametrize("listens", [False, True], ids=["does not listen", "listens to the warning"])
def test_a_command_that_runs_out_of_time_is_run_again(sandbox: Sandbox, tmp_path: Path, *, listens: bool) -> None:
    warned = "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))" if listens else ""
    program = script(
        tmp_path,
        f"""
        import os, signal, sys, time
        {warned}
        if os.environ["HPCDDP_ATTEMPT"] == "0":
            time.sleep(600)
        """,
    )
    tracked = start(sandbox, tmp_path, "--time", "1", "--", sys.executable, program)
    tracked.wait_until_finished(timeout_s=300)
    assert [event.cause for event in tracked.events("requeue")] == ["time_limit"]
    assert tracked.attempts == 2


@pytest.mark.long("tests/task/test_umask.py has the umask of a command")
def test_files_of_a_command_have_the_umask_of_its_submitter_in_every_job_of_its_run(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    program = script(
        tmp_path,
        """
        import os, pathlib, sys, time
        attempt = int(os.environ["HPCDDP_ATTEMPT"])
        pathlib.Path(os.environ["HPCDDP_PROGRESS_FILE"]).touch(mode=0o600)
        pathlib.Path(f"own-{attempt}").touch()
        while attempt == 0 and not pathlib.Path("go").exists():
            time.sleep(0.1)
        sys.exit(75 if attempt < 2 else 0)
        """,
    )
    before = os.umask(0o027)
    try:
        words = ("--time", "10", "--chain", "3", "--", sys.executable, program)
        tracked = start(sandbox, tmp_path, *words)
    finally:
        os.umask(before)
    tracked.wait_until((tmp_path / "own-0").exists, "the first attempt")
    (tmp_path / "go").touch()
    tracked.wait_until(
        lambda: tracked.run.result.exists() and tracked.result["status"] == "finished", "the end of the run"
    )
    job_ids = [event.facts["job_id"] for event in tracked.events("start")]
    assert (job_ids[0], len(job_ids), len(set(job_ids))) == (tracked.job_id, 3, 3)
    assert [path.stat().st_mode & 0o777 for path in sorted(tmp_path.glob("own-*"))] == [0o640] * 3
    assert [path for path in tracked.run.path.rglob("*") if path.stat().st_mode & 0o077] == []


FUNCTION = """
import time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import hpcddp

def main(context: hpcddp.Context):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpointer = context.checkpointer({"model": model, "optimizer": optimizer})
    first = checkpointer.restore().step
    for step in range(first, 80):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), float(step % 7)).double()).square().mean()
        loss.backward()
        optimizer.step()
        context.log(step + 1, loss=loss.item())
        # The job is preempted before this function first asks whether to stop.
        while context.attempt == 0 and not Path("preempted").exists():
            time.sleep(0.1)
        if context.stopper.should_stop():
            checkpointer.save(step + 1)
            checkpointer.wait()
            context.stopper.exit()
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, context.rank)
    return {"first": first, "hosts": context.rank_env.hosts, "world": context.world_size, "ranks": ranks}
"""


def test_a_preempted_function_comes_back_and_computes_every_step_once(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    job = tmp_path / "job.yaml"
    resources = {"nodes": 2, "tasks_per_node": 1, "time_limit": 10, "nodelist": "n1,n2", "partition": "low"}
    job.write_text(json.dumps({"name": "fn", "resources": resources, "entrypoint": "mine:main"}))
    tracked = start(sandbox, tmp_path, job)
    wait_for_text(tracked.run.metrics, '"step"')
    high = ("--partition=high", "--exclusive", "--nodelist=n1,n2", "--nodes=2", "--output=/dev/null")
    sandbox.submit(*high, "--wrap=sleep 2")
    tracked.wait_until(lambda: bool(tracked.events("cause")), "the cause of the stop")
    (tmp_path / "preempted").touch()
    tracked.wait_until_finished(timeout_s=240)
    returned = tracked.result["returned"]
    assert (returned["hosts"], returned["world"], returned["ranks"]) == (["n1", "n2"], 2, [0, 1])
    assert 0 < returned["first"] < 80
    steps = [json.loads(line)["step"] for line in tracked.run.metrics.read_text().splitlines()]
    assert steps == list(range(1, 81))
    assert [event.cause for event in tracked.events("requeue")] == ["preemption"]
