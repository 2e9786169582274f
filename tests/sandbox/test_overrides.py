from __future__ import annotations

import pytest

from hpcddp.errors import UserError
from hpcddp.sandbox.configuration import merge_overrides, parse_overrides
from tests.messages import GoldenMessages


def test_the_last_of_two_values_for_a_key_wins() -> None:
    assert parse_overrides(["KillWait=5", "killwait=7", "AuthInfo=cred_expire=5"]) == {
        "killwait": "7",
        "AuthInfo": "cred_expire=5",
    }


def test_new_settings_come_last_and_known_ones_stay_in_place() -> None:
    merged = merge_overrides({"KillWait": "15", "JobRequeue": "1"}, {"DebugFlags": "Steps", "KILLWAIT": "5"})
    assert list(merged.items()) == [("KillWait", "5"), ("JobRequeue", "1"), ("DebugFlags", "Steps")]


@pytest.mark.parametrize("entry", ["KillWait", "=5", "KillWait=", "Kill Wait=5", "", "é=1"])
def test_an_entry_of_another_form_is_refused(entry: str, golden: GoldenMessages) -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides([entry])
    message = golden.message(caught.value)
    assert f"--conf is {entry!r}, " in message
    assert "KEY=VALUE" in message
    assert "--conf KillWait=5" in message


@pytest.mark.parametrize("value", ["5\nPartitionName=x", "5#6"])
def test_a_value_that_slurm_conf_cannot_hold_is_refused(value: str, golden: GoldenMessages) -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides([f"KillWait={value}"])
    message = golden.message(caught.value)
    assert f"--conf KillWait is {value!r}, " in message
    assert "line break or #; leave them out" in message


@pytest.mark.parametrize("key", ["NodeName", "statesavelocation", "SlurmctldHost", "Include"])
def test_what_the_sandbox_needs_cannot_be_changed(key: str, golden: GoldenMessages) -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides([f"{key}=x"])
    message = golden.message(caught.value)
    assert f"--conf {key} cannot be changed" in message
    assert "leave it out" in message


def test_another_munge_socket_is_refused(golden: GoldenMessages) -> None:
    with pytest.raises(UserError) as caught:
        parse_overrides(["authinfo=cred_expire=5,socket=/run/munge/munge.socket.2"])
    message = golden.message(caught.value)
    assert "--conf AuthInfo is 'cred_expire=5,socket=/run/munge/munge.socket.2', " in message
    assert "leave socket= out" in message
