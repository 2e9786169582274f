"""``--conf KEY=VALUE``: what a user may change in a sandbox's slurm.conf."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpcddp.errors import UserError

# These say where the sandbox is and what it consists of; with other values it could not be found or ended again.
_KEPT = frozenset(
    {
        "slurmctldhost", "slurmctldaddr", "slurmctldport", "slurmdport", "controlmachine", "controladdr",
        "slurmuser", "slurmduser", "authtype", "credtype", "statesavelocation", "slurmdspooldir",
        "slurmctldpidfile", "slurmdpidfile", "slurmctldlogfile", "slurmdlogfile",
        "nodename", "nodeset", "partitionname", "downnodes", "frontendname", "include", "communicationparameters",
    }
)  # fmt: skip
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9]*")


def parse_overrides(entries: Sequence[str]) -> dict[str, str]:
    """Return the settings that ``--conf`` options name.

    Args:
        entries: texts of the form ``KEY=VALUE``; a later one wins, whatever its capitals (slurm.conf(5)).

    Raises:
        UserError: an entry is not of that form, or names what the sandbox must keep.
    """
    found: dict[str, tuple[str, str]] = {}
    for entry in entries:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not _KEY.fullmatch(key) or not value:
            raise UserError(
                f"--conf is {entry!r}, which is not of the form KEY=VALUE; write for example --conf KillWait=5"
            )
        if not value.isprintable() or "#" in value:
            raise UserError(
                f"--conf {key} is {value!r}, and a value in slurm.conf ends at a line break or #; leave them out"
            )
        if key.lower() in _KEPT:
            raise UserError(f"--conf {key} cannot be changed, the sandbox needs its own; leave it out")
        found[key.lower()] = (key, value)
    overrides = dict(found.values())
    _check_auth_info(overrides)
    return overrides


def merge_overrides(settings: Mapping[str, str], overrides: Mapping[str, str]) -> dict[str, str]:
    """Return ``settings`` with ``overrides`` in place of theirs; keys are compared without regard to capitals.

    AuthInfo holds several things: the sandbox's socket stays in it.

    Args:
        settings: the sandbox's own settings, in the order of the file.
        overrides: what the user changes; new keys are appended.
    """
    names = {name.lower(): name for name in settings}
    merged = dict(settings)
    for key, value in overrides.items():
        name = names.get(key.lower(), key)
        merged[name] = f"{merged[name]},{value}" if name == "AuthInfo" else value
    return merged


def _check_auth_info(overrides: Mapping[str, str]) -> None:
    value = next((value for key, value in overrides.items() if key.lower() == "authinfo"), "")
    if any(part.strip().lower().startswith("socket=") for part in value.split(",")):
        raise UserError(
            f"--conf AuthInfo is {value!r}, and the sandbox's munged has a socket of its own; leave socket= out"
        )
