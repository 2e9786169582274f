from __future__ import annotations

import pytest

from hpcddp.errors import UserError
from hpcddp.sandbox.configuration import merge_overrides, parse_overrides


def test_the_last_of_two_values_for_a_key_wins() -> None:
    assert parse_overrides(["KillWait=5", "killwait=7", "AuthInfo=cred_expire=5"]) == {
        "killwait": "7",
        "AuthInfo": "cred_expire=5",
    }


def test_new_settings_come_last_and_known_ones_stay_in_place() -> None:
    merged = merge_overrides({"KillWait": "15", "JobRequeue": "1"}, {"DebugFlags": "Steps", "KILLWAIT": "5"})
    assert list(merged.items()) == [("KillWait", "5"), ("JobRequeue", "1"), ("DebugFlags", "Steps")]


@pytest.mark.parametrize("entry", ["KillWait", "=5", "KillWait=", "Kill Wait=5", "", "é=1"])
def test_an_entry_of_another_form_is_refused(entry: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides([entry])
    assert caught.value.message == (
        f"--conf is {entry!r}, which is not of the form KEY=VALUE; write for example --conf KillWait=5"
    )


@pytest.mark.parametrize("value", ["5\nPartitionName=x", "5#6"])
def test_a_value_that_slurm_conf_cannot_hold_is_refused(value: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides([f"KillWait={value}"])
    assert caught.value.message == (
        f"--conf KillWait is {value!r}, and a value in slurm.conf ends at a line break or #; leave them out"
    )


@pytest.mark.parametrize("key", ["NodeName", "statesavelocation", "SlurmctldHost", "Include"])
def test_what_the_sandbox_needs_cannot_be_changed(key: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides([f"{key}=x"])
    assert caught.value.message == f"--conf {key} cannot be changed, the sandbox needs its own; leave it out"


def test_another_munge_socket_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides(["authinfo=cred_expire=5,socket=/run/munge/munge.socket.2"])
    assert caught.value.message == (
        "--conf AuthInfo is 'cred_expire=5,socket=/run/munge/munge.socket.2', "
        "and the sandbox's munged has a socket of its own; leave socket= out"
    )
