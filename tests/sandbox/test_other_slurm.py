"""A sandbox with another Slurm, used as a newcomer uses it; needs a root that scripts/slurm-root has made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from tests.cluster.jobs import HPCDDP, result_of, write_job
from tests.sandbox.leftovers import leftovers
from tests.sandbox.places import Place
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.depends_on("hpcddp/sandbox", "scripts/slurm-root", "tests/sandbox")]

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcddp" / "slurm-roots"


class Shell:
    """A shell in which the lines that ``hpcddp sandbox up`` printed were evaluated."""

    def __init__(self, exports: str, directory: Path) -> None:
        self._exports, self._directory = exports, directory

    def start(self, line: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ("sh", "-c", f"{self._exports}{line}"),
            cwd=self._directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, line: str, *, typed: str = "") -> subprocess.CompletedProcess[str]:
        process = self.start(line)
        output, errors = process.communicate(typed, timeout=300)
        return subprocess.CompletedProcess(line, process.returncode, output, errors)

    def output(self, line: str) -> str:
        done = self.call(line)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(
    params=["24.11", pytest.param("testing", marks=pytest.mark.long("test_each_slurm.py starts one with it too"))]
)
def root(request: pytest.FixtureRequest) -> Path:
    path = CACHE / str(request.param)
    if not (path / "slurm-version").exists():
        pytest.skip(f"there is no root in {path}; scripts/slurm-root {request.param} makes one")
    interpreter = Path(sys.executable).resolve()
    is_the_systems = Path(sys.base_prefix).resolve() == Path("/usr")
    if is_the_systems and not (path / interpreter.relative_to("/")).exists():
        pytest.skip(f"the Python of this environment is the system's {interpreter.name}, which the root does not have")
    return path


@pytest.fixture
def place(new_place: Callable[..., Place], root: Path) -> Iterator[Place]:
    place = new_place()
    before = listing(root)
    sandbox = place.up("--slurm", str(root))
    yield place
    place.down()
    assert leftovers(sandbox) == []
    assert listing(root) == before


@pytest.fixture
def shell(place: Place, tmp_path: Path) -> Shell:
    exports = "".join(line for line in place.call("status").stdout.splitlines(keepends=True) if "export" in line)
    return Shell(exports, tmp_path)


def listing(root: Path) -> list[tuple[str, float]]:
    """Return the directories of a root to a depth at which something could be left, with their times."""
    paths = [root, *root.glob("*"), *root.glob("*/*")]
    return sorted((str(path), path.lstat().st_mtime) for path in paths)


def test_slurms_commands_are_those_of_the_root_and_behave_as_if_they_were_this_machines(
    shell: Shell, place: Place, root: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    version = (root / "slurm-version").read_text().strip()
    with subtests.test("they have the version of the root"):
        assert shell.output("sinfo --version").split()[-1] == version
    with subtests.test("the nodes are up"):
        assert shell.output("sinfo --noheader --partition=low --format=%T") == "idle\n"
        assert json.loads(place.call("status", "--json").stdout)["state"] == "up"
    with subtests.test("directory, environment, input and exit code pass through"):
        done = shell.call("MINE='a  b' srun --nodes=1 sh -c 'pwd; echo \"$MINE\"; cat; exit 7'", typed="typed\n")
        assert (done.returncode, done.stdout) == (7, f"{tmp_path}\na  b\ntyped\n")
    with subtests.test("the process is the command itself, which a signal reaches"):
        process = shell.start("exec srun --nodes=2 sleep 600")
        comm = Path(f"/proc/{process.pid}/comm")
        try:
            wait_until(lambda: shell.output("squeue --noheader --states=running") != "", "a running step")
            assert comm.read_text() == "srun\n"
            process.terminate()
        except BaseException:
            process.kill()
            raise
        process.communicate(timeout=60)
        assert process.returncode != 0
    with subtests.test("a job's script has the commands themselves, and runs in the root"):
        script = (
            "command -v srun; readlink $(command -v srun); srun hostname; . /etc/os-release; echo $VERSION_CODENAME"
        )
        shell.output(f"sbatch --wait --nodelist=n2 --output=log --wrap='{script}'")
        assert (tmp_path / "log").read_text().splitlines() == [
            f"{place.directory}/bin/srun", "/usr/bin/srun", "n2", codename(root),
        ]  # fmt: skip
    with subtests.test("a job can be cancelled"):
        job = shell.output("sbatch --parsable --output=/dev/null --wrap='sleep 600'").strip()
        shell.output(f"scancel {job}")
        wait_until(lambda: shell.output(f"squeue --noheader --jobs={job}") == "", "the end of the job")


def test_a_job_of_hpcddp_trains_in_it_and_the_system_is_the_roots(shell: Shell, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "cluster" / "traced_model.py", tmp_path)
    job = write_job(tmp_path, model="traced_model:build")
    document = json.loads(shell.output(f"{' '.join(HPCDDP)} submit {job} --cluster slurm --follow --json"))
    assert document["status"] == "finished"
    run = RunDirectory(Path(document["run_dir"]))
    assert result_of(run)["status"] == "finished"
    ranks = json.loads((run.attempt(0).path / "ranks.json").read_text())["ranks"]
    assert [rank["host"] for rank in ranks] == ["n1", "n2"]


def test_the_commands_of_a_sandbox_that_has_stopped_say_so(shell: Shell, place: Place) -> None:
    manager = json.loads((place.directory / "daemon-manager.json").read_text())["pid"]
    os.kill(manager, 9)
    wait_until(lambda: place.state() == "stopped", "the end of the sandbox")
    done = shell.call("sinfo")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"sinfo: the sandbox in {place.directory} has stopped; hpcddp sandbox down removes what it left\n"
    )


def test_up_prints_both_lines_and_json_names_the_directory(new_place: Callable[..., Place], root: Path) -> None:
    place = new_place()
    done = place.call("up", "--nodes", "1", "--slurm", str(root))
    assert done.stdout == (
        f'export SLURM_CONF={place.directory}/slurm.conf\nexport PATH={place.directory}/bin:"$PATH"\n'
    )
    assert json.loads(place.call("status", "--json").stdout)["bin"] == f"{place.directory}/bin"


def test_a_root_that_is_no_root_leaves_nothing(new_place: Callable[..., Place], tmp_path: Path) -> None:
    place = new_place()
    done = place.call("up", "--slurm", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hpcddp: --slurm is {tmp_path}, which has no directory /etc; give the root")
    assert done.stderr.count("\n") == 1
    assert not place.directory.exists()


def codename(root: Path) -> str:
    lines = (root / "etc" / "os-release").read_text().splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith("VERSION_CODENAME="))
