"""Sandboxes come and go, whatever happens to them meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcddp.processes import Process
from hpcddp.sandbox import cleanup, state
from hpcddp.sandbox.state import Sandbox
from tests.messages import GoldenMessages
from tests.sandbox.leftovers import leftovers
from tests.sandbox.places import AS_ORDINARY_USER, ORDINARY_USER, Place
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.depends_on("hpcddp/sandbox", "hpcddp/processes.py", "tests/sandbox")]


@pytest.fixture
def place(new_place: Callable[..., Place]) -> Place:
    return new_place()


def keep_busy(place: Place, directory: Path) -> None:
    """Start a job with a step, and with a process that leaves its parent, its session and its environment."""
    mark = directory / "busy"
    place.slurm(
        "sbatch",
        "--nodes=2",
        "--output=/dev/null",
        f"--wrap=srun sleep 600 & (setsid env -i sleep 600 &); touch {mark}; sleep 600",
    )
    wait_until(mark.exists, f"{mark}")


def daemon(sandbox: Sandbox, program: str) -> Process:
    """Return a process that the manager started, by its program; slurmctld has a child of the same name."""
    manager = state.find_manager(sandbox)
    assert manager is not None
    return next(
        process
        for process in cleanup.members(sandbox.token, sandbox.slurm_conf)
        if Path(f"/proc/{process.pid}/exe").resolve().name.startswith(program) and process.parent == manager.pid
    )


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that jobs of any user can write to; pytest's own are root's."""
    path = Path(tempfile.mkdtemp(prefix="hpcddp-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    "hosts", ["namespaces", pytest.param("shared", marks=pytest.mark.long("the processes are found in the same way"))]
)
def test_nothing_is_left_of_a_sandbox_that_was_ended_with_jobs_in_it(
    place: Place, open_directory: Path, hosts: str
) -> None:
    sandbox = place.up("--hosts", hosts)
    keep_busy(place, open_directory)
    place.down()
    assert leftovers(sandbox) == []


def test_an_ordinary_user_has_a_sandbox_on_this_host_with_gpus(
    new_place: Callable[..., Place], open_directory: Path
) -> None:
    place = new_place(prefix=AS_ORDINARY_USER)
    sandbox = place.up()
    assert sandbox.isolated is False
    shown = place.slurm("srun", "--nodes=2", "--gres=gpu:2", "sh", "-c", "echo $(id -u) $CUDA_VISIBLE_DEVICES")
    assert shown.splitlines() == [f"{ORDINARY_USER} 0,1"] * 2
    keep_busy(place, open_directory)
    place.down()
    assert leftovers(sandbox) == []


def test_two_sandboxes_stand_side_by_side_and_one_ends_alone(new_place: Callable[..., Place]) -> None:
    first, second = new_place(), new_place()
    ups = [subprocess.Popen(one.command("up", "--nodes", "2"), stdout=subprocess.DEVNULL) for one in (first, second)]
    assert [one.wait(120) for one in ups] == [0, 0]
    ended, stays = first.known(), second.known()
    first.down()
    assert leftovers(ended) == []
    assert second.state() == "up"
    assert sorted(second.slurm("srun", "--nodes=2", "hostname").split()) == ["n1", "n2"]
    second.down()
    assert leftovers(stays) == []


def test_a_second_up_in_the_same_place_is_refused_with_the_way_out(place: Place, golden: GoldenMessages) -> None:
    place.up()
    done = place.call("up")
    assert (done.returncode, done.stdout) == (2, "")
    message = golden.message(done.stderr, {str(place.directory): "PLACE"})
    assert f"a sandbox is up already in {place.directory};" in message
    assert "hpcddp sandbox status shows it, hpcddp sandbox down ends it" in message
    assert "--dir DIRECTORY" in message
    assert place.state() == "up"


def test_a_second_down_says_that_there_is_none(place: Place) -> None:
    place.up()
    place.down()
    done = place.call("down")
    assert (done.returncode, done.stdout) == (0, f"there is no sandbox in {place.directory}\n")
    assert place.state() == "none"


@pytest.mark.parametrize(
    ("file", "hosts"),
    [
        ("sandbox.json", "shared"),
        ("daemons.json", "namespaces"),
        *(
            pytest.param(file, hosts, marks=pytest.mark.long("other moments of the same start"))
            for file, hosts in [
                ("sandbox.json", "namespaces"),
                ("daemon-manager.json", "namespaces"),
                ("daemon-manager.json", "shared"),
                ("daemons.json", "shared"),
            ]
        ),
    ],
)
def test_an_up_that_is_killed_half_way_leaves_nothing(place: Place, hosts: str, file: str) -> None:
    with subprocess.Popen(place.command("up", "--nodes", "2", "--hosts", hosts), stdout=subprocess.DEVNULL) as process:
        while not (place.directory / file).exists():
            assert process.poll() is None
        sandbox = place.known()
        process.kill()
    wait_until(lambda: not cleanup.members(sandbox.token, sandbox.slurm_conf), "the end of all processes")
    place.down()
    assert leftovers(sandbox) == []


def test_an_interrupted_up_leaves_nothing_and_exits_130(place: Place) -> None:
    with subprocess.Popen(place.command("up"), stdout=subprocess.DEVNULL) as process:
        while not (place.directory / "daemon-manager.json").exists():
            assert process.poll() is None
        sandbox = place.known()
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert leftovers(sandbox) == []


@pytest.mark.parametrize(
    "hosts",
    ["namespaces", "shared"],
)
def test_a_sandbox_whose_daemon_manager_was_killed_has_stopped_and_down_takes_it_away(
    place: Place, open_directory: Path, hosts: str
) -> None:
    sandbox = place.up("--hosts", hosts)
    place.slurm("sbatch", "--output=/dev/null", f"--wrap=touch {open_directory}/busy; srun sleep 600")
    wait_until((open_directory / "busy").exists, "a task")
    manager = state.find_manager(sandbox)
    assert manager is not None
    cleanup.end(manager)
    wait_until(lambda: state.find_manager(sandbox) is None, "the end of the daemon manager")
    assert place.state() == "stopped"
    place.down()
    assert leftovers(sandbox) == []


def test_up_takes_away_what_a_stopped_sandbox_left(place: Place) -> None:
    first = place.up()
    manager = state.find_manager(first)
    assert manager is not None
    cleanup.end(manager)
    second = place.up()
    assert second.token != first.token
    assert place.state() == "up"


def test_after_a_restart_of_the_machine_a_sandbox_has_stopped(place: Place) -> None:
    sandbox = place.up()
    record = place.directory / "daemon-manager.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "boot_id": "another"}))
    assert place.state() == "stopped"
    place.down()
    assert leftovers(sandbox) == []


def test_a_sandbox_without_its_controller_is_degraded_and_goes(place: Place) -> None:
    sandbox = place.up()
    cleanup.end(daemon(sandbox, "slurmctld"))
    assert place.state() == "degraded"
    place.down()
    assert leftovers(sandbox) == []


def test_a_daemon_that_refuses_its_configuration_is_named_with_the_end_of_its_log(
    place: Place, golden: GoldenMessages
) -> None:
    done = place.call("up", "--conf", "NoSuchSetting=1")
    assert done.returncode == 1
    assert "slurmctld exited with code 1" in golden.message(done.stderr.splitlines()[0])
    assert "Parsing error at unrecognized key: NoSuchSetting" in done.stderr
    assert not place.directory.exists()


def test_a_node_that_does_not_come_up_is_named_with_the_ends_of_the_logs(place: Place, golden: GoldenMessages) -> None:
    done = place.call("up", "--nodes", "1", "--conf", "SlurmdParameters=none")
    assert done.returncode == 1
    assert golden.message(done.stderr.splitlines()[0]).endswith(": n1 is inval")
    assert "Low CPUs" in done.stderr
    assert not place.directory.exists()


def test_somebody_elses_directory_is_left_alone(place: Place, golden: GoldenMessages) -> None:
    place.directory.mkdir()
    (place.directory / "thesis.tex").touch()
    done = place.call("up")
    assert done.returncode == 2
    message = golden.message(done.stderr, {str(place.directory): "PLACE"})
    assert f"{place.directory} holds files" in message
    assert "an empty one with --dir" in message
    place.down()
    assert (place.directory / "thesis.tex").exists()


def test_a_file_is_no_directory(place: Place, golden: GoldenMessages) -> None:
    place.directory.touch()
    done = place.call("up")
    assert done.returncode == 2
    message = golden.message(done.stderr, {str(place.directory): "PLACE"})
    assert f"{place.directory} is a file" in message
    assert "give a directory with --dir" in message


def test_another_users_sandbox_is_left_alone(new_place: Callable[..., Place], golden: GoldenMessages) -> None:
    place = new_place(prefix=AS_ORDINARY_USER)
    place.directory.mkdir()
    done = place.call("down")
    assert done.returncode == 2
    message = golden.message(done.stderr, {str(place.directory): "PLACE"})
    assert f"the sandbox in {place.directory} is user 0's" in message
    assert "another directory with --dir" in message


def test_no_descriptor_of_the_caller_stays_open(place: Place) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader:
        subprocess.run(
            place.command("up", "--nodes", "1"), stdout=write_end, stderr=write_end, pass_fds=[write_end], check=True
        )
        os.close(write_end)
        # This would not return while a daemon held the other end.
        assert reader.read().endswith(b"slurm.conf\n")


def test_what_up_prints_can_be_evaluated_by_a_shell(place: Place) -> None:
    done = place.call("up", "--nodes", "1")
    assert done.stdout == f"export SLURM_CONF={place.directory}/slurm.conf\n"
    assert "nodes n1 (namespaces) are up after" in done.stderr


def test_json_names_the_configuration_the_nodes_and_the_partitions(place: Place) -> None:
    done = place.call("up", "--nodes", "2", "--json")
    assert json.loads(done.stdout) == {
        "slurm_conf": str(place.directory / "slurm.conf"),
        "nodes": ["n1", "n2"],
        "partitions": ["low", "low0", "lowc", "high"],
        "hosts": "namespaces",
        "directory": str(place.directory),
        "bin": None,
    }
    assert done.stderr == ""


def test_processes_are_tracked_by_control_groups_of_the_sandboxs_own(place: Place, open_directory: Path) -> None:
    sandbox = place.up("--conf", "ProctrackType=proctrack/cgroup", "--conf", "TaskPlugin=task/cgroup")
    groups = place.slurm("srun", "--nodes=1", "--nodelist=n2", "cat", "/proc/self/cgroup")
    assert f":freezer:/hpcddp-{sandbox.token[:8]}/slurm_n2/" in groups
    keep_busy(place, open_directory)
    place.down()
    assert leftovers(sandbox) == []
