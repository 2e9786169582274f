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
from hpcddp.jobfile.resources import FIELDS_WRITTEN_UNCHANGED, REFUSED_FLAGS, fields_of_gres
from hpcddp.jobfile.slurm_flags import SBATCH
from hpcddp.script.directives import Flag, signal_name
from hpcddp.script.launch import Launch
from hpcddp.script.parse import Script

Ranks = Literal["launcher", "own", "tasks", "alone"]
"""How the ranks of a node are started: by torchrun or accelerate; by the program itself, as one task; as tasks of srun;
or not at all, because the batch script runs the program once."""
Outcome = Literal["taken", "setup line", "dropped", "to do"]
"""What became of a part of the script: ``taken`` into a field; a line of ``environment.setup``; ``dropped``, not needed
for the reason in the row; ``to do``, left to the user."""
_CONTAINER: Final = ("environment", "container")
_MASKED_NAME: Final = r"[A-Za-z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)(?:_[A-Za-z0-9_]*)?"
SECRET: Final = re.compile(rf"\b({_MASKED_NAME})=('[^']+'|\"[^\"$`]+\"|[^\s'\"$`;&|()]+)", re.IGNORECASE)
"""The assignment of a value, which stands in the script, to what may be a secret."""
_ALIASES: Final = MappingProxyType({"tasks-per-node": "ntasks-per-node", "cluster": "clusters"})
NO_NUMBER: Final = re.compile(r"--(?:nodes|ntasks|ntasks-per-node|cpus-per-task|cpus-per-gpu)=(?![0-9][0-9kKmM,:-]*\Z)")
"""A flag that takes a number, and has none."""
_GPU_FLAGS: Final = ("gres", "gpus-per-node", "gpus-per-task", "gpus")
COUNT_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "nodes": "nodes",
        "ntasks": "tasks_per_node",
        "ntasks-per-node": "tasks_per_node",
        "cpus-per-task": "cpus_per_task",
        "cpus-per-gpu": "cpus_per_task",
        **dict.fromkeys(_GPU_FLAGS, "gpus_per_node"),
    }
)
"""The flags that state numbers, with the fields of ``resources`` that follow from all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a part of the script.

    Args:
        line: the number of its line, from 1.
        text: the part, as it is written; without the value of what may be a secret.
        outcome: what became of it.
        reason: the field and its value, or why it is dropped or open.
        field: the key path of the field that it became; None for none.
    """

    line: int
    text: str
    outcome: Outcome
    reason: str
    field: str | None = None


@dataclass(slots=True)
class Draft:
    """The values of the job file so far, by key path, and the rows of the table."""

    values: dict[Path, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def take(self, line: int, text: str, key: Path, value: object, note: str = "") -> None:
        """Set a field, and say that a part of the script became it.

        Args:
            line: the line of the script.
            text: what stands there.
            key: the key path of the field.
            note: what the user should know about it.
        """
        self.values[key] = value
        self.tell(line, text, "taken", f"{dotted(key)}; {note}" if note else dotted(key), key)

    def tell(self, line: int, text: str, outcome: Outcome, reason: str, key: Path | None = None) -> None:
        """Add the row of a part of the script."""
        shown, why = (SECRET.sub(r"\1=...", part) for part in (text, reason))
        field_name = None if key is None else dotted(key)
        self.rows.append(Row(line=line, text=shown, outcome=outcome, reason=why, field=field_name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The numbers that a script requests.

    Args:
        nodes: the smallest number of nodes.
        tasks_per_node: Slurm tasks on each node.
        cpus_per_task: CPUs of each Slurm task.
        gpus_per_node: GPUs on each node.
        gpu_type: their kind; None if it is not given.
        gpu_request: how sbatch is asked for them.
        is_uneven: whether a number for all nodes does not say what each node has.
    """

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    gpu_type: str | None
    gpu_request: str
    is_uneven: bool


def effective_flags(script: Script, draft: Draft) -> dict[str, Flag]:
    """Return the flags that count, by their long name; the other ``#SBATCH`` lines become rows of the table."""
    for line in script.directive_lines:
        if line.is_ignored:
            why = f"sbatch does not read it: it stands after the first command (line {script.first_command})"
            draft.tell(line.number, line.text, "to do", f"{why}; to have it, write it into the job file")
        elif not line.flags and line.problem is not None:
            draft.tell(line.number, line.text, "to do", f"sbatch refuses this line: it {line.problem}")
        elif not line.flags:
            draft.tell(line.number, line.text, "dropped", "it has no flag of its own")
    flags: dict[str, Flag] = {}
    for read in script.flags:
        flag = replace(read, name=_ALIASES.get(read.name, read.name))
        earlier = flags.get(flag.name)
        if NO_NUMBER.match(flag_text(flag)):
            flag = replace(flag, problem=f"gives --{flag.name} no number")
        if flag.problem is not None and not flag.is_unknown:
            draft.tell(flag.line, flag_text(flag), "to do", f"sbatch refuses it: the line {flag.problem}")
            continue
        if earlier is not None and flag.name == "mail-type":
            # sbatch adds them up (measured on Slurm 22.05.8).
            draft.tell(earlier.line, flag_text(earlier), "taken", "resources.mail_type")
            flag = replace(flag, value=f"{earlier.value},{flag.value}")
        elif earlier is not None:
            why = f"line {flag.line} gives --{flag.name} again, and that counts"
            draft.tell(earlier.line, flag_text(earlier), "dropped", why)
        flags[flag.name] = flag
    return flags


def flag_text(flag: Flag) -> str:
    """Return a flag as it is written in its long form; a word that is no flag as it is."""
    if flag.is_word:
        return flag.name
    return f"--{flag.name}" if flag.value is None else f"--{flag.name}={flag.value}"


def read_counts(flags: Mapping[str, Flag], launch: Launch) -> Counts:
    """Return the numbers of nodes, tasks, CPUs and GPUs; those of srun override those of sbatch."""
    flags_of_srun = {flag.name: flag for flag in launch.srun}

    def number(name: str) -> int | None:
        """Return the number that a flag gives; None if it gives none, or 0."""
        for flag in (flags_of_srun.get(name), flags.get(name)):
            if flag is not None and re.fullmatch("[0-9]{1,7}", flag.value or ""):
                return int(flag.value or 0) or None
        return None

    tasks = number("ntasks")
    tasks_per_node = number("ntasks-per-node")
    nodes = 1
    is_uneven = False
    if "nodes" in flags:
        least = re.match("[1-9][0-9]{0,6}", flags["nodes"].value or "")
        nodes = 1 if least is None else int(least[0])
        is_uneven = "-" in (flags["nodes"].value or "")
    elif tasks is not None and tasks_per_node is not None:
        nodes = -(-tasks // tasks_per_node)
    else:
        is_uneven = tasks is not None and tasks > 1
    if tasks is not None and (tasks_per_node is None or nodes * tasks_per_node > tasks):
        tasks_per_node = max(1, tasks // nodes)
        is_uneven = is_uneven or tasks % nodes > 0
    tasks_per_node = tasks_per_node or 1
    gpu_request = "gpus-per-node" if "gpus-per-node" in flags else "gres"
    gpus_per_node, gpu_type = _read_gpus(flags, nodes=nodes, tasks_per_node=tasks_per_node)
    if not gpus_per_node:
        # Where a site gives whole nodes, srun alone may ask for GPUs.
        gpu_request = "none"
        gpus_per_node, _ = _read_gpus(flags_of_srun, nodes=nodes, tasks_per_node=tasks_per_node)
    cpus_per_task = number("cpus-per-task")
    if cpus_per_task is None:
        cpus_per_task = max(1, (number("cpus-per-gpu") or 0) * max(gpus_per_node, 1) // tasks_per_node)
    return Counts(
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        cpus_per_task=cpus_per_task,
        gpus_per_node=gpus_per_node,
        gpu_type=gpu_type,
        gpu_request=gpu_request,
        is_uneven=is_uneven,
    )


def _read_gpus(flags: Mapping[str, Flag], *, nodes: int, tasks_per_node: int) -> tuple[int, str | None]:
    """Return the number of GPUs of a node, and their kind."""
    for name in _GPU_FLAGS:
        text = flags[name].value or "" if name in flags else ""
        if name != "gres":
            # The other flags are written as gpu of --gres is, without its name.
            text = re.sub("(^|,)(?=.)", r"\1gpu:", text)
        fields = fields_of_gres(text)
        counts = [int(value) for key, value in fields if key == "gpus_per_node" and value.isdecimal()]
        if counts:
            gpus = sum(counts)
            if name == "gpus-per-task":
                gpus *= tasks_per_node
            elif name == "gpus":
                gpus = -(-gpus // nodes)
            return gpus, dict(fields).get("gpu_type")
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
    ranks_per_node = counts.gpus_per_node or counts.tasks_per_node
    if not counts.gpus_per_node and ranks == "launcher":
        ranks_per_node = stated or counts.tasks_per_node
    elif not counts.gpus_per_node and ranks == "alone":
        ranks_per_node = 1
    nodes: str | int = counts.nodes
    if "nodes" in flags and not (flags["nodes"].value or "").isdecimal():
        nodes = flags["nodes"].value or ""
    cpus_per_rank = max(1, counts.tasks_per_node * counts.cpus_per_task // ranks_per_node)
    resources: dict[str, object] = {"nodes": nodes}
    if counts.gpus_per_node:
        resources["gpus_per_node"] = counts.gpus_per_node
        if counts.gpu_request != "gres":
            resources["gpu_request"] = counts.gpu_request
    if counts.gpu_type is not None:
        resources["gpu_type"] = counts.gpu_type
    if not counts.gpus_per_node and ranks_per_node > 1:
        resources["tasks_per_node"] = ranks_per_node
    # Without it, submit says that each GPU has one CPU.
    if cpus_per_rank > 1 or "cpus-per-task" in flags:
        resources["cpus_per_task"] = cpus_per_rank
    draft.values = {("resources", name): value for name, value in resources.items()} | draft.values
    numbers = f"{counted(ranks_per_node, 'rank')} on a node, {counted(cpus_per_rank, 'CPU')} for each"
    _tell_counts(flags, counts, numbers, draft)


def _tell_counts(flags: Mapping[str, Flag], counts: Counts, numbers: str, draft: Draft) -> None:
    """Add the row of each flag that states a number; ``numbers`` says what the job has."""
    for name, count_field in COUNT_FIELDS.items():
        if name not in flags or (name == "gres" and not counts.gpus_per_node):
            continue
        flag = flags[name]
        key = ("resources", count_field)
        if count_field == "tasks_per_node" and counts.gpus_per_node:
            key = ("resources", "gpus_per_node")
        reason = dotted(key)
        if "tasks" in name or "cpus" in name:
            reason = f"{reason}; {numbers}"
        outcome: Outcome = "taken"
        if counts.is_uneven and name in {"ntasks", "gpus"}:
            outcome = "to do"
            reason = f"it is a number for all nodes, and the job file has {numbers}: change it, if that is not meant"
        draft.tell(flag.line, flag_text(flag), outcome, reason, key)


def take_other_flags(flags: Mapping[str, Flag], draft: Draft) -> None:
    """Set the fields of the flags that state no number, and drop those that hpcddp writes itself."""
    for flag in flags.values():
        if flag.name == "gres":
            for path, count in fields_of_gres(flag.value or ""):
                section, _, name = path.partition(".")
                if section == "gres":
                    draft.take(flag.line, f"--gres={name}:{count}", ("resources", "gres", name), count)
        elif flag.name not in COUNT_FIELDS and flag.name != "chdir":
            _take_flag(flag, draft)


def _take_flag(flag: Flag, draft: Draft) -> None:
    name = flag.name
    text = flag_text(flag)
    if name in KEYS_OF_FLAGS:
        take_field(flag, flag.line, text, draft)
    elif name == "array":
        sweep = "write a sweep with the values that each element takes in place of $SLURM_ARRAY_TASK_ID"
        draft.tell(flag.line, text, "to do", f"one job file is one run; {sweep}, for example sweep: {{seed: 0..9}}")
    elif name == "export":
        draft.tell(flag.line, text, "dropped", REFUSED_FLAGS["export"])
        take_exported(flag, flag.line, draft)
    elif name in REFUSED_FLAGS:
        is_of_field = REFUSED_FLAGS[name].startswith("it has its own field")
        draft.tell(flag.line, text, "to do" if is_of_field else "dropped", REFUSED_FLAGS[name])
    else:
        note = "" if SBATCH.long_flags_of(name) else "sbatch itself does not have it: a plugin of your site must"
        draft.take(flag.line, text, ("resources", "sbatch", name), True if flag.value is None else flag.value, note)


def take_field(flag: Flag, line: int, text: str, draft: Draft) -> None:
    """Set the field of a flag of sbatch or srun; one of srun without a field of its own is taken as it is written.

    Args:
        line: the line of the script in which it stands.
        text: the flag as the table shows it.
        draft: gets the field and the row.
    """
    key = KEYS_OF_FLAGS.get(flag.name, ("resources", "srun", flag.name))
    value: object = True
    if flag.value is not None or key[0] != "resources":
        value = _VALUES_OF_FLAGS.get(flag.name, str)(flag.value or "")
    note = _NOTES_OF_FLAGS.get(flag.name, "")
    if flag.name == "job-name" and value != flag.value:
        note = f"hpcddp can name it {value}"
    draft.take(line, text, key, value, note)
    if key[:2] == _CONTAINER:
        draft.values[(*_CONTAINER, "runtime")] = "pyxis"
    elif flag.name == "signal":
        signal = signal_name((flag.value or "").partition("@")[0])
        if ":" not in signal and signal != "USR2":
            draft.take(line, text, ("requeue", "command_signal"), signal)


def take_exported(flag: Flag, line: int, draft: Draft) -> None:
    """Set the variables that ``--export`` of sbatch or srun gives values."""
    for part in (flag.value or "").split(","):
        name, equals, value = part.partition("=")
        if equals:
            draft.take(line, f"--export={part}", ("environment", "env", name), value)


def job_name_of(text: str) -> str:
    """Return a text as the name of a job."""
    without_patterns = re.sub(r"%[0-9]*[A-Za-z]", "", text)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", without_patterns).strip("._-")[:64]
    if name in INTERACTIVE_JOB_NAMES:
        name = f"{name}-job"
    return name if re.fullmatch(NAME_PATTERN, name, re.ASCII) else "job"


def _memory(text: str) -> str:
    # sbatch takes a number without a unit for megabytes, and 0 for all memory.
    return f"{text}M" if re.fullmatch("[1-9][0-9]*", text) else text


KEYS_OF_FLAGS: Final[Mapping[str, Path]] = MappingProxyType(
    {
        **{flag: ("resources", name) for flag, name in FIELDS_WRITTEN_UNCHANGED.items()},
        "gpu-bind": ("resources", "srun", "gpu-bind"),
        "job-name": ("name",),
        "no-requeue": ("requeue", "causes"),
        "signal": ("requeue", "signal_lead"),
        "container-image": (*_CONTAINER, "image"),
        "container-mounts": (*_CONTAINER, "mounts"),
        "container-workdir": (*_CONTAINER, "workdir"),
    }
)
"""The fields of flags of sbatch, and of those of srun and of its plugin pyxis."""
_VALUES_OF_FLAGS: Final[Mapping[str, Callable[[str], object]]] = MappingProxyType(
    {
        "container-mounts": lambda text: text.split(","),
        "job-name": job_name_of,
        "mail-type": lambda text: text.replace(" ", ""),
        **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _memory),
        "no-requeue": lambda _: [],
        "signal": lambda text: f"{text.partition('@')[2] or 60}s",
    }
)
_NOTES_OF_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "container-image": "hpcddp must be installed in the image",
        "no-requeue": "no cause: the job is never requeued",
        "signal": "hpcddp signals the ranks, not the batch script",
    }
)
