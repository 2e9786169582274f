"""Programs and functions of the user's own on the real Slurm: they see the right world, hear signals, and come back."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hpcddp.run.directory import RunDirectory
from tests.slurm.jobs import HPCDDP, result_of, wait_for
from tests.slurm.life import Life
from tests.slurm.live import Sandbox

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = {"rank 0 of 4", "rank 1 of 4", "rank 2 of 4", "rank 3 of 4"}
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


def start(sandbox: Sandbox, directory: Path, *words: str | Path, env: dict[str, str] | None = None) -> Life:
    """Submit a command from ``directory``."""
    environment = {"OMP_NUM_THREADS": "1", **(env or {})}
    done = sandbox.run(*HPCDDP, "submit", "--json", *words, cwd=directory, env=environment)
    document: dict[str, Any] = json.loads(done.stdout)
    run = RunDirectory(Path(document["run_dir"]))
    return Life(sandbox=sandbox, job=run.job_file, run=run, job_id=document["job_id"])


def as_yaml(job: Any) -> str:
    """Write a job as JSON, with what YAML reads only where it is escaped (YAML 1.2.2, rule c-printable)."""
    text = json.dumps(job, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def script(directory: Path, text: str) -> Path:
    path = directory / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("--global-batch-size", "64", "--", sys.executable, EXAMPLES / "torchrun_script.py"),
        ("--", sys.executable, EXAMPLES / "lightning_script.py", "--nodes", "2", "--devices", "2"),
        ("--", sys.executable, EXAMPLES / "accelerate_script.py"),
    ],
    ids=["torchrun", "Lightning", "accelerate"],
)
def test_a_script_for_another_launcher_runs_unchanged_on_two_hosts(
    sandbox: Sandbox, tmp_path: Path, words: tuple[str | Path, ...]
) -> None:
    life = start(sandbox, tmp_path, "--nodes", "2", "--tasks-per-node", "2", "--time", "10", *words)
    life.finish()
    said = re.findall(r"(rank \d of \d+):.* accuracy ([\d.]+)", life.log())
    at_the_end = {who: float(accuracy) for who, accuracy in said}
    assert at_the_end.keys() == RANKS
    # Beyond what a guess or a rank alone would give, and the same model on all of them.
    assert min(at_the_end.values()) > 0.85
    assert (life.result["status"], life.result["world_size"]) == ("finished", 4)


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
    start(sandbox, tmp_path, *words, *batch, "--", sys.executable, program, env={"OMP_NUM_THREADS": ""}).finish()
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
    max_examples=3,
    deadline=None,
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
    start(sandbox, directory, job).finish()
    assert json.loads((directory / "seen").read_text()) == [words, env]
    (directory / "seen").unlink()
    # The same words behind `--`, and the values as the job file has them.
    job.write_text(as_yaml(work))
    start(sandbox, directory, job, "--", sys.executable, program, *words).finish()
    assert json.loads((directory / "seen").read_text()) == [words, env]


SAVES = """
    import os, pathlib, signal, sys, time
    saved = pathlib.Path("saved")
    step = int(saved.read_text()) if saved.exists() else 0
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    print(f"begins at {step}", flush=True)
    for step in range(step, 100):
        time.sleep(0.1)
        if told:
            if os.environ["RANK"] == "0":
                saved.write_text(str(step + 1))
            sys.exit(CODE)
    print("all done", flush=True)
"""


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_preempted_command_comes_back_whatever_its_exit_code(sandbox: Sandbox, tmp_path: Path, code: int) -> None:
    program = script(tmp_path, SAVES.replace("CODE", str(code)))
    on = ("--nodes", "2", "--nodelist", "n1,n2", "--partition", "low", "--time", "10")
    life = start(sandbox, tmp_path, *on, "--", sys.executable, program)
    wait_for(life.run.attempts / "0" / "rank-0.log", "begins at 0")
    wait_for(life.run.attempts / "0" / "rank-1.log", "begins at 0")
    high = ("--partition=high", "--exclusive", "--nodelist=n1,n2", "--nodes=2", "--output=/dev/null")
    sandbox.submit(*high, "--wrap=sleep 2")
    life.finish(timeout_s=180)
    assert life.attempts == 2
    assert [event["cause"] for event in life.events("requeue")] == ["preemption"]
    (again,) = re.findall(r"begins at (\d+)", (life.run.attempts / "1" / "rank-0.log").read_text())
    assert int(again) > 0
    assert life.result["status"] == "finished"


def test_a_command_that_asks_to_go_on_is_run_again_until_it_does_not(sandbox: Sandbox, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import os, pathlib, sys
        attempt = int(os.environ["HPCDDP_ATTEMPT"])
        pathlib.Path(os.environ["HPCDDP_PROGRESS_FILE"]).touch()
        if attempt == 1:
            pathlib.Path(os.environ["HPCDDP_REQUEUE_FILE"]).touch()
        sys.exit(75 if attempt < 1 or attempt == 2 else 0)
        """,
    )
    life = start(sandbox, tmp_path, "--time", "10", "--", sys.executable, program)
    life.finish(timeout_s=180)
    assert life.attempts == 4
    assert [event["cause"] for event in life.events("requeue")] == ["unknown"] * 3


def test_a_command_that_only_ever_asks_to_go_on_is_ended_by_the_budget(sandbox: Sandbox, tmp_path: Path) -> None:
    life = start(sandbox, tmp_path, "--time", "10", "--", "sh", "-c", "exit 75")
    fields = life.end("FAILED", timeout_s=180)
    assert (fields["ExitCode"], life.attempts) == ("93:0", 2)
    assert "max_attempts_without_progress" in life.result["reason"]


def test_a_failed_command_is_not_run_again_and_names_the_first_rank(sandbox: Sandbox, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import os, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(100):
            dist.all_reduce(torch.ones(1))
            if step == 5 and os.environ["RANK"] == "2":
                raise ValueError("my own mistake")
        """,
    )
    life = start(
        sandbox, tmp_path, "--nodes", "2", "--tasks-per-node", "2", "--time", "10", "--", sys.executable, program
    )
    fields = life.end("FAILED")
    assert (fields["ExitCode"], fields["Restarts"]) == ("70:0", "0")
    assert re.search(r"rank 2 on n\d failed first: ValueError: my own mistake", life.result["reason"])
    assert 'raise ValueError("my own mistake")' in life.run.batch_log.read_text()


def test_a_cancelled_command_stays_cancelled(sandbox: Sandbox, tmp_path: Path) -> None:
    program = script(tmp_path, SAVES.replace("CODE", "75"))
    life = start(sandbox, tmp_path, "--time", "10", "--", sys.executable, program)
    wait_for(life.run.attempts / "0" / "rank-0.log", "begins at 0")
    sandbox.run("scancel", life.job_id)
    life.end("CANCELLED")
    wait_for(life.run.result, "cancelled")
    assert result_of(life.run)["status"] == "cancelled"
    assert (tmp_path / "saved").exists()


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
    life = start(sandbox, tmp_path, "--time", "1", "--", sys.executable, program)
    life.finish(timeout_s=300)
    assert [event["cause"] for event in life.events("requeue")] == ["time_limit"]
    assert life.attempts == 2


FUNCTION = """
import time
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
        time.sleep(0.1 if context.attempt == 0 else 0)
        if context.stopper.should_stop():
            checkpointer.save(step + 1)
            checkpointer.wait()
            context.stopper.exit()
    return {"first": first, "hosts": context.rank_env.hosts, "world": dist.get_world_size()}
"""


def test_a_preempted_function_comes_back_and_computes_every_step_once(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    job = tmp_path / "job.yaml"
    resources = {"nodes": 2, "tasks_per_node": 2, "time_limit": 10, "nodelist": "n1,n2", "partition": "low"}
    job.write_text(json.dumps({"name": "fn", "resources": resources, "entrypoint": "mine:main"}))
    life = start(sandbox, tmp_path, job)
    wait_for(life.run.metrics, '"step"')
    high = ("--partition=high", "--exclusive", "--nodelist=n1,n2", "--nodes=2", "--output=/dev/null")
    sandbox.submit(*high, "--wrap=sleep 2")
    life.finish(timeout_s=240)
    returned = life.result["returned"]
    assert (returned["hosts"], returned["world"]) == (["n1", "n2"], 4)
    assert 0 < returned["first"] < 80
    steps = [json.loads(line)["step"] for line in life.run.metrics.read_text().splitlines()]
    assert steps == list(range(1, 81))
    assert [event["cause"] for event in life.events("requeue")] == ["preemption"]
