"""A root directory with another Slurm: what is refused, and how ``scripts/slurm-root`` makes one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcddp.errors import UserError
from hpcddp.sandbox import root as roots

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm-root"
WAY_OUT = "give the root directory of a Linux with Slurm in it, such as scripts/slurm-root makes"


@pytest.fixture
def linux(tmp_path: Path) -> Path:
    """A directory that has the shape of a root with Slurm."""
    root = tmp_path / "root"
    for name in ("etc", "var", "mnt", "usr/bin", "usr/sbin"):
        (root / name).mkdir(parents=True, mode=0o755)
    for name in ("sinfo", "mount", "umount", "unshare", "nsenter", "env", "hostname"):
        (root / "usr" / "bin" / name).touch(mode=0o755)
    for name in ("slurmctld", "slurmd", "munged", "ip"):
        (root / "usr" / "sbin" / name).touch(mode=0o755)
    if Path(sys.base_prefix).resolve() == Path("/usr"):
        # As a root of the same Debian has it.
        (root / Path(sys.executable).resolve().relative_to("/")).touch(mode=0o755)
    return root


def refusal(root: Path) -> str:
    with pytest.raises(UserError) as caught:
        roots.check(root)
    assert caught.value.exit_code == 2
    return caught.value.message


def test_a_root_with_slurm_passes(linux: Path) -> None:
    roots.check(linux)


def test_what_is_no_directory_is_refused(linux: Path) -> None:
    assert refusal(linux / "absent") == f"--slurm is {linux}/absent, which does not exist; {WAY_OUT}"
    program = linux / "usr" / "bin" / "sinfo"
    assert refusal(program) == f"--slurm is {program}, which is a file; {WAY_OUT}"
    assert refusal(linux / "usr") == f"--slurm is {linux}/usr, which has no directory /etc; {WAY_OUT}"


def test_the_root_of_this_machine_is_refused() -> None:
    assert refusal(Path("/")) == "--slurm is /, which is this machine's own root directory; leave it out"


@pytest.mark.parametrize("name", ["usr/sbin/slurmctld", "usr/sbin/munged", "usr/bin/nsenter"])
def test_a_root_without_a_program_that_the_sandbox_needs_is_refused(linux: Path, name: str) -> None:
    (linux / name).unlink()
    assert refusal(linux) == f"--slurm is {linux}, which lacks {Path(name).name}; {WAY_OUT}"


@pytest.mark.parametrize("name", [".", "usr/sbin/slurmctld"])
def test_what_others_can_write_to_is_refused(linux: Path, name: str) -> None:
    path = linux / name
    path.chmod(0o777)
    assert refusal(linux) == (
        f"--slurm is {linux}, and {path} can be written by others, who could put other programs there; "
        f"run: chmod go-w {path}"
    )


def test_another_users_root_is_refused(linux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert refusal(linux) == (
        f"--slurm is {linux}, and {linux} is user {user}'s, who could put other programs there; "
        "give a directory of your own"
    )


def test_an_interpreter_of_this_machines_system_that_the_root_lacks_is_refused(
    linux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3.99")
    assert refusal(linux) == (
        f"--slurm is {linux}, and the Python that runs hpcddp needs /usr/bin/python3.99, which that root does not "
        "have; use an environment whose Python is not the system's, for example one of uv: uv venv --managed-python"
    )
    (linux / "usr" / "bin" / "python3.99").touch()
    roots.check(linux)


def test_an_environment_in_a_system_directory_that_the_root_lacks_is_refused(
    linux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/var/lib/environment")
    assert "needs /var/lib/environment, which that root does not have" in refusal(linux)


def programs(directory: Path, version: str) -> dict[str, str]:
    """Write programs in place of those that make a root, and return an environment with them."""
    scripts = {
        "id": "echo 0",
        "dpkg-query": "echo installed",
        "apt-get": "echo http://mirror.example/debian",
        # Its last three arguments: release, directory, source.
        "mmdebstrap": f'echo "$@" >>{directory}/calls; while [ $# -gt 2 ]; do shift; done; mkdir -p "$1"; sleep 0.5',
        "chroot": f"echo slurm-wlm {version}",
    }
    for name, text in scripts.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / name).chmod(0o755)
    return {"PATH": f"{directory}:/usr/bin:/bin", "XDG_CACHE_HOME": str(directory / "cache"), "HOME": str(directory)}


def call(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((SCRIPT, *words), env=environment, capture_output=True, text=True, timeout=60, check=False)


def calls(directory: Path) -> list[str]:
    return (directory / "calls").read_text().splitlines()


@pytest.mark.parametrize("words", [(), ("23.02",)])
def test_a_version_without_a_root_is_refused_with_those_that_have_one(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = call(programs(tmp_path, "24.11.5"), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"scripts/slurm-root: there is no root for Slurm '{''.join(words)}'; there are: 24.11, testing\n"
    )
    assert not (tmp_path / "cache").exists()


def test_a_root_is_made_once_although_two_ask_for_it(tmp_path: Path) -> None:
    environment = programs(tmp_path, "24.11.5")
    both = [subprocess.Popen((SCRIPT, "24.11"), env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    root = tmp_path / "cache" / "hpcddp" / "slurm-roots" / "24.11"
    assert [process.communicate(timeout=60)[0] for process in both] == [f"{root}\n"] * 2
    assert (root / "slurm-version").read_text() == "24.11.5\n"
    third = call(environment, "24.11")
    assert (third.stdout, third.stderr) == (f"{root}\n", f"Slurm 24.11.5 in {root}\n")
    assert len(calls(tmp_path)) == 1
    assert calls(tmp_path)[0].endswith(f" trixie {root}.making deb http://mirror.example/debian trixie main")


def test_what_an_interrupted_making_left_is_no_root(tmp_path: Path) -> None:
    environment = programs(tmp_path, "24.11.5")
    roots_directory = tmp_path / "cache" / "hpcddp" / "slurm-roots"
    with subprocess.Popen((SCRIPT, "24.11"), env=environment, stdout=subprocess.PIPE, text=True) as process:
        while not (roots_directory / "24.11.making").exists():
            assert process.poll() is None
        process.kill()
    (roots_directory / "24.11.making" / "half").touch()
    assert not (roots_directory / "24.11").exists()
    assert call(environment, "24.11").stdout == f"{roots_directory}/24.11\n"
    assert [path.name for path in (roots_directory / "24.11").iterdir()] == ["slurm-version"]


@pytest.mark.parametrize("made", ["26.05.5", ""])
def test_a_root_with_another_slurm_than_the_one_that_was_asked_for_is_refused(tmp_path: Path, made: str) -> None:
    done = call(programs(tmp_path, made), "24.11")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Debian trixie has Slurm" in done.stderr
    assert "which is not 24.11" in done.stderr
    assert not (tmp_path / "cache" / "hpcddp" / "slurm-roots" / "24.11").exists()


def test_testing_takes_what_comes(tmp_path: Path) -> None:
    done = call(programs(tmp_path, "26.11.1"), "testing")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/cache/hpcddp/slurm-roots/testing\n")


def test_a_root_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    environment = programs(tmp_path, "24.11.5")
    (tmp_path / "mmdebstrap").write_text("#!/bin/sh\nexit 1\n")
    done = call(environment, "24.11")
    assert done.returncode == 2
    assert "Debian trixie cannot be installed from http://mirror.example/debian; see above" in done.stderr
    assert [path.name for path in (tmp_path / "cache" / "hpcddp" / "slurm-roots").iterdir()] == ["24.11.lock"]
