"""What slurmctld says about itself: its settings and its clock; and what users see of the versions of Slurm.

``docs/slurm-versions.md`` has all of the ways in which versions differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hpcddp.slurm import commands
from hpcddp.slurm.job import moment_of

Version = tuple[int, ...]

OLDEST: Final = "22.05"
"""The oldest version that hpcddp runs on."""
# Each with the first version that does it, and the first that does it no more.
_VISIBLE: Final[tuple[tuple[Version, Version, str], ...]] = (
    (
        (24, 5),
        (10_000,),
        (
            "a script that ends by itself within the grace time of a preemption is requeued, or is PREEMPTED with "
            "PreemptMode=CANCEL; before, it was COMPLETED"
        ),
    ),
    (
        (24, 5),
        (26, 5, 4),
        (
            "a job that was preempted with a grace time stays marked as preempted after its requeue: at its next end "
            "Slurm requeues it once more, whatever its exit code, and a job that has finished shows PREEMPTED"
        ),
    ),
)


def version_of(text: str) -> Version:
    """Return the numbers of a version such as ``24.11.5``; empty if the text does not begin with one."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return () if match is None else tuple(int(number) for number in match[0].split("."))


def visible_differences(version: str) -> list[str]:
    """Return what users of a version see, in plain text, a sentence each."""
    return [fact for since, before, fact in _VISIBLE if since <= version_of(version) < before]


DEFAULT_KILL_WAIT_S: Final = 30.0
"""Slurm's default of KillWait, in seconds (slurm.conf(5))."""
# slurm.conf(5), AuthInfo: cred_expire.
_DEFAULT_CRED_EXPIRE_S: Final = 120
# The first version with SchedulerParameters=requeue_delay (slurm.conf(5)).
_HAS_REQUEUE_DELAY: Final = (25, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """What slurmctld says about itself.

    Args:
        now: the time by its clock, in whole seconds since the epoch; None if that cannot be read.
        requeue_delay_s: how long a requeued job waits, in seconds, if no start time is set for it.
        kill_wait_s: how long Slurm waits after SIGTERM before it kills the processes of a job, in seconds.
    """

    now: float | None
    requeue_delay_s: int
    kill_wait_s: float


def ask_controller(environment: Mapping[str, str]) -> Controller:
    """Ask slurmctld about itself.

    Args:
        environment: the command's environment; ``SLURM_CONF`` selects the cluster.

    Raises:
        SlurmUnavailableError: scontrol is not installed, or the controller does not answer.
        SlurmCommandError: the controller refused the request.
    """
    text = commands.ask("scontrol", "show", "config", environment=environment)
    # slurmctld fills in the time when it answers (_fill_ctld_conf in slurmctld/proc_req.c).
    heading = re.match(r"Configuration data as of (\S+)", text)
    now = None if heading is None else moment_of(heading[1])
    config = read_config(text)
    return Controller(now=now, requeue_delay_s=requeue_delay_s(config), kill_wait_s=_kill_wait_s(config))


def read_config(text: str) -> dict[str, str]:
    """Return the settings in the output of ``scontrol show config``, without those that are not set."""
    settings: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        # Later sections with a heading repeat some keys.
        if equals and value.strip() not in {"(null)", "N/A", ""}:
            settings.setdefault(key.strip(), value.strip())
    return settings


def requeue_delay_s(config: Mapping[str, str]) -> int:
    """Return how long a requeued job waits, in seconds (``batch_requeue_fini`` in slurmctld/job_mgr.c).

    Args:
        config: the settings of the cluster.
    """
    delay = re.search(r"\brequeue_delay=([0-9]+)", config.get("SchedulerParameters", ""))
    if delay is not None and version_of(config.get("SLURM_VERSION", "")) >= _HAS_REQUEUE_DELAY:
        return int(delay[1]) + 1
    expire = re.search(r"\bcred_expire=([0-9]+)", config.get("AuthInfo", ""))
    return (_DEFAULT_CRED_EXPIRE_S if expire is None else int(expire[1])) + 1


def _kill_wait_s(config: Mapping[str, str]) -> float:
    seconds = re.match(r"[0-9]+", config.get("KillWait", ""))
    return DEFAULT_KILL_WAIT_S if seconds is None else float(seconds[0])
