"""A sandbox is its owner's alone: nobody else on the machine runs a job in it, and the network does not reach it."""

from __future__ import annotations

import contextlib
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import pytest

from hpcddp.sandbox import cleanup
from hpcddp.sandbox.state import Sandbox
from tests.messages import GoldenMessages
from tests.sandbox.places import AS_ORDINARY_USER, ORDINARY_USER, Place
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.depends_on("hpcddp/sandbox", "hpcddp/processes.py", "tests/sandbox")]

ANOTHER_USER = pwd.getpwnam("daemon").pw_uid
AS_ANOTHER_USER = ("setpriv", f"--reuid={ANOTHER_USER}", f"--regid={ANOTHER_USER}", "--clear-groups", "--")
NewPlace = Callable[..., Place]


@pytest.fixture
def owned(new_place: NewPlace) -> Place:
    """Return a place of an ordinary user's, in a directory that everybody can look into."""
    place = new_place(prefix=AS_ORDINARY_USER)
    place.directory.parent.chmod(0o755)
    return place


@pytest.fixture
def desk() -> Iterator[Path]:
    """Return a directory of another ordinary user's."""
    path = Path(tempfile.mkdtemp(prefix="hpcddp-"))
    shutil.chown(path, ANOTHER_USER)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param(AS_ORDINARY_USER, id="an ordinary user's"),
        pytest.param((), id="root's"),
    ],
)
def test_another_user_can_neither_ask_nor_submit_nor_get_a_credential(
    new_place: NewPlace, desk: Path, prefix: Sequence[str]
) -> None:
    """Even with a copy of the configuration."""
    owned = new_place(prefix=prefix)
    owned.directory.parent.chmod(0o755)
    owned.up("--gpus-per-node", "0")
    shutil.copyfile(owned.directory / "slurm.conf", desk / "slurm.conf")
    commands = (
        ("sinfo",),
        ("srun", "id"),
        ("sbatch", "--output=/dev/null", "--wrap=id"),
        ("munge", "--no-input", "--socket", str(owned.directory / "munge" / "socket")),
    )
    environment = {"PATH": "/usr/bin:/bin", "SLURM_CONF": str(desk / "slurm.conf")}

    def attempt(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        words = (*AS_ANOTHER_USER, *command)
        return subprocess.run(words, cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False)

    # Slurm's commands try again for seconds.
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(attempt, commands))
    assert [(one.returncode != 0, one.stdout) for one in done] == [(True, "")] * len(commands)
    assert [one.args for one in done if "Permission denied" not in one.stderr] == []
    assert owned.slurm("squeue", "--noheader", "--states=all") == ""


@pytest.mark.parametrize("there", [False, True], ids=["new", "there already"])
def test_nobody_else_can_look_into_its_directory(owned: Place, *, there: bool) -> None:
    if there:
        owned.directory.mkdir(mode=0o755)
        shutil.chown(owned.directory, ORDINARY_USER)
    owned.up("--nodes", "1")
    assert stat.S_IMODE(owned.directory.stat().st_mode) == 0o700


def test_a_link_of_another_users_is_refused(owned: Place, golden: GoldenMessages) -> None:
    """Its owner could let it lead to another directory later."""
    owned.directory.parent.chmod(0o1777)
    subprocess.run((*AS_ANOTHER_USER, "ln", "-s", f"{owned.directory}-of-mine", owned.directory), check=True)
    for target in ("absent", "present"):
        if target == "present":
            (target_directory := Path(f"{owned.directory}-of-mine")).mkdir()
            shutil.chown(target_directory, ORDINARY_USER)
        done = owned.call("up")
        assert done.returncode == 2
        message = golden.message(done.stderr, {str(owned.directory): "PLACE", f"user {ANOTHER_USER}": "user UID"})
        assert f"{owned.directory} is user {ANOTHER_USER}'s" in message
        assert "another directory with --dir" in message


def test_a_place_in_which_everybody_can_put_another_directory_is_refused(owned: Place, golden: GoldenMessages) -> None:
    parent = owned.directory.parent
    parent.chmod(0o777)
    done = owned.call("up")
    assert done.returncode == 2
    message = golden.message(done.stderr, {str(parent): "PARENT"})
    assert f"{parent}, above the sandbox's directory" in message
    assert "can be written by everyone" in message
    assert "another one with --dir" in message
    assert not owned.directory.exists()


@contextlib.contextmanager
def host_called(address: str, desk: Path) -> Iterator[Sequence[str]]:
    """Make a host whose name stands for an address, and return the words in front of a command that runs there."""
    hosts = desk / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address} somehost\n")
    script = (
        f"mount --bind {hosts} /etc/hosts && hostname somehost && ip link set lo up && "
        "ip address add 192.0.2.77/24 dev lo && echo ready && exec sleep infinity"
    )
    own = ("--mount", "--uts", "--net")
    with subprocess.Popen(("unshare", *own, "sh", "-c", script), stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            yield ("nsenter", f"--target={holder.pid}", *own, "--")
        finally:
            holder.kill()


# srun cannot be reached at an address like 127.0.1.1: the tasks connect to where its own connection came from.
@pytest.mark.parametrize(
    ("address", "of_srun"),
    [("127.0.0.1", "127.0.0.1"), ("192.0.2.77", "192.0.2.77"), ("127.0.1.1", "0.0.0.0")],
)
def test_it_listens_where_the_name_of_its_host_leads_and_nowhere_else(
    new_place: NewPlace, desk: Path, address: str, of_srun: str
) -> None:
    with host_called(address, desk) as on_host:
        place = new_place(prefix=(*on_host, *AS_ORDINARY_USER))
        sandbox = place.up()
        try:
            assert place.slurm("srun", "--nodes=2", "hostname").split() == ["somehost"] * 2
            place.slurm("sbatch", "--nodes=2", "--output=/dev/null", "--wrap=srun sleep 600")
            wait_until(lambda: "srun" in listening(sandbox), "a listening srun")
            assert listening(sandbox) == {"slurmctld": {address}, "slurmd": {address}, "srun": {of_srun}}
        finally:
            place.down()


@pytest.mark.parametrize(
    ("address", "what"),
    [("", "has no IPv4 address"), ("203.0.113.9", "has the address 203.0.113.9")],
)
def test_a_host_that_cannot_be_reached_by_its_own_name_is_refused(
    new_place: NewPlace, desk: Path, address: str, what: str, golden: GoldenMessages
) -> None:
    with host_called(address, desk) as on_host:
        done = new_place(prefix=(*on_host, *AS_ORDINARY_USER)).call("up")
    assert done.returncode == 2
    message = golden.message(done.stderr)
    assert f"'somehost', and that name {what}" in message
    assert "put 127.0.0.1 and the name into /etc/hosts" in message
    assert "use --hosts namespaces as root" in message


def listening(sandbox: Sandbox) -> Mapping[str, set[str]]:
    """Return the addresses at which the programs of a sandbox accept connections from the network."""
    found: dict[str, set[str]] = defaultdict(set)
    for process in cleanup.members(sandbox.token, sandbox.slurm_conf):
        directory = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            sockets = {str(link.readlink()) for link in (directory / "fd").iterdir()}
            for table in ("tcp", "tcp6"):
                for line in (directory / "net" / table).read_text().splitlines()[1:]:
                    # The fields are in proc_pid_net(5); 0A is a socket that listens.
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == "0A" and f"socket:[{inode}]" in sockets:
                        found[(directory / "comm").read_text().strip()].add(_address(local.partition(":")[0]))
    return dict(found)


def _address(text: str) -> str:
    words = [bytes.fromhex(text[place : place + 8])[::-1] for place in range(0, len(text), 8)]
    return str(IPv4Address(words[0]) if len(words) == 1 else ip_address(b"".join(words)))
