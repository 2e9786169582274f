"""What is known of a field of the job file besides its type, range, default, unit and description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

OnResume = Literal["never", "always", "by name"]
AS_IN_JOB: Final = object()
"""The value that the field has in the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The option of ``submit``, ``render`` and ``rehearse`` that sets a field.

    Args:
        name: with its dashes; None is the name of the field.
        help: one line; None is the description of the field.
        metavar: what the help calls the value; None is ``N`` for a number, ``VALUE`` for any other.
        is_listed: whether ``--help`` describes it; ``--help --all`` describes every option.
    """

    name: str | None = None
    help: str | None = None
    metavar: str | None = None
    is_listed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFacts:
    """A part of the ``Annotated`` type of a field; a field that needs none of it has none.

    Args:
        flag: the flag of sbatch with the same meaning: a directive writes it, and ``resources.sbatch`` refuses it. An
            option of the field also has its letter.
        is_computed: whether ``hpcddp.slurm.directives`` computes the value of the flag from several fields.
        option: the option of the command line; None: only ``--set`` sets the field.
        on_resume: whether a run may go on with another value: never, always, or if the command line names the field.
            None is that of the section, and never at the top of the file.
        may_be_secret: whether the value may be or contain a secret, which no message and no tracker shows.
        is_expanded: whether ``$NAME`` and ``~`` in the value are expanded when the job is submitted.
        is_of_a_site: whether the value means something on one cluster alone, such as the name of a partition or what a
            node has: ``hpcddp rehearse --sandbox`` takes the default in its place.
        ddp_value: the value with which ``hpcddp doctor ddp`` compares.
        example: a value for a message about the missing field. Every required field has one.
        other_names: what other tools call the field, where a suggestion by spelling would not find it.
    """

    flag: str | None = None
    is_computed: bool = False
    option: Option | None = None
    on_resume: OnResume | None = None
    may_be_secret: bool = False
    is_expanded: bool = False
    is_of_a_site: bool = False
    ddp_value: Any = AS_IN_JOB
    example: str | None = None
    other_names: tuple[str, ...] = ()


_NONE: Final = FieldFacts()


def facts_of(field: FieldInfo) -> FieldFacts:
    """Return the facts of a field."""
    return next((part for part in field.metadata if isinstance(part, FieldFacts)), _NONE)
