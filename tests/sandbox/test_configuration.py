from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.sandbox.configuration import Cluster, gres_conf, hosts_file, slurm_conf
from tests.sandbox.clusters import SHARED, cluster

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(("name", "wanted"), [("namespaces", cluster()), ("shared", SHARED)])
def test_the_whole_slurm_conf_is_as_it_was_read_by_a_person(
    name: str, wanted: Cluster, request: pytest.FixtureRequest
) -> None:
    golden = GOLDEN / f"{name}.conf"
    if request.config.getoption("--update-golden"):
        golden.write_text(slurm_conf(wanted))
    assert slurm_conf(wanted) == golden.read_text()


def test_overrides_replace_settings_whatever_their_capitals_and_the_socket_stays() -> None:
    lines = slurm_conf(SHARED).splitlines()
    assert [line for line in lines if line.lower().startswith("killwait")] == ["KillWait=3"]
    assert "AuthInfo=socket=/somewhere/sandbox/munge/socket,cred_expire=5" in lines
    assert "DebugFlags=Steps" in lines


def test_each_gpu_has_a_file_of_its_own() -> None:
    assert gres_conf(cluster()).splitlines() == [
        "NodeName=n1 Name=gpu File=/somewhere/sandbox/dev/n1-gpu0",
        "NodeName=n1 Name=gpu File=/somewhere/sandbox/dev/n1-gpu1",
        "NodeName=n2 Name=gpu File=/somewhere/sandbox/dev/n2-gpu0",
        "NodeName=n2 Name=gpu File=/somewhere/sandbox/dev/n2-gpu1",
    ]


def test_without_gpus_nothing_speaks_of_them() -> None:
    assert gres_conf(SHARED) == ""
    assert "gpu" not in slurm_conf(SHARED)


def test_every_host_is_known_by_name() -> None:
    nodes = "127.0.0.1 localhost\n198.18.7.1 ctl\n198.18.7.11 n1\n198.18.7.12 n2\n"
    assert hosts_file(cluster()) == nodes
    assert hosts_file(cluster(machine=("198.18.7.254", "laptop"))) == f"{nodes}198.18.7.254 laptop\n"
