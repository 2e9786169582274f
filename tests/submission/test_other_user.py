"""What another user of the machine can make of a run: two real user ids and a root that both share."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcddp.run.directory import RunDirectory
from hpcddp.run.job_file import write_exported_values
from hpcddp.run.job_records import SubmissionRecord, write_submission_record
from tests.messages import GoldenMessages
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")

STRANGER, USER = 12341, 12342
_DAC_READ_SEARCH = 2  # capabilities(7)


def _as_user() -> tuple[str, ...]:
    """Return the words in front of a command of ``USER``, who may look into root's home for the interpreter."""
    words = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    status = Path("/proc/self/status").read_text().partition("CapBnd:")[2].split()
    if not int(status[0], 16) >> _DAC_READ_SEARCH & 1:
        return words
    return (*words, "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")


AS_USER = _as_user()
JOB = """
name: demo
resources: {tasks_per_node: 1}
command: ["true"]
"""


@dataclass(frozen=True)
class Shared:
    """A directory that every user may write to, as /tmp.

    Attributes:
        path: the directory, which is also where runs live.
        home: the home directory of ``USER``.
    """

    path: Path
    home: Path

    @property
    def marker(self) -> Path:
        """What the stranger's script makes where it runs."""
        return self.home / "it-ran"

    def hpcddp(self, *words: str | Path, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run hpcddp as ``USER``."""
        return subprocess.run(
            [*AS_USER, sys.executable, "-B", "-m", "hpcddp", *map(str, words)],
            cwd=directory or self.home,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def give(self, path: Path, owner: int) -> None:
        """Give a directory and all that is in it to somebody."""
        for one in (path, *path.rglob("*")):
            os.chown(one, owner, owner, follow_symlinks=False)

    def ended_run(self, owner: int, *, under: Path | None = None, job_id: str = "999999") -> Path:
        """Make a run that has ended; its script and its command leave a mark where they run."""
        run = (under or self.path) / "demo" / "r1"
        run.mkdir(parents=True, mode=0o755)
        record = SubmissionRecord(
            cluster="local",
            job_id=job_id,
            directory=str(self.home),
            python=sys.executable,
            time=0.0,
            host=socket.gethostname(),
            run_dir=str(run),
        )
        write_submission_record(RunDirectory(run), record)
        write_exported_values(RunDirectory(run), {})
        (run / "job.yaml").write_text(JOB.replace('"true"', f'touch, "{self.marker}"'))
        (run / "job.sbatch").write_text(f"#!/bin/bash\ntouch {self.marker}\n")
        (run / "submitit").mkdir()
        self.give(run.parent, owner)
        return run

    def refused(self, *words: str | Path, directory: Path | None = None) -> str:
        """Run hpcddp as ``USER``, who is refused, and return the sentence."""
        done = self.hpcddp(*words, directory=directory)
        assert not self.marker.exists()
        assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
        return done.stderr


@pytest.fixture
def shared() -> Iterator[Shared]:
    # Not below pytest's own directory, which is root's alone.
    path = Path(tempfile.mkdtemp(prefix="hpcddp-"))
    path.chmod(0o1777)
    home = path / "home"
    home.mkdir(mode=0o700)
    os.chown(home, USER, USER)
    yield Shared(path, home)
    shutil.rmtree(path)


@pytest.mark.parametrize("command", [("submit", "--resume"), ("cancel",), ("requeue",)], ids=lambda words: words[0])
def test_a_run_that_somebody_else_made_in_a_shared_root_is_not_acted_on(
    command: tuple[str, ...], shared: Shared, golden: GoldenMessages
) -> None:
    victim = subprocess.Popen([*AS_USER, "sleep", "300"])
    try:
        run = shared.ended_run(STRANGER, job_id=str(victim.pid) if command == ("cancel",) else "999999")
        if command != ("cancel",):
            # As its maker would, so that nothing else is in the way.
            for path in (run, run / "submitit"):
                path.chmod(0o777)
        message = shared.refused(*command, "r1", "--run-root", shared.path)
        assert f" {run} belongs to user {STRANGER}, " in golden.message(message, {str(shared.path): "SHARED"})
        assert "; choose another run_root, " in message
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_a_run_of_somebody_else_is_not_previewed_with_ones_own_job(shared: Shared) -> None:
    shared.ended_run(STRANGER)
    (shared.home / "job.yaml").write_text(JOB)
    words = ("job.yaml", "--resume", "r1", "--run-root", shared.path, "--dry-run")
    assert f"belongs to user {STRANGER}, not to you" in shared.refused("submit", *words)


@pytest.mark.parametrize("command", ["status", "why"])
def test_the_runs_of_others_can_be_looked_at(command: str, shared: Shared) -> None:
    shared.ended_run(STRANGER)
    done = shared.hpcddp(command, "r1", "--run-root", shared.path)
    assert done.returncode == 0, done.stderr


def test_an_own_run_that_others_can_write_to_is_not_acted_on_nor_what_they_left_in_it(
    shared: Shared, golden: GoldenMessages
) -> None:
    run = shared.ended_run(USER)
    run.chmod(0o777)
    os.chown(run / "job.sbatch", STRANGER, STRANGER)
    for command in (("submit", "--resume"), ("cancel",), ("requeue",)):
        message = golden.message(shared.refused(*command, run), {str(shared.path): "SHARED"})
        assert "can be written by others; " in message
        assert message.endswith(f" run: chmod go-w {run}\n")
    run.chmod(0o700)
    message = golden.message(shared.refused("submit", "--resume", run), {str(shared.path): "SHARED"})
    assert f" {run}/job.sbatch belongs to user {STRANGER}, not to you; " in message


def test_a_run_under_a_directory_of_another_ordinary_user_is_not_acted_on(
    shared: Shared, golden: GoldenMessages
) -> None:
    theirs = shared.path / "theirs"
    run = shared.ended_run(USER, under=theirs)
    os.chown(theirs, STRANGER, STRANGER)
    message = golden.message(shared.refused("submit", "--resume", run), {str(shared.path): "SHARED"})
    assert f" {theirs}, above the run directory, " in message
    assert f" user {STRANGER}, " in message
    assert message.endswith("; choose another run_root\n")
    # Neither by a link that its user has made.
    (shared.home / "link").symlink_to(run)
    assert shared.refused("submit", "--resume", "link") == message


def test_an_own_run_in_a_shared_root_goes_on(shared: Shared) -> None:
    run = shared.ended_run(USER)
    done = shared.hpcddp("submit", "--resume", "r1", "--run-root", shared.path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["run_dir"] == str(run)
    # The job writes into the directory of the fixture.
    wait_until(lambda: not Path(f"/proc/{answer['job_id']}").exists(), "the end of the job")


def test_a_link_that_somebody_has_put_into_a_run_is_not_followed(shared: Shared) -> None:
    run = shared.ended_run(USER)
    precious = shared.home / "precious"
    precious.write_text("mine")
    shared.give(precious, USER)
    for name in ("events.jsonl", "result.json"):
        (run / name).symlink_to(precious)
        os.chown(run / name, STRANGER, STRANGER, follow_symlinks=False)
        assert f"{run}/{name} belongs to user {STRANGER}, not to you" in shared.refused("submit", "--resume", run)
        (run / name).unlink()
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    ("owner", "mode", "problem", "advice"),
    [
        (STRANGER, 0o644, "belongs to another user", "make it your own"),
        (USER, 0o664, "can be written by others", "run: chmod go-w {file}\n"),
        (USER, 0o646, "can be written by others", "run: chmod go-w {file}\n"),
    ],
)
def test_a_project_file_that_others_could_write_is_not_obeyed(
    owner: int, mode: int, problem: str, advice: str, shared: Shared, golden: GoldenMessages
) -> None:
    file = shared.path / "hpcddp.yaml"
    file.write_text(f"environment: {{setup: [touch {shared.marker}]}}\n")
    file.chmod(mode)
    os.chown(file, owner, owner)
    (shared.home / "job.yaml").write_text(JOB)
    words = ("submit", shared.home / "job.yaml", "--cluster", "local", "--set", f"run_root={shared.home}/runs")
    message = shared.refused(*words, "--follow", directory=shared.path)
    assert golden.message(message, {str(shared.path): "SHARED"}).startswith(f"hpcddp: {file}: {problem}")
    assert advice.format(file=file) in message
