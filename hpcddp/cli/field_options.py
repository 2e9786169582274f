"""The options of the command line that set fields of the job file, from what stands at the fields."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hpcddp.jobfile.field_facts import facts_of
from hpcddp.jobfile.job import field_paths, key_type_of
from hpcddp.jobfile.slurm_flags import SBATCH

_LETTERS = {flag: letter for letter, flag in SBATCH.short.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldOption:
    """An option that sets a field.

    Args:
        path: the key path of the field.
        name: with its dashes.
        letter: the option of sbatch with one letter, with its dash; None if sbatch has none.
        metavar: what the help calls the value.
        is_switch: whether the option takes no value, and sets the field to true.
        is_listed: whether ``--help`` describes it; ``--help --all`` describes every option.
    """

    path: str
    name: str
    letter: str | None
    help: str
    metavar: str
    is_switch: bool
    is_listed: bool


@cache
def field_options() -> tuple[FieldOption, ...]:
    """Return the options, in the order of the fields."""
    options = []
    for path, field in field_paths():
        option = facts_of(field).option
        if option is not None:
            types = key_type_of(field).types
            letter = _LETTERS.get(facts_of(field).flag or "")
            options.append(
                FieldOption(
                    path=".".join(path),
                    name=option.name or f"--{path[-1].replace('_', '-')}",
                    letter=None if letter is None else f"-{letter}",
                    help=option.help or str(field.description),
                    metavar=option.metavar or ("N" if int in types else "VALUE"),
                    is_switch=bool in types,
                    is_listed=option.is_listed,
                )
            )
    return tuple(options)
