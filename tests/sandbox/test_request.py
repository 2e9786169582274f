from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import UserError
from hpcddp.sandbox import cgroups
from hpcddp.sandbox.request import Hosts, Request, default_directory, default_hosts
from hpcddp.sandbox.sandbox import check_request
from tests.messages import GoldenMessages


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
        check_request(what, missing_programs=lambda names: [name for name in names if name in missing])
    assert caught.value.exit_code == 2
    return caught.value.message


def test_a_plain_request_passes() -> None:
    check_request(wanted(), missing_programs=nothing_is_missing)


@pytest.mark.parametrize(
    ("field", "option", "value", "limits"),
    [
        ("nodes", "--nodes", 0, "from 1 to 243"),
        ("nodes", "--nodes", 244, "from 1 to 243"),
        ("cpus_per_node", "--cpus-per-node", 0, "from 1 to 1024"),
        ("gpus_per_node", "--gpus-per-node", -1, "from 0 to 1024"),
    ],
)
def test_a_number_out_of_its_limits_is_refused(
    field: str, option: str, value: int, limits: str, golden: GoldenMessages
) -> None:
    message = golden.message(refusal(wanted(**{field: value})))
    assert f"{option} is {value}, " in message
    assert limits in message
    assert f"write for example {option} 4" in message


def test_a_directory_that_slurm_conf_cannot_hold_is_refused(golden: GoldenMessages) -> None:
    message = golden.message(refusal(wanted(directory=Path("/home/ann b/sandbox"))))
    assert "'/home/ann b/sandbox'" in message
    assert "only letters, digits and ._+-/" in message
    assert "another one with --dir" in message


def test_a_directory_too_long_for_sockets_is_refused(golden: GoldenMessages) -> None:
    directory = Path("/", "a" * 70)
    message = golden.message(refusal(wanted(directory=directory)))
    assert f"{directory} has 71 characters" in message
    assert "more than 70" in message
    assert "a shorter one with --dir" in message


def test_missing_programs_are_named_in_one_sentence_with_the_command_that_installs_them(golden: GoldenMessages) -> None:
    message = golden.message(refusal(wanted(), missing=["munged", "slurmd", "ip"]))
    assert "slurmd and munged are not installed" in message
    assert message.endswith(": apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2")
    assert "sinfo is not installed" in golden.message(refusal(wanted(), missing=["sinfo"]))


def test_hosts_of_their_own_need_root(monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    message = golden.message(refusal(wanted(hosts=Hosts.NAMESPACES)))
    assert "--hosts is namespaces" in message
    assert "use --hosts shared" in message
    assert default_hosts() is Hosts.SHARED


def test_a_user_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 64_999)
    message = golden.message(refusal(wanted()))
    assert "user id 64999 has no name" in message
    assert "add it to /etc/passwd" in message


def test_control_groups_need_hosts_of_their_own(golden: GoldenMessages) -> None:
    message = golden.message(refusal(wanted(overrides={"ProctrackType": "proctrack/cgroup"})))
    assert "--hosts is shared" in message
    assert "leave the cgroup plugins out" in message
    assert "use --hosts namespaces as root" in message


def test_control_groups_of_version_2_are_refused(monkeypatch: pytest.MonkeyPatch, golden: GoldenMessages) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(cgroups, "is_version_1", lambda: False)
    refused = wanted(hosts=Hosts.NAMESPACES, overrides={"ProctrackType": "proctrack/cgroup"})
    message = golden.message(refusal(refused))
    assert "--conf names a cgroup plugin" in message
    assert "control groups of version 2" in message
    assert "leave the cgroup plugins out" in message


def test_the_sandbox_is_found_where_the_user_keeps_state() -> None:
    assert default_directory({"XDG_STATE_HOME": "/state", "HOME": "/home/ann"}) == Path("/state/hpcddp/sandbox")
    assert default_directory({"HOME": "/home/ann"}) == Path("/home/ann/.local/state/hpcddp/sandbox")
