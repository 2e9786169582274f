r"""The ``#SBATCH`` directives of a job, in a fixed order, and the grammar of their lines.

``quote_value`` writes a value so that sbatch reads it unchanged. Measured on Slurm 22.05.8; ``tests/cluster`` asks the
real sbatch again:

- A directive starts with ``#SBATCH``, in capitals, in the first column. Blank lines and comments may come between;
  sbatch stops at the first other line.
- White space separates words. Both kinds of quotes group; inside one kind, the other is an ordinary character.
- A backslash escapes the next character, also inside single quotes. Before unquoted white space it escapes nothing: it
  is removed, and the word ends. Since Slurm 24.05 it makes a blank, but no other white space, a part of the word.
- An unquoted ``#`` ends the line, also in the middle of a word. An empty word ends it as well.
- Nothing is expanded: no ``$``, no backquote, no ``~``. There is no continuation line and no limit on a line's length.
- sbatch refuses a script with an unclosed quote, a NUL, or a carriage return at the end of a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpcddp.errors import UserError
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.resources import FIELDS_WRITTEN_UNCHANGED, NodeRange, Resources
from hpcddp.jobfile.sweep import count_elements

_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+", re.ASCII)
_UNWRITABLE = {
    "\n": "a line break",
    "\r": "a carriage return",
    "\0": "a NUL character",
}


class UnwritableValueError(UserError):
    """A value that cannot be written, however it is quoted."""

    kind = "unwritable_value"


def quote_value(text: str, *, field: str = "the value") -> str:
    """Return ``text`` quoted for a ``#SBATCH`` line.

    Args:
        field: its name in an error.

    Raises:
        UnwritableValueError: the value has a character that cannot be quoted; the message names the field.
    """
    refuse_unwritable(text, _UNWRITABLE, field=field, place="an #SBATCH line")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def refuse_unwritable(text: str, characters: dict[str, str], *, field: str, place: str) -> None:
    """Refuse a text that contains one of ``characters`` or a lone surrogate.

    Args:
        characters: the characters that cannot be written there, with their names.
        field: the name of the text in an error.
        place: the name of the place in an error.

    Raises:
        UnwritableValueError: the text contains such a character.
    """
    forbidden = next((name for character, name in characters.items() if character in text), None)
    surrogate = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
    if forbidden is None and surrogate is not None:
        # Python decodes a byte of an argument that is not UTF-8 to one of these (surrogateescape).
        if "\udc80" <= surrogate <= "\udcff":
            raise UnwritableValueError(
                f"{field} is {text!r}, which is not UTF-8 (byte 0x{ord(surrogate) - 0xDC00:02x}); {place} cannot carry "
                "it: rename the file, or write the text in UTF-8"
            )
        forbidden = "half of a character (a lone surrogate)"
    if forbidden is not None:
        raise UnwritableValueError(f"{field} is {text!r}, which holds {forbidden}; {place} cannot carry it: remove it")


@dataclass(frozen=True, slots=True)
class Directive:
    """One ``#SBATCH --flag=value`` line.

    Args:
        flag: the long flag without its dashes.
        value: its value; None for a flag without one.
        field: the field of the job file that it comes from, for errors.
    """

    flag: str
    value: str | None
    field: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"--{self.flag}"
        return f"--{self.flag}={quote_value(self.value, field=self.field or f'--{self.flag}')}"


def directives_for(spec: JobSpec, *, run_id: str | None) -> tuple[Directive, ...]:
    """Return the directives of a job, in the order of the script.

    Args:
        run_id: the run's id, for output in the run directory; None for a script that a person passes to sbatch: its
            output is in the directory of submission, because Slurm creates no directories.

    Raises:
        UnwritableValueError: a value has a character that no directive can contain; the message names the field.
    """
    directives = (
        Directive("job-name", spec.name, "name"),
        *_array(spec),
        *request_of(spec),
        *_extras(spec.resources),
        *_output(spec, run_id),
        *_recovery(spec),
    )
    for directive in directives:
        # Raises if the value cannot be written.
        str(directive)
    return directives


def request_of(spec: JobSpec) -> tuple[Directive, ...]:
    """Return the directives that the fields of ``resources`` mean, in their order; salloc takes them too."""
    return (*_size(spec), *_unchanged(spec.resources))


def _array(spec: JobSpec) -> Iterator[Directive]:
    if spec.sweep is not None:
        at_once = "" if spec.max_parallel is None else f"%{spec.max_parallel}"
        yield Directive("array", f"0-{count_elements(spec.sweep) - 1}{at_once}", "sweep")


def _size(spec: JobSpec) -> Iterator[Directive]:
    resources = spec.resources
    if isinstance(resources.nodes, NodeRange):
        yield Directive("nodes", str(resources.nodes), "resources.nodes")
        # With --ntasks-per-node, sbatch asks for the tasks of the smallest number of nodes, and a job with one task on
        # each node gets no more nodes than that (measured). srun starts the tasks of the number that the job got.
        cpus_of_node = spec.tasks_per_node * spec.cpus_per_task
        yield Directive("mincpus", str(cpus_of_node), "resources.cpus_per_task")
    else:
        yield Directive("nodes", str(resources.nodes + resources.spare_nodes), "resources.nodes")
        yield Directive("ntasks-per-node", str(spec.tasks_per_node), "resources.tasks_per_node")
    gpus = str(resources.gpus_per_node)
    if resources.gpu_type:
        gpus = f"{resources.gpu_type}:{gpus}"
    gres = [f"{name}:{count}" for name, count in resources.gres.items()]
    request = resources.gpu_request if spec.uses_gpus else "none"
    if request == "gres":
        gres.insert(0, f"gpu:{gpus}")
    elif request == "gpus-per-node":
        yield Directive("gpus-per-node", gpus, "resources.gpus_per_node")
    if gres:
        yield Directive("gres", ",".join(gres), "resources.gres")
    yield Directive("cpus-per-task", str(spec.cpus_per_task), "resources.cpus_per_task")


def _unchanged(resources: Resources) -> Iterator[Directive]:
    """Yield the directives whose value is that of a field."""
    for flag, name in FIELDS_WRITTEN_UNCHANGED.items():
        value = getattr(resources, name)
        if value is None or value is False:
            continue
        yield Directive(flag, None if value is True else str(value), f"resources.{name}")


def _extras(resources: Resources) -> Iterator[Directive]:
    for flag, value in sorted(resources.sbatch.items()):
        yield Directive(flag, None if value is True else str(value), f"resources.sbatch.{flag}")


def _output(spec: JobSpec, run_id: str | None) -> Iterator[Directive]:
    # Patterns, so that jobs of one directory do not share a log.
    by_hand = "%x-%j.out" if spec.sweep is None else "%x-%A_%a.out"
    log = by_hand if run_id is None else _batch_log(spec, run_id)
    yield Directive("output", log, "run_root")
    yield Directive("error", log, "run_root")
    yield Directive("open-mode", "append")


def _batch_log(spec: JobSpec, run_id: str) -> str:
    if "\\" in spec.run_root:
        # sbatch removes a backslash from the name of a log, and a backslash turns off the escape of a percent sign
        # (sbatch(1), "filename pattern"; measured on 22.05.8).
        raise UnwritableValueError(
            f"run_root is {spec.run_root!r}, which holds a backslash; Slurm cannot write logs there: rename it"
        )
    directory = f"{spec.run_root.rstrip('/')}/{spec.name}/{run_id}".replace("%", "%%")
    # Slurm creates no directories, and those of the elements do not exist yet.
    return f"{directory}/batch.log" if spec.sweep is None else f"{directory}/logs/%A_%a.log"


def _recovery(spec: JobSpec) -> Iterator[Directive]:
    yield Directive("requeue" if spec.requeue.left_to_slurm else "no-requeue", None, "requeue.causes")
    if spec.may_lose_nodes:
        yield Directive("no-kill", None, "resources.min_nodes")
    if spec.signal_lead is not None:
        # Never "B:", which signals the batch shell only.
        yield Directive("signal", f"USR2@{round(spec.signal_lead.total_seconds())}", "requeue.signal_lead")
