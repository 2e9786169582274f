from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import UserError
from hpcddp.sandbox import cgroups, request
from hpcddp.sandbox.request import Hosts, Request


def wanted(**changes: Any) -> Request:
    fields: dict[str, Any] = {
        "directory": Path("/somewhere/sandbox"),
        "hosts": Hosts.SHARED,
        "nodes": 2,
        "cpus_per_node": 8,
        "gpus_per_node": 4,
    }
    return Request(**{**fields, **changes})


def nothing_is_missing(_: Sequence[str]) -> list[str]:
    return []


def refusal(what: Request, *, missing: Sequence[str] = ()) -> str:
    with pytest.raises(UserError) as caught:
        request.check(what, missing_programs=lambda names: [name for name in names if name in missing])
    assert caught.value.exit_code == 2
    return caught.value.message


def test_a_plain_request_passes() -> None:
    request.check(wanted(), missing_programs=nothing_is_missing)


@pytest.mark.parametrize(
    ("field", "option", "value", "limits"),
    [
        ("nodes", "--nodes", 0, "from 1 to 243"),
        ("nodes", "--nodes", 244, "from 1 to 243"),
        ("cpus_per_node", "--cpus-per-node", 0, "from 1 to 1024"),
        ("gpus_per_node", "--gpus-per-node", -1, "from 0 to 1024"),
    ],
)
def test_a_number_out_of_its_limits_is_refused(field: str, option: str, value: int, limits: str) -> None:
    assert refusal(wanted(**{field: value})) == (
        f"{option} is {value}, and it must be {limits}; write for example {option} 4"
    )


def test_a_directory_that_slurm_conf_cannot_hold_is_refused() -> None:
    assert refusal(wanted(directory=Path("/home/ann b/sandbox"))) == (
        "the sandbox's directory is '/home/ann b/sandbox', and slurm.conf takes only letters, digits and ._+-/; "
        "give another one with --dir"
    )


def test_a_directory_too_long_for_sockets_is_refused() -> None:
    directory = Path("/", "a" * 70)
    assert refusal(wanted(directory=directory)) == (
        f"the sandbox's directory {directory} has 71 characters, and with more than 70 the paths of its sockets get "
        "too long; give a shorter one with --dir"
    )


def test_missing_programs_are_named_in_one_sentence_with_the_command_that_installs_them() -> None:
    assert refusal(wanted(), missing=["munged", "slurmd", "ip"]) == (
        "slurmd and munged are not installed, and a sandbox needs them; run as root: "
        "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2"
    )
    assert refusal(wanted(), missing=["sinfo"]).startswith("sinfo is not installed, and a sandbox needs it; run")


def test_hosts_of_their_own_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert refusal(wanted(hosts=Hosts.NAMESPACES)) == (
        "--hosts is namespaces, and only root can make networks; use --hosts shared"
    )
    assert request.default_hosts() is Hosts.SHARED


def test_a_user_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 64_999)
    assert refusal(wanted()) == (
        "user id 64999 has no name on this machine, and Slurm's daemons need one; add it to /etc/passwd"
    )


def test_control_groups_need_hosts_of_their_own() -> None:
    assert refusal(wanted(overrides={"ProctrackType": "proctrack/cgroup"})) == (
        "--hosts is shared, and nodes on one host would share their control groups; "
        "leave the cgroup plugins out, or use --hosts namespaces as root"
    )


def test_control_groups_of_version_2_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(cgroups, "is_version_1", lambda: False)
    assert refusal(wanted(hosts=Hosts.NAMESPACES, overrides={"ProctrackType": "proctrack/cgroup"})) == (
        "--conf names a cgroup plugin, and this machine has control groups of version 2, for which the sandbox "
        "cannot make room; leave the cgroup plugins out"
    )


def test_the_sandbox_is_found_where_the_user_keeps_state() -> None:
    assert request.default_directory({"XDG_STATE_HOME": "/state", "HOME": "/home/ann"}) == Path("/state/hpcddp/sandbox")
    assert request.default_directory({"HOME": "/home/ann"}) == Path("/home/ann/.local/state/hpcddp/sandbox")
