"""The command line starts fast: slow libraries are imported by whoever needs them, when they are needed."""

import json
from pathlib import Path

import pytest

from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from tests.cli.slow_libraries import SLOW, UNINSTALL, run_python
from tests.manage.runs import make

JOBS = Path(__file__).parents[2] / "jobs"


def test_importing_the_command_line_loads_nothing_slow() -> None:
    done = run_python("import sys, hpcddp.cli; print(*sorted({name.partition('.')[0] for name in sys.modules}))")
    assert SLOW & set(done.stdout.split()) == set()


# Calls each command with its words, in one process, and stops at the first that fails.
CALL = (
    "import json, sys\n"
    "from hpcddp.cli import boundary\n"
    "from hpcddp.cli.main import app\n"
    "for words in json.loads(sys.argv[1]):\n"
    "    assert boundary.run(app, words) == 0, words\n"
)


def test_commands_that_only_look_work_where_the_slow_libraries_are_not_installed() -> None:
    calls = [
        ["--help"],
        *([command, "--help"] for command in ("submit", "checkpoints", "rehearse", "logs", "why", "report", "shell")),
        *([command, "--help"] for command in ("stacks", "cancel", "requeue", "check")),
        ["status"],
        ["render", str(JOBS / "resnet50_imagenet.yaml"), "--json"],
        ["plan", str(JOBS / "quickstart.yaml")],
        ["schema"],
    ]
    done = run_python(UNINSTALL.format(names=SLOW - {"asyncio"}) + CALL, json.dumps(calls))
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("Usage", "#SBATCH", "rank", '"$schema"', "no run"):
        assert word in done.stdout


def test_commands_that_only_look_load_nothing_slow() -> None:
    calls = [[command, str(JOBS / "quickstart.yaml")] for command in ("render", "plan", "check")]
    loaded = "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    done = run_python(CALL + loaded, json.dumps([*calls, ["schema"], ["status"]]))
    assert done.returncode == 0, done.stderr
    assert SLOW & set(done.stderr.split()) == set()


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_the_list_of_commands_loads_no_models_and_builds_no_command(words: list[str]) -> None:
    run = (
        "import atexit, sys, typer.main\n"
        "build, built = typer.main.get_command_from_info, []\n"
        "typer.main.get_command_from_info = lambda info, **more: built.append(info.callback) or build(info, **more)\n"
        "atexit.register(lambda: print(built, 'pydantic' in sys.modules, file=sys.stderr))\n"
        "from hpcddp.__main__ import main; main()"
    )
    done = run_python(run, *words)
    assert (done.returncode, done.stderr) == (0, "[] False\n")


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        (["--help"], {"secrets", "hashlib", "hpcddp.sandbox.network", "hpcddp.slurm.controller"}),
        (["status", "--run-root", "."], {"hpcddp.jobfile.job", "hpcddp.run.job_file"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_loads_no_module_that_it_does_not_need(words: list[str], unneeded: set[str]) -> None:
    run = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(*sorted({unneeded!r} & set(sys.modules)), file=sys.stderr))\n"
        "from hpcddp.__main__ import main; main()"
    )
    done = run_python(run, *words)
    assert (done.returncode, done.stderr.split()) == (0, [])


def test_the_elements_of_a_sweep_are_shown_without_the_models_of_the_job_file(tmp_path: Path) -> None:
    made = make(tmp_path, "rates").submitted("12")
    chunks = (Chunk(job_id="12", first=0, count=2),)
    elements = ({"learning_rate.base": 0.1}, {"learning_rate.base": 0.2})
    write_sweep(Sweep(sweep_id="rates", path=made.run.path, elements=elements, chunks=chunks))
    run = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('hpcddp.jobfile.job' in sys.modules, file=sys.stderr))\n"
        "from hpcddp.__main__ import main; main()"
    )
    done = run_python(run, "status", "rates", "--run-root", str(tmp_path))
    assert "base=0.2" in done.stdout
    assert done.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize("batch", [(), ("--global-batch-size", "8")], ids=["no batch", "batch"])
def test_rendering_a_script_loads_neither_a_reader_of_scripts_nor_a_planner_without_a_batch(
    batch: tuple[str, ...],
) -> None:
    run = (
        "import sys\n"
        "from hpcddp.cli import boundary\n"
        "from hpcddp.cli.main import app\n"
        "boundary.run(app, sys.argv[1:])\n"
        "found = {'hpcddp.batch.job', 'hpcddp.script.parse', 'hpcddp.task', 'rich'} & set(sys.modules)\n"
        "print(*sorted(found), file=sys.stderr)"
    )
    done = run_python(run, "render", *batch, "--set", "environment.python=/usr/bin/python3", "--", "a")
    assert (done.returncode, done.stderr.split()) == (0, ["hpcddp.batch.job"] if batch else [])
    assert "#SBATCH" in done.stdout
