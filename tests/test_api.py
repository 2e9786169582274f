"""The Python interface: a script submits a job, waits for it and reads what came of it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import hpcddp
from hpcddp import api
from hpcddp.errors import UserError
from hpcddp.jobfile.problems import JobFileError
from hpcddp.manage.follow import ProgressLines
from hpcddp.run.find import NoRunError, add_to_index
from hpcddp.run.sweep import Sweep as SubmittedSweep
from hpcddp.run.sweep import write_sweep
from tests.manage.runs import make, queued
from tests.messages import GoldenMessages
from tests.submission.fake_sbatch import make_fake_slurm

JOB = "name: demo\nbatch: {global_batch_size: 8}\ntrain: {model: resnet18, dataset: digits, epochs: 2}\n"
PAGE = Path(__file__).parents[1] / "docs" / "python.md"
PROGRAM = "import sys\nprint('hello', *sys.argv[1:], flush=True)\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_a_program_is_submitted_waited_for_and_read(golden: GoldenMessages) -> None:
    command = [sys.executable, "program.py", "a b", "{c}"]
    run = api.submit(command=command, cluster="local", resources={"tasks_per_node": 2})
    assert run.wait(timeout=120) == "finished"
    assert (run.name, run.state) == ("program", "finished")
    assert run.logs(1).splitlines()[-1] == "hello a b {c}"
    result = run.result()
    assert result is not None
    assert (result.status, result.world_size) == ("finished", 2)
    assert run.metrics() == []
    assert api.runs() == [run]
    assert api.Run.find(run.run_id[-4:]) == run
    assert "has ended already (finished)" in run.cancel()
    with pytest.raises(UserError, match="has finished"):
        run.resume()
    with pytest.raises(UserError, match="has finished; there is nothing left") as caught:
        run.requeue()
    golden.message(caught.value, {run.run_id: "ID"})


def test_a_run_is_cancelled_and_resumed(here: Path, monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages) -> None:
    (here / "program.py").write_text(
        "import pathlib, time\nflag = pathlib.Path('go')\nprint('started', flush=True)\n"
        "while not flag.exists():\n    time.sleep(0.05)\n"
    )
    run = api.submit(command=[sys.executable, "program.py"], cluster="local")
    with pytest.raises(TimeoutError, match=r"has not ended after 0\.2 s;") as caught:
        run.wait(timeout=0.2)
    golden.message(caught.value, {run.run_id: "ID"})
    assert run.cancel().startswith(f"run {run.run_id} was signalled")
    assert run.wait(timeout=120) in {"cancelled", "stopped", "failed"}
    (here / "go").touch()
    # Its program is looked for where it was submitted from.
    monkeypatch.chdir("/")
    assert run.resume() == run
    assert run.wait(timeout=120) == "finished"


def test_a_run_is_resumed_with_changes(golden: GoldenMessages) -> None:
    run = api.submit(command=[sys.executable, "program.py", "1"], cluster="local")
    run.wait(timeout=120)
    run.resume(command=[sys.executable, "program.py", "2"], resources={"time_limit": "5min"}).wait(timeout=120)
    assert run.logs(attempt=1).splitlines()[-1] == "hello 2"
    assert "#SBATCH --time=00:05:00" in (run.path / "job.sbatch").read_text()
    with pytest.raises(UserError, match="entrypoint") as caught:
        run.resume(entrypoint="a:b")
    assert isinstance(caught.value.hint, str | None)
    with pytest.raises(JobFileError, match=r"argument resources\.nods: .*did you mean") as wrong:
        run.resume(resources={"nods": 2})
    golden.message(wrong.value, {run.run_id: "ID"})


def test_fields_of_the_job_are_changed_by_key_path_or_by_section(here: Path) -> None:
    more: dict[str, Any] = {"train.epochs": 5}
    script = api.render(Path("job.yaml"), resources={"nodes": 3, "time_limit": "2h"}, **more)
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --time=02:00:00\n" in script
    assert "epochs: 5" in script
    values = {"name": "demo", "batch": {"global_batch_size": 8}, "train": {"model": "resnet18", "dataset": "digits"}}
    assert "#SBATCH --job-name=demo\n" in api.render(values, run_root=here / "elsewhere")
    assert api.plan("job.yaml", samples=80).as_json()["steps_per_epoch"] == 10
    assert api.plan("job.yaml", samples=80, batch={"global_batch_size": 16}).as_json()["steps_per_epoch"] == 5


def test_what_is_wrong_is_named_by_its_argument(golden: GoldenMessages) -> None:
    with pytest.raises(JobFileError, match=r"argument train.epoch: .* did you mean"):
        api.submit("job.yaml", cluster="local", train={"epoch": 3})
    with pytest.raises(JobFileError, match=r"argument train.epochs: .*'x'"):
        api.render("job.yaml", train={"epochs": "x"})
    with pytest.raises(JobFileError, match="the job: "):
        api.render({"name": "demo", "train": {"model": "resnet18"}})
    with pytest.raises(UserError, match=r"^cluster is 'pbs', .*; write auto, slurm, local or") as caught:
        api.submit("job.yaml", cluster="pbs")  # type: ignore[call-overload]
    golden.message(caught.value)
    for call in (api.submit, api.render):
        with pytest.raises(UserError, match=r"; write a list .*: command=\['python', 'program.py'\]$") as caught:
            call(command="python program.py")
        golden.message(caught.value)
    with pytest.raises(UserError, match=r"^command holds 0\.1, .*; write '0\.1'$") as caught:
        api.render(command=["python", Path("program.py"), 0.1])  # type: ignore[list-item]
    golden.message(caught.value)
    assert "command: [python, program.py]" in api.render(command=["python", Path("program.py")])
    assert not Path("runs").exists()
    with pytest.raises(hpcddp.HpcddpError, match="no job is given"):
        api.submit()
    assert api.runs() == []


def test_a_sweep_is_submitted_waited_for_and_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "program.py").write_text("import sys\nprint('rate', sys.argv[1])\nsys.exit(sys.argv[1] == '0.2')\n")
    command = [sys.executable, "program.py", "{lr}"]
    sweep = api.submit(command=command, cluster="local", sweep={"lr": [0.1, 0.2]}, max_parallel=2)
    assert isinstance(sweep, hpcddp.Sweep)
    assert sweep.wait(timeout=120, progress=True) == ["finished", "failed"] == sweep.states
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1] == f"sweep {sweep.sweep_id}: 1 finished, 1 failed"
    assert len(set(shown)) == len(shown)
    assert sweep.values == [{"lr": 0.1}, {"lr": 0.2}]
    assert [run.run_id for run in sweep.runs] == [f"{sweep.sweep_id}_{index}" for index in range(2)]
    assert sweep.runs[0].logs().splitlines()[-1] == "rate 0.1"
    results = sweep.results()
    assert [None if result is None else result.status for result in results] == ["finished", "failed"]
    assert api.Sweep.find(sweep.sweep_id) == api.Sweep(str(sweep.path)) == sweep
    assert repr(sweep) == f"<Sweep {sweep.sweep_id} (program, 2 runs, 1 failed, 1 finished)>"
    assert "has ended already (1 finished, 1 failed)" in sweep.cancel()
    (here / "program.py").write_text("print('again')\n")
    # Its runs have left this machine, so that the one that failed can start again at once.
    assert sweep.resume() == sweep
    assert sweep.wait(timeout=120) == ["finished"] * 2
    with pytest.raises(UserError, match="has no run to resume: 2 finished, 0 alive"):
        sweep.resume()


def test_the_sweep_of_a_job_file_is_submitted_too(here: Path) -> None:
    command = f'[{sys.executable}, program.py, "{{a}}"]'
    (here / "job.yaml").write_text(f"name: demo\ncommand: {command}\nsweep: {{a: 1..2}}\n")
    sweep = cast("api.Sweep", api.submit("job.yaml", cluster="local"))
    assert len(sweep.runs) == 2
    with pytest.raises(TimeoutError, match=r"^sweep \S+ has not ended after 0 s \(.*\); it goes on$"):
        sweep.wait(timeout=0)
    assert sweep.wait(timeout=120) == ["finished", "finished"]
    with pytest.raises(NoRunError, match=r"no directory of a sweep"):
        api.Sweep(sweep.runs[0].path)


def test_a_sweep_on_slurm_is_one_job_array(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = make_fake_slurm(here / "slurm")
    (here / "slurm.conf").touch()
    for name, value in slurm.environment(SLURM_CONF=str(here / "slurm.conf")).items():
        monkeypatch.setenv(name, value)
    waiting = [queued(f"101_{index}", "PENDING") for index in range(3)]
    monkeypatch.setattr("hpcddp.slurm.commands.queue", lambda _: waiting)
    sweep = api.submit(command=[sys.executable, "program.py", "{a}"], cluster="slurm", sweep={"a": "1..3"})
    assert "#SBATCH --array=0-2" in (sweep.path / "job.sbatch").read_text()
    assert len(slurm.calls) == 1
    assert sweep.states == ["pending"] * 3
    assert [run.path.exists() for run in sweep.runs] == [False] * 3
    assert [run.state for run in sweep.runs] == ["pending"] * 3
    assert sweep.cancel().startswith(f"3 elements of sweep {sweep.sweep_id} are being cancelled")
    assert slurm.cancelled == ["101_[0-2]"]
    waiting.clear()
    assert sweep.wait() == ["cancelled"] * 3


def test_a_run_of_a_sweep_that_waits_has_no_directory(here: Path) -> None:
    path = here / "runs" / "demo" / "20261121-101500-3fa2"
    path.mkdir(parents=True)
    (path / "job.yaml").touch()
    write_sweep(SubmittedSweep(sweep_id=path.name, path=path, elements=({"a": 1}, {"a": 2}), chunks=()))
    sweep = api.Sweep(path)
    assert sweep.results() == [None, None]
    assert (len(sweep), list(sweep)) == (2, sweep.runs)
    run = api.Run(path.with_name(f"{path.name}_1"))
    assert (run.result(), run.metrics(), run.state) == (None, [], "unknown")
    assert sweep.runs == [api.Run.find(f"{path.name}_0"), run]
    assert repr(run) == f"<Run {path.name}_1 (demo, no directory)>"
    (path / "sweep.json").write_text("{")
    assert repr(sweep) == f"<Sweep {path.name} (demo, its records cannot be read)>"


def test_a_run_shows_its_state_from_its_records(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcddp.slurm.commands.queue", lambda _: pytest.fail("Slurm was asked"))
    made = make(here / "runs", "one", name="demo").submitted("1")
    run = api.Run(made.run.path)
    assert repr(run) == "<Run one (demo, submitted)>"
    made.started("1")
    assert repr(run) == "<Run one (demo, attempt 0)>"
    made.ended("finished")
    assert repr(run) == "<Run one (demo, finished)>"
    made.run.result.write_bytes(b"\xff{")
    assert repr(run) == "<Run one (demo, its records cannot be read)>"
    shutil.rmtree(run.path)
    assert repr(run) == "<Run one (demo, no directory)>"


def test_the_progress_is_shown_once_for_each_state(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = (
        make(here / "runs", "one", name="demo")
        .submitted("1")
        .started("1", is_local=True)
        .steps(1, 4)
        .ended("finished", steps=4)
    )
    assert api.Run(made.run.path).wait(progress=True) == "finished"
    assert capsys.readouterr().err == "run one: finished, step 4/400\n"


def test_the_steps_of_a_state_are_shown_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("hpcddp.manage.follow.time.monotonic", lambda: now)
    lines = ProgressLines("run one")
    for moment, state, steps in (
        (0, "running", "step 1"),
        (1, "running", "step 2"),
        (61, "running", "step 3"),
        (200, "running", "step 3"),
        (201, "stopping", "step 3"),
        (202, "\x1b[2Jfinished", ""),
    ):
        now = float(moment)
        lines.show(state, steps)
    assert capsys.readouterr().err.splitlines() == [
        "run one: running, step 1",
        "run one: running, step 3",
        "run one: stopping, step 3",
        "run one: \\x1b[2Jfinished",
    ]


def test_runs_are_found_as_the_command_line_finds_them(here: Path) -> None:
    made = make(here / "far", "20261121-101500-3fa2").submitted().ended("finished", steps=4).steps(1, 4)
    add_to_index(made.run)
    with pytest.raises(NoRunError):
        api.Run.find("3fa3")
    run = api.Run.find("3fa2")
    assert run.path == made.run.path
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
    assert run.status.as_json()["state"] == "finished"
    assert (api.runs(), api.runs(everywhere=True), api.runs(here / "far")) == ([], [run], [run])


def test_a_run_directory_is_a_text_or_a_path(here: Path, golden: GoldenMessages) -> None:
    made = make(here / "runs", "one", name="demo").submitted("1", cluster="local").started("1").ended("finished")
    run = api.Run(str(made.run.path))
    assert run == api.Run(made.run.path) == api.Run(path=made.run.path)
    with pytest.raises(NoRunError, match=r"nowhere is no run directory; give") as caught:
        api.Run(here / "nowhere")
    golden.message(caught.value)
    assert (run.run_id, run.name, run.state) == ("one", "demo", "finished")


def test_the_examples_of_the_page_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "train.py").write_text(PROGRAM)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    # No Slurm is found without a configuration.
    monkeypatch.delenv("SLURM_CONF", raising=False)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert names["state"] == "finished"


@pytest.mark.parametrize("kind", [api.Run, api.Sweep], ids=lambda kind: kind.__name__)
def test_the_page_names_every_member(kind: type) -> None:
    page = PAGE.read_text()
    members = [name for name in vars(kind) if not name.startswith("_")]
    name = kind.__name__
    assert not [
        member for member in members if f"{name.lower()}.{member}" not in page and f"{name}.{member}" not in page
    ]
