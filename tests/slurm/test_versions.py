"""What versions of Slurm do otherwise, and what slurmctld says about itself."""

from __future__ import annotations

import pytest

from hpcddp.slurm import commands
from hpcddp.slurm.controller import ask_controller, requeue_delay_s, visible_differences
from hpcddp.slurm.job import moment_of


@pytest.mark.parametrize(
    ("version", "differences"),
    [("22.05.8", 0), ("24.05.0rc1", 2), ("24.11.5", 2), ("26.05.3", 2), ("26.05.5", 1), ("", 0)],
)
def test_users_are_told_what_they_see(version: str, differences: int) -> None:
    assert len(visible_differences(version)) == differences


@pytest.mark.parametrize(
    ("config", "delay_s"),
    [
        ({}, 121),
        ({"AuthInfo": "cred_expire=5"}, 6),
        ({"SLURM_VERSION": "25.11.5", "SchedulerParameters": "bf_interval=1,requeue_delay=7"}, 8),
        # Older versions do not know the parameter.
        ({"SLURM_VERSION": "24.11.5", "SchedulerParameters": "requeue_delay=7", "AuthInfo": "cred_expire=5"}, 6),
        ({"SLURM_VERSION": "25.11.5", "AuthInfo": "cred_expire=5"}, 6),
    ],
)
def test_the_delay_of_a_requeued_job_is_that_of_the_cluster(config: dict[str, str], delay_s: int) -> None:
    assert requeue_delay_s(config) == delay_s


@pytest.mark.parametrize("heading", ["Configuration data as of 2026-11-26T06:28:45\n", "something else\n"])
def test_slurmctld_says_its_time(monkeypatch: pytest.MonkeyPatch, heading: str) -> None:
    monkeypatch.setattr(commands, "ask", lambda *_, **__: f"{heading}AuthInfo = cred_expire=5\n")
    controller = ask_controller({})
    expected = moment_of("2026-11-26T06:28:45") if heading.startswith("Conf") else None
    assert (controller.now, controller.requeue_delay_s) == (expected, 6)
