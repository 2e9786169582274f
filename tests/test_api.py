"""The Python interface: a script submits a job, waits for it and reads what came of it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import hpcddp
from hpcddp import api
from hpcddp.errors import UserError
from hpcddp.jobfile.problems import JobFileError
from hpcddp.run.find import NoRunError
from hpcddp.run.index import add_to_index
from tests.manage.runs import make
from tests.messages import GoldenMessages

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
        api.submit("job.yaml", cluster="pbs")  # type: ignore[arg-type]
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
    with pytest.raises(UserError, match="call it in a loop"):
        api.submit("job.yaml", sweep={"train.seed": [0, 1]})
    assert api.runs() == []


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
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert names["state"] == "finished"


def test_the_page_names_every_member() -> None:
    page = PAGE.read_text()
    members = [name for name in vars(api.Run) if not name.startswith("_")]
    assert not [name for name in members if f"run.{name}" not in page and f"Run.{name}" not in page]
