"""What the ``#SBATCH`` lines of a script request, as fields of the job file, and the job file that is being made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from hpcddp.errors import counted
from hpcddp.jobfile.document import Path, dotted
from hpcddp.jobfile.fields import INTERACTIVE_JOB_NAMES, NAME_PATTERN
from hpcddp.jobfile.job import find_key
from hpcddp.jobfile.resources import FIELDS_WRITTEN_UNCHANGED, REFUSED_FLAGS, SRUN_VARIABLES, fields_of_gres
from hpcddp.jobfile.slurm_flags import SBATCH
from hpcddp.script.directives import Flag, signal_name
from hpcddp.script.launch import Launch
from hpcddp.script.parse import Script

CONTAINER_FLAGS: Final = MappingProxyType(
    {"container-image": "image", "container-mounts": "mounts", "container-workdir": "workdir"}
)
"""Flags of the plugin pyxis, for sbatch and srun, and the fields of ``environment.container``."""
Ranks = Literal["launcher", "own", "tasks", "alone"]
"""How the ranks of a node are started: by torchrun or accelerate; by the program itself, as one task; as tasks of srun;
or not at all, because the batch script runs the program once."""

_ALIASES: Final = MappingProxyType({"tasks-per-node": "ntasks-per-node", "cluster": "clusters"})
_GPU_FLAGS: Final = ("gres", "gpus-per-node", "gpus-per-task", "gpus")
_COUNT_FLAGS: Final = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "cpus-per-gpu", *_GPU_FLAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The numbers that a script requests.

    Args:
        nodes: the smallest number of nodes.
        most_nodes: the largest, which is the same unless the script gives a range.
        tasks_per_node: Slurm tasks on each node.
        cpus_per_task: CPUs of each Slurm task.
        gpus_per_node: GPUs on each node.
        gpu_type: their kind; None if it is not given.
    """

    nodes: int
    most_nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    gpu_type: str | None


def effective_flags(script: Script, draft: Draft) -> dict[str, Flag]:
    """Return the flags that count, by their long name; the other ``#SBATCH`` lines become rows of the table."""
    flags: dict[str, Flag] = {}
    for line in script.directive_lines:
        if line.is_ignored:
            draft.leave_open(
                line.number,
                line.text,
                f"sbatch does not read it: it stands after the first command (line {script.first_command}); to have "
                "it, write it into the job file",
            )
        elif line.flags:
            for flag in line.flags:
                _add_flag(flags, flag, draft)
        elif line.problem is not None:
            draft.leave_open(line.number, line.text, f"sbatch refuses this line: it {line.problem}")
        elif not line.words:
            draft.drop(line.number, line.text, "it has no flag")
        else:
            draft.leave_open(
                line.number, line.text, "sbatch takes its words for the value of a flag in a line before it"
            )
    return flags


def flag_text(flag: Flag) -> str:
    """Return a flag as it is written in its long form; a word that is no flag as it is."""
    if flag.is_word:
        return flag.name
    return f"--{flag.name}" if flag.value is None else f"--{flag.name}={flag.value}"


def _add_flag(flags: dict[str, Flag], flag: Flag, draft: Draft) -> None:
    name = _ALIASES.get(flag.name, flag.name)
    earlier = flags.get(name)
    if flag.is_unknown:
        _drop_earlier(earlier, flag, draft)
        flags[name] = flag
    elif flag.problem is not None:
        draft.leave_open(flag.line, flag_text(flag), f"sbatch refuses it: the line {flag.problem}")
    elif "hetjob" in flags or name == "hetjob":
        flags.setdefault("hetjob", flag)
        draft.leave_open(
            flag.line, flag_text(flag), "a heterogeneous job is several jobs, and a job file is one: write one for each"
        )
    elif earlier is not None and name == "mail-type":
        # sbatch adds them up (measured on Slurm 22.05.8).
        draft.note_taken(earlier.line, flag_text(earlier), ("resources", "mail_type"))
        flags[name] = replace(flag, name=name, value=f"{earlier.value},{flag.value}")
    else:
        _drop_earlier(earlier, flag, draft)
        flags[name] = replace(flag, name=name)


def _drop_earlier(earlier: Flag | None, flag: Flag, draft: Draft) -> None:
    """Say in the row of an earlier flag of the same name that a later one counts."""
    if earlier is not None:
        draft.drop(earlier.line, flag_text(earlier), f"line {flag.line} gives --{flag.name} again, and that counts")


def read_counts(flags: Mapping[str, Flag], launch: Launch | None, draft: Draft) -> Counts:
    """Return the numbers of nodes, tasks, CPUs and GPUs; those of srun override those of sbatch."""
    flags_of_srun = {flag.name: flag for flag in launch.srun} if launch is not None else {}

    def number(name: str) -> int | None:
        """Return the number that a flag gives; None if it gives none, or 0."""
        for flag in (flags_of_srun.get(name), flags.get(name)):
            if flag is not None and re.fullmatch("[0-9]{1,7}", flag.value or "", re.ASCII):
                return int(flag.value or 0) or None
        return None

    nodes, most_nodes = _read_nodes(flags, number, draft)
    tasks_per_node = _read_tasks_per_node(flags, number, draft, nodes=nodes)
    gpus_per_node, gpu_type = _read_gpus(flags, nodes=nodes, tasks_per_node=tasks_per_node)
    cpus_per_task = number("cpus-per-task")
    cpus_per_gpu = number("cpus-per-gpu")
    if cpus_per_task is None and cpus_per_gpu is not None:
        cpus_per_task = max(1, cpus_per_gpu * max(gpus_per_node, 1) // tasks_per_node)
    return Counts(
        nodes=nodes,
        most_nodes=most_nodes,
        tasks_per_node=tasks_per_node,
        cpus_per_task=cpus_per_task or 1,
        gpus_per_node=gpus_per_node,
        gpu_type=gpu_type,
    )


def _read_tasks_per_node(
    flags: Mapping[str, Flag], number: Callable[[str], int | None], draft: Draft, *, nodes: int
) -> int:
    """Return the number of tasks on each node: ``--ntasks-per-node``, or fewer if ``--ntasks`` asks for fewer."""
    tasks_per_node = number("ntasks-per-node")
    tasks = number("ntasks")
    if tasks is None:
        return tasks_per_node or 1
    if tasks_per_node is not None and nodes * tasks_per_node <= tasks:
        return tasks_per_node
    tasks_per_node = max(1, tasks // nodes)
    if tasks % nodes and "ntasks" in flags:
        draft.leave_open(
            flags["ntasks"].line,
            flag_text(flags["ntasks"]),
            f"{tasks} tasks do not divide over {nodes} nodes evenly, and every node of a job has the same number of "
            f"ranks; the job file has {tasks_per_node}",
        )
    return tasks_per_node


def _read_nodes(flags: Mapping[str, Flag], number: Callable[[str], int | None], draft: Draft) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes."""
    given = flags.get("nodes")
    tasks = number("ntasks")
    tasks_per_node = number("ntasks-per-node")
    if given is None:
        nodes = 1
        if tasks is not None and tasks_per_node is not None:
            nodes = max(1, -(-tasks // tasks_per_node))
        elif tasks is not None and tasks > 1 and "ntasks" in flags:
            draft.leave_open(
                flags["ntasks"].line,
                "no --nodes",
                f"Slurm may spread {tasks} tasks over any nodes; the job file has them on one: change resources.nodes",
            )
        return nodes, nodes
    numbers = re.fullmatch("([1-9][0-9]{0,6})(?:-([1-9][0-9]{0,6}))?", given.value or "", re.ASCII)
    if numbers is None:
        draft.leave_open(
            given.line, flag_text(given), "resources.nodes is a number or a range such as 2-8; the job file has 1"
        )
        return 1, 1
    least = int(numbers[1])
    most = int(numbers[2] or least)
    if most != least and (tasks is not None or "gpus" in flags):
        total = "GPUs" if tasks is None else "tasks"
        draft.leave_open(
            given.line,
            flag_text(given),
            f"the script has one number of {total} for all nodes, and a job file has one for each node; the job file "
            f"has {counted(least, 'node')}",
        )
        return least, least
    return least, most


def _read_gpus(flags: Mapping[str, Flag], *, nodes: int, tasks_per_node: int) -> tuple[int, str | None]:
    """Return the number of GPUs of a node, and their kind."""
    for name in _GPU_FLAGS:
        flag = flags.get(name)
        if flag is None or flag.value is None:
            continue
        # The other flags are written as gpu of --gres is, without its name.
        text = flag.value if name == "gres" else ",".join(f"gpu:{part}" for part in flag.value.split(","))
        fields = fields_of_gres(text)
        counts = [int(value) for field, value in fields if field == "gpus_per_node" and value.isdecimal()]
        if not counts:
            continue
        gpu_type = next((value for field, value in fields if field == "gpu_type"), None)
        count = sum(counts)
        if name == "gpus-per-task":
            return count * tasks_per_node, gpu_type
        if name == "gpus" and count > 0:
            return max(1, count // nodes), gpu_type
        return count, gpu_type
    return 0, None


def take_counts(flags: Mapping[str, Flag], counts: Counts, ranks: Ranks, stated: int | None, draft: Draft) -> None:
    """Set the numbers of the job file: nodes, ranks, CPUs of a rank, GPUs.

    Args:
        flags: the flags of sbatch that count.
        counts: what they and srun's request.
        ranks: how the ranks of a node are started.
        stated: the number of ranks on a node that the launcher's options state; None if they do not.
        draft: gets the fields and the rows.
    """
    gpus = counts.gpus_per_node
    cpus_of_node = counts.tasks_per_node * counts.cpus_per_task
    if gpus:
        ranks_per_node = gpus
    elif ranks == "launcher":
        ranks_per_node = stated or counts.tasks_per_node
    elif ranks == "alone":
        ranks_per_node = 1
    else:
        ranks_per_node = counts.tasks_per_node
    cpus_per_rank = max(1, cpus_of_node // ranks_per_node)
    nodes = counts.nodes if counts.most_nodes == counts.nodes else f"{counts.nodes}-{counts.most_nodes}"
    resources: dict[str, object] = {"nodes": nodes}
    if gpus:
        resources["gpus_per_node"] = gpus
        if counts.gpu_type is not None:
            resources["gpu_type"] = counts.gpu_type
    elif ranks_per_node > 1:
        resources["tasks_per_node"] = ranks_per_node
    resources["cpus_per_task"] = cpus_per_rank
    for name, value in resources.items():
        draft.values["resources", name] = value
    _note_counts(flags, counts, ranks, (ranks_per_node, cpus_per_rank), draft)


def _note_counts(
    flags: Mapping[str, Flag], counts: Counts, ranks: Ranks, numbers: tuple[int, int], draft: Draft
) -> None:
    """Add the row of each flag that states a number; ``numbers`` are the ranks of a node and the CPUs of a rank."""
    ranks_per_node, cpus_per_rank = numbers
    started = {
        "launcher": "the launcher starts them, as one task on each node",
        "own": "the program starts them, as one task on each node",
        "tasks": "one task each",
        "alone": "one task, because the script runs the program once",
    }
    ranks_note = f"{counted(ranks_per_node, 'rank')} on a node: {started[ranks]}"
    cpus_note = f"{counted(cpus_per_rank, 'CPU')} for each of {counted(ranks_per_node, 'rank')}"
    keys = {
        "nodes": (("resources", "nodes"), ""),
        "ntasks": (("resources", "gpus_per_node" if counts.gpus_per_node else "tasks_per_node"), ranks_note),
        "ntasks-per-node": (("resources", "gpus_per_node" if counts.gpus_per_node else "tasks_per_node"), ranks_note),
        "cpus-per-task": (("resources", "cpus_per_task"), cpus_note),
        "cpus-per-gpu": (("resources", "cpus_per_task"), cpus_note),
        **dict.fromkeys(_GPU_FLAGS, (("resources", "gpus_per_node"), "")),
    }
    rows_so_far = {(row.line, row.text) for row in draft.rows}
    for name, (key, note) in keys.items():
        flag = flags.get(name)
        if flag is None or (flag.line, flag_text(flag)) in rows_so_far:
            continue
        if name != "gres" or counts.gpus_per_node:
            draft.note_taken(flag.line, flag_text(flag), key, note)


def take_other_flags(flags: Mapping[str, Flag], draft: Draft) -> None:
    """Set the fields of the flags that state no number, and drop those that hpcddp writes itself."""
    for name, flag in flags.items():
        reader = _READERS.get(name)
        if name == "gres":
            _take_other_gres(flag, draft)
        elif name in _COUNT_FLAGS or name in {"hetjob", "chdir"}:
            continue
        elif reader is not None:
            reader(flag, draft)
        elif name in CONTAINER_FLAGS:
            take_container(flag, flag_text(flag), draft)
        elif name in FIELDS_WRITTEN_UNCHANGED:
            key = ("resources", FIELDS_WRITTEN_UNCHANGED[name])
            draft.take(flag.line, flag_text(flag), key, _value_for(key, flag))
        elif name in SRUN_VARIABLES:
            draft.take(flag.line, flag_text(flag), ("environment", "env", SRUN_VARIABLES[name]), flag.value or "")
        elif name in REFUSED_FLAGS and REFUSED_FLAGS[name].startswith("it has its own field"):
            draft.leave_open(flag.line, flag_text(flag), REFUSED_FLAGS[name])
        elif name in REFUSED_FLAGS:
            draft.drop(flag.line, flag_text(flag), REFUSED_FLAGS[name])
        else:
            _take_into_sbatch(flag, draft)


def _value_for(key: Path, flag: Flag) -> object:
    """Return the value of a flag in the type of the field that has it; a value of another type stays a text."""
    key_type = find_key(key)
    types = frozenset() if key_type is None else key_type.types
    if flag.value is None and bool in types:
        return True
    value = flag.value or ""
    is_number = int in types and re.fullmatch("-?[0-9]{1,18}", value, re.ASCII) is not None
    return int(value) if is_number else value


def _take_into_sbatch(flag: Flag, draft: Draft) -> None:
    value = True if flag.value is None else flag.value
    note = "" if SBATCH.long_flags_of(flag.name) else "sbatch itself does not have it: a plugin of your site must"
    draft.take(flag.line, flag_text(flag), ("resources", "sbatch", flag.name), value, note)


def take_container(flag: Flag, text: str, draft: Draft) -> None:
    """Set a field of the container from a flag of pyxis; ``text`` is the flag as the table shows it."""
    field = CONTAINER_FLAGS[flag.name]
    value: object = flag.value or ""
    if field == "mounts":
        value = (flag.value or "").split(",")
    draft.values["environment", "container", "runtime"] = "pyxis"
    note = "hpcddp must be installed in the image" if field == "image" else ""
    draft.take(flag.line, text, ("environment", "container", field), value, note)


def _take_other_gres(flag: Flag, draft: Draft) -> None:
    for path, count in fields_of_gres(flag.value or ""):
        section, _, name = path.partition(".")
        if section == "gres":
            draft.take(flag.line, f"--gres={name}:{count}", ("resources", "gres", name), count)


def _take_name(flag: Flag, draft: Draft) -> None:
    name = job_name_of(flag.value or "")
    note = "" if name == flag.value else f"{name}: a name has letters, digits, '.', '_' and '-'"
    if flag.value in INTERACTIVE_JOB_NAMES:
        note = f"{name}: Lightning takes a job named {flag.value} for an interactive one, and saves nothing"
    draft.take(flag.line, flag_text(flag), ("name",), name, note)


def job_name_of(text: str) -> str:
    """Return a text as the name of a job."""
    without_patterns = re.sub(r"%[0-9]*[A-Za-z]", "", text)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", without_patterns, flags=re.ASCII).strip("._-")[:64]
    if name in INTERACTIVE_JOB_NAMES:
        name = f"{name}-job"
    return name if re.fullmatch(NAME_PATTERN, name, re.ASCII) else "job"


def _take_mail_type(flag: Flag, draft: Draft) -> None:
    draft.take(flag.line, flag_text(flag), ("resources", "mail_type"), (flag.value or "").replace(" ", ""))


def _take_time(flag: Flag, draft: Draft) -> None:
    value = flag.value or ""
    unlimited = {"0", "infinite", "unlimited"}
    draft.take(
        flag.line, flag_text(flag), ("resources", "time_limit"), "unlimited" if value.lower() in unlimited else value
    )


def _take_memory(flag: Flag, draft: Draft) -> None:
    value = flag.value or ""
    # sbatch takes a number without a unit for megabytes, and 0 for all memory.
    text = f"{value}M" if re.fullmatch("[1-9][0-9]*", value, re.ASCII) else value
    memory = 0 if re.fullmatch("0+[KMGT]?", value, re.ASCII) else text
    draft.take(flag.line, flag_text(flag), ("resources", FIELDS_WRITTEN_UNCHANGED[flag.name]), memory)


def _take_signal(flag: Flag, draft: Draft) -> None:
    target, _, rest = (flag.value or "").rpartition(":")
    number, _, seconds = rest.partition("@")
    signal = signal_name(number)
    lead = f"{seconds or 60}s"
    notes = []
    if "B" in target:
        notes.append("not to the batch script (B:), but to the ranks")
    draft.take(flag.line, flag_text(flag), ("requeue", "signal_lead"), lead, "; ".join(notes))
    if signal != "USR2" and "B" not in target:
        draft.take(flag.line, flag_text(flag), ("requeue", "command_signal"), signal)


def _take_no_requeue(flag: Flag, draft: Draft) -> None:
    draft.take(flag.line, flag_text(flag), ("requeue", "causes"), [], "no cause: the job is never requeued")


def _drop_requeue(flag: Flag, draft: Draft) -> None:
    draft.drop(flag.line, flag_text(flag), "hpcddp writes it: a job is requeued after the causes in requeue.causes")


def _take_export(flag: Flag, draft: Draft) -> None:
    draft.drop(flag.line, flag_text(flag), REFUSED_FLAGS["export"])
    for part in (flag.value or "").split(","):
        name, equals, value = part.partition("=")
        if equals:
            draft.take(flag.line, f"--export={part}", ("environment", "env", name), value)


def _leave_array(flag: Flag, draft: Draft) -> None:
    draft.leave_open(
        flag.line,
        flag_text(flag),
        "one job file is one run; write a sweep with the values that each element takes in place of "
        "$SLURM_ARRAY_TASK_ID, for example sweep: {seed: 0..9} and {seed} in command",
    )


_READERS: Final[Mapping[str, Callable[[Flag, Draft], None]]] = MappingProxyType(
    {
        "array": _leave_array,
        "export": _take_export,
        "job-name": _take_name,
        "mail-type": _take_mail_type,
        "mem": _take_memory,
        "mem-per-cpu": _take_memory,
        "mem-per-gpu": _take_memory,
        "no-requeue": _take_no_requeue,
        "requeue": _drop_requeue,
        "signal": _take_signal,
        "time": _take_time,
    }
)


Outcome = Literal["taken", "setup", "dropped", "open"]
"""What became of a part of the script: ``taken`` into a field; ``setup``, a line of ``environment.setup``; ``dropped``,
not needed for the reason in the row; ``open``, left to the user."""


SETUP: Final = ("environment", "setup")
_MASKED_NAME: Final = r"[A-Za-z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)(?:_[A-Za-z0-9_]*)?"
_MASKED: Final = re.compile(rf"\b({_MASKED_NAME}=)(?:'[^']*'|\"[^\"]*\"|\S)+", re.IGNORECASE)


def may_be_secret(name: str) -> bool:
    """Return whether the value of a variable of this name may be a secret."""
    return re.fullmatch(_MASKED_NAME, name, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a part of the script.

    Args:
        line: the number of its line, from 1.
        text: the part, as it is written; without the value of what may be a secret.
        outcome: what became of it.
        reason: the field and its value, or why it is dropped or open.
        key: the key path of the field that it became; None for none.
    """

    line: int
    text: str
    outcome: Outcome
    reason: str
    key: Path | None = None


@dataclass(slots=True)
class Draft:
    """The values of the job file so far, by key path, and the rows of the table."""

    values: dict[Path, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def take(self, line: int, text: str, key: Path, value: object, note: str = "") -> None:
        """Set a field.

        Args:
            line: the line of the script.
            text: what stands there.
            key: the key path of the field.
            note: what the user should know about it.
        """
        self.values[key] = value
        self.note_taken(line, text, key, note)

    def note_taken(self, line: int, text: str, key: Path, note: str = "") -> None:
        """Add the row of a part that is in a field which is set already, or elsewhere."""
        reason = dotted(key)
        if note:
            reason = f"{reason}; {note}"
        self._add(line, text, "taken", reason, key)

    def note_setup(self, line: int, text: str, note: str = "") -> None:
        """Add the row of a line of ``environment.setup``."""
        self._add(line, text, "setup", f"{dotted(SETUP)}; {note}" if note else dotted(SETUP), SETUP)

    def drop(self, line: int, text: str, why: str) -> None:
        """Add the row of a part that the job file does not need."""
        self._add(line, text, "dropped", why)

    def leave_open(self, line: int, text: str, why: str) -> None:
        """Add the row of a part that the user has to look at."""
        self._add(line, text, "open", why)

    def _add(self, line: int, text: str, outcome: Outcome, reason: str, key: Path | None = None) -> None:
        shown = _MASKED.sub(r"\1...", text)
        self.rows.append(Row(line=line, text=shown, outcome=outcome, reason=_MASKED.sub(r"\1...", reason), key=key))
