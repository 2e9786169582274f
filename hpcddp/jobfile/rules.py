"""Rules between the fields of a job file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from hpcddp.errors import counted, did_you_mean
from hpcddp.jobfile.batch_rules import (
    batch_reaches_every_rank,
    fixed_micro_batch_divides,
    groups_are_named,
    rule_fits_optimizer,
)
from hpcddp.jobfile.datasets import DATASETS
from hpcddp.jobfile.document import Path, dotted
from hpcddp.jobfile.environment import ACTIVATED, Container, unmountable
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.launchers import OWN, launcher_command_of
from hpcddp.jobfile.placeholders import run_placeholder_error
from hpcddp.jobfile.resources import NodeRange
from hpcddp.jobfile.sections import Requeue
from hpcddp.jobfile.slurm_flags import SBATCH, SRUN
from hpcddp.jobfile.units import format_duration

Finding = tuple[str, str]
"""The key path of an error, and the message."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule between fields.

    Args:
        reads: the key paths that it reads; the rule is skipped where one of them is wrong already.
    """

    reads: tuple[str, ...]
    find: Callable[[JobSpec], Iterator[Finding]]

    def depends_on(self, keys: Iterable[str]) -> bool:
        """Return whether the rule reads one of these key paths, or a part of one."""
        return any(
            f"{read}.".startswith(f"{key}.") or f"{key}.".startswith(f"{read}.") for key in keys for read in self.reads
        )


def rules_without(wrong: Iterable[Path]) -> list[Rule]:
    """Return the rules that read none of the key paths ``wrong``, whose values are wrong already."""
    faulty = [dotted(path) for path in wrong]
    return [rule for rule in RULES if not rule.depends_on(faulty)]


def broken_rules(spec: JobSpec, rules: Iterable[Rule]) -> list[tuple[Path, str]]:
    """Return the errors of a job whose fields fit their types: key paths and messages.

    Of a range of nodes each number is checked; the errors of a key are those of the smallest number that has one.
    """
    findings: dict[str, list[str]] = {}
    for nodes in spec.node_counts:
        sized = spec.sized(nodes)
        findings_of_number: dict[str, list[str]] = {}
        for rule in rules:
            for key, sentence in rule.find(sized):
                findings_of_number.setdefault(key, []).append(sentence)
        findings = findings_of_number | findings
    if isinstance(spec.resources.nodes, NodeRange):
        findings |= {key: [sentence] for key, sentence in _range_findings(spec)}
    return [(tuple(key.split(".")), sentence) for key, sentences in findings.items() for sentence in sentences]


def _range_findings(spec: JobSpec) -> Iterator[Finding]:
    """Reject what does not go together with a range of nodes: Slurm gets one request for a node, however many it is."""
    jobs = [spec.sized(nodes) for nodes in spec.node_counts]
    if len({(job.ranks_per_node, job.tasks_per_node, job.cpus_per_task) for job in jobs}) > 1:
        sentence = (
            f"is {spec.resources.nodes}, and the launcher in command has another number of ranks on each node with "
            "each number of nodes; write one number of nodes, or leave the number of ranks out of the command"
        )
        yield "resources.nodes", sentence
    if "mincpus" in spec.resources.sbatch:
        sentence = (
            f"is given, and with the range {spec.resources.nodes} of resources.nodes hpcddp writes it itself, from "
            "resources.tasks_per_node and cpus_per_task; remove it"
        )
        yield "resources.sbatch.mincpus", sentence


_KINDS = ("train", "entrypoint", "command")
# Fields that need a global batch.
_CUTS = ("max_per_device_batch_size", "grad_accum_steps", "per_device_batch_size")


def one_kind_of_work(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject a job without work, and one with several kinds of work."""
    given = [kind for kind in _KINDS if getattr(spec, kind) is not None]
    if not given:
        yield "train", "is missing; write for example train: {model: resnet18, dataset: digits}"
    for extra in given[1:]:
        yield extra, f"is given, and {given[0]} is given too, but a job runs one thing; keep one of them"
    if spec.command is not None and not (spec.command and spec.command[0]):
        yield "command", "is empty, and a program has a name; write for example [python, train.py]"


def _run_placeholders(spec: JobSpec) -> Iterator[Finding]:
    """Reject a command with a variable of the run that no shell expands."""
    error = run_placeholder_error(spec.command or ())
    if error is not None:
        yield "command", error


def launcher_fits(spec: JobSpec) -> Iterator[Finding]:
    """Reject a launcher that the command does not begin with, and a command that contradicts the job."""
    if spec.launcher == OWN and spec.command is None:
        yield "launcher", "is own, but the job has no command; write one, or leave launcher out"
    elif spec.launcher not in {None, OWN}:
        launch = launcher_command_of(spec.command or ())
        if launch is None or launch.launcher != spec.launcher:
            begin = "torchrun" if spec.launcher == "torchrun" else "accelerate, launch"
            sentence = (
                f"is {spec.launcher}, and the job has no command that begins with it and with options that hpcddp "
                f"knows; write for example command: [{begin}, train.py], or leave launcher out"
            )
            yield "launcher", sentence
        elif launch.meeting_option is not None:
            yield (
                "launcher",
                f"is {spec.launcher}, and the command has {launch.meeting_option}; leave one of the two out",
            )
    if spec.launcher_command is not None:
        for sentence in spec.launcher_command.contradictions(
            nodes=spec.nodes, ranks_per_node=spec.ranks_per_node, gpus_per_node=spec.resources.gpus_per_node
        ):
            yield "command", sentence


def batch_is_stated(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject a training without a global batch, and settings that split a missing one."""
    batch = spec.batch
    if batch.global_batch_size is not None:
        return
    if spec.train is not None:
        yield "batch.global_batch_size", "is missing; write for example global_batch_size: 256"
        return
    for name in (*_CUTS, "unit"):
        if getattr(batch, name) != type(batch).model_fields[name].default:
            yield f"batch.{name}", "is given, but batch.global_batch_size is not; write that too"


def _one_task_per_gpu(spec: JobSpec) -> Iterator[Finding]:
    tasks = spec.resources.tasks_per_node
    gpus = spec.resources.gpus_per_node
    # A program that starts the ranks itself is one task, however it counts.
    if tasks is None or not gpus or tasks == gpus or (spec.launcher == OWN and tasks == 1):
        return
    own = " (launcher: own, if the program starts the ranks of its node itself)" if spec.command is not None else ""
    yield (
        "resources.tasks_per_node",
        f"is {tasks}, and resources.gpus_per_node is {gpus}: one task is one GPU; write {gpus}, or leave it out{own}",
    )


def _gpu_fields_need_gpus(spec: JobSpec) -> Iterator[Finding]:
    why = "the job asks for no GPU; set resources.gpus_per_node"
    if spec.uses_gpus:
        why = "resources.gpu_request is none, with which Slurm is asked for no GPU; leave one of the two out"
        if spec.resources.gpu_request != "none":
            return
    for name in ("gpu_type", "mem_per_gpu"):
        value = getattr(spec.resources, name)
        if value is not None:
            yield f"resources.{name}", f"is {value}, and {why}"
    if spec.train is not None and spec.train.device == "cuda" and not spec.uses_gpus:
        yield "train.device", "is cuda, and the job asks for no GPU; set resources.gpus_per_node, or write cpu"


def _one_memory(spec: JobSpec) -> Iterator[Finding]:
    given = [name for name in ("mem", "mem_per_cpu", "mem_per_gpu") if getattr(spec.resources, name) is not None]
    for extra in given[1:]:
        value = getattr(spec.resources, extra)
        yield f"resources.{extra}", f"is {value}, and resources.{given[0]} is given too; keep one of them"


# The GPUs of a task, also abbreviated; with single:N one GPU has N tasks.
_GPUS_OF_TASK: Final = re.compile(
    r"(?:gpus-per-t[a-z]*=(?:.*:)?|gpu-b[a-z]*=(?:v[a-z]*,)?per_task:)(\d+)|gpu-b[a-z]*=(?:v[a-z]*,)?single:(?:(1)|\d+)"
)


def _each_rank_has_its_gpu(spec: JobSpec) -> Iterator[Finding]:
    """Reject flags of srun with which not every rank has one GPU."""
    gpus = spec.resources.gpus_per_node
    tasks = spec.tasks_per_node
    for flag, value in spec.resources.srun.items():
        match = _GPUS_OF_TASK.fullmatch(f"{flag}={value}")
        if match is not None and int(match[1] or match[2] or 0) * tasks != gpus:
            sentence = (
                f"is {value}, and a node has {counted(gpus, 'GPU')} for {counted(tasks, 'task')} "
                "(resources.gpus_per_node), so that not every rank would have its GPU; leave it out"
            )
            yield f"resources.srun.{flag}", sentence


def _flags_have_their_values(spec: JobSpec) -> Iterator[Finding]:
    """Reject a flag that would take the word after it as its value."""
    for key, slurm_flags in ("sbatch", SBATCH), ("srun", SRUN):
        for flag, value in getattr(spec.resources, key).items():
            if value is True and not slurm_flags.with_value.isdisjoint(slurm_flags.long_flags_of(flag)):
                yield f"resources.{key}.{flag}", f"is true, and --{flag} takes a value; write it"


def _dataset_fields(spec: JobSpec) -> Iterator[Finding]:
    train = spec.train
    if train is None:
        return
    if train.dataset not in DATASETS:
        if "split" in train.dataset_args:
            yield "train.dataset_args.split", "is given, but hpcddp passes split itself; remove it"
        return
    if DATASETS[train.dataset].is_in_files and train.data_dir is None:
        yield "train.data_dir", f"is missing, and dataset {train.dataset} is read from files; write their directory"
    arguments = DATASETS[train.dataset].arguments
    for name, value in train.dataset_args.items():
        if name not in arguments:
            names = ", ".join(arguments)
            instead = did_you_mean(name, arguments, f"write one of {names}" if names else "remove it")
            yield f"train.dataset_args.{name}", f"is not an argument of dataset {train.dataset}; {instead}"
        elif (problem := arguments[name].problem_of(value)) is not None:
            yield f"train.dataset_args.{name}", problem


def _classes(spec: JobSpec) -> Iterator[Finding]:
    train = spec.train
    if train is None:
        return
    if "num_classes" in train.model_args:
        yield "train.model_args.num_classes", "is given, but hpcddp passes num_classes itself; write train.num_classes"
    dataset = DATASETS.get(train.dataset)
    classes = None if dataset is None else dataset.classes
    if classes is not None and train.num_classes is not None and train.num_classes < classes:
        sentence = (
            f"is {train.num_classes}, and dataset {train.dataset} has {classes} classes; "
            f"write {classes} or more, or leave it out"
        )
        yield "train.num_classes", sentence


def _precision_fits_device(spec: JobSpec) -> Iterator[Finding]:
    if spec.train is not None and spec.device == "cpu" and spec.train.precision in {"fp16", "tf32"}:
        sentence = (
            f"is {spec.train.precision}, and this job computes on CPUs, which do not have it; "
            "write bf16 or fp32, or ask for GPUs"
        )
        yield "train.precision", sentence


def _own_loss(spec: JobSpec) -> Iterator[Finding]:
    train = spec.train
    if train is None:
        return
    reduction = train.loss_reduction
    if train.loss is None:
        if reduction != "mean":
            yield "train.loss_reduction", f"is {reduction}, but the job has no train.loss; name one"
        return
    if train.label_smoothing:
        yield (
            "train.label_smoothing",
            f"is {train.label_smoothing:g}, and train.loss is a loss of your own; smooth labels in it, and write 0",
        )


def _optimizer_constants(spec: JobSpec) -> Iterator[Finding]:
    if spec.train is None:
        return
    optimizer = spec.train.optimizer
    owners = {"momentum": "sgd", "nesterov": "sgd", "betas": "adamw", "eps": "adamw"}
    for name, owner in owners.items():
        changed = getattr(optimizer, name) != type(optimizer).model_fields[name].default
        if changed and optimizer.name != owner:
            yield f"train.optimizer.{name}", f"is given, and only {owner} has it; remove it, or write name: {owner}"
    if optimizer.name == "sgd" and optimizer.nesterov and not optimizer.momentum:
        yield "train.optimizer.nesterov", "is true, and momentum is 0; set train.optimizer.momentum, for example 0.9"


def _schedule_constants(spec: JobSpec) -> Iterator[Finding]:
    rate = spec.learning_rate
    key = "learning_rate.milestones"
    if rate.schedule == "step" and not rate.milestones:
        yield key, "is empty, and schedule step needs milestones; write the epochs, for example [30, 60, 80]"
    if rate.schedule != "step" and rate.milestones:
        yield key, f"is given, and schedule {rate.schedule} has no milestones; remove it, or write schedule: step"
    if rate.schedule != "step" and rate.gamma != type(rate).model_fields["gamma"].default:
        yield (
            "learning_rate.gamma",
            f"is given, and schedule {rate.schedule} has none; remove it, or write schedule: step",
        )
    if any(milestone < 1 for milestone in rate.milestones) or list(rate.milestones) != sorted(set(rate.milestones)):
        yield key, f"is {list(rate.milestones)}, and milestones must be increasing epochs of at least 1; sort them"
    if rate.schedule == "constant" and rate.min:
        yield (
            "learning_rate.min",
            "is given, and a constant rate does not decrease; remove it, or write schedule: cosine",
        )
    elif rate.min > rate.base:
        yield "learning_rate.min", f"is {rate.min}, above learning_rate.base {rate.base}; write less than that"


# sbatch stores the signal time in 16 bits (man sbatch, --signal).
LONGEST_SIGNAL_LEAD_S = 65535


def _warning_before_the_end(spec: JobSpec) -> Iterator[Finding]:
    lead = spec.requeue.signal_lead
    limit = spec.resources.time_limit
    if lead is None:
        return
    key = "requeue.signal_lead"
    seconds = round(lead.total_seconds())
    if seconds > LONGEST_SIGNAL_LEAD_S:
        yield key, f"is {format_duration(lead)}, and Slurm takes {LONGEST_SIGNAL_LEAD_S}s at most; write less"
    elif limit is not None and limit.seconds is not None and seconds >= limit.seconds:
        if lead == Requeue.model_fields["signal_lead"].default:
            return  # JobSpec.signal_lead shortens what nobody chose.
        shorter = f"{limit.seconds // 2}s or null" if limit.seconds > 1 else "null"
        yield (
            key,
            (
                f"is {format_duration(lead)}, and the job ends after {limit} (resources.time_limit); "
                f"write requeue.signal_lead: {shorter}"
            ),
        )


EVALUATION_METRICS = ("val_accuracy", "val_loss", "val_top5")
"""Metrics that the built-in training reports; the last one with more than five classes."""


def _best_metric_is_known(spec: JobSpec) -> Iterator[Finding]:
    best = spec.checkpoint.best
    if best is None:
        return
    key = "checkpoint.best"
    if spec.command is not None:
        yield (
            key,
            (
                f"is {best.metric}, and a command saves its own checkpoints; remove it; a command that uses "
                f"hpcddp.Checkpointer gives it best={best.metric!r}"
            ),
        )
    elif spec.train is not None and best.metric not in EVALUATION_METRICS:
        instead = did_you_mean(best.metric, EVALUATION_METRICS, "write one of these")
        yield key, f"is {best.metric}, and an evaluation reports {', '.join(EVALUATION_METRICS)}; {instead}"


# Names that bash keeps read-only or changes itself (man bash, Shell Variables).
SHELL_VARIABLES = frozenset(
    {
        "_", "BASHOPTS", "BASHPID", "BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_CMDS", "BASH_COMMAND",
        "BASH_LINENO", "BASH_SOURCE", "BASH_SUBSHELL", "BASH_VERSINFO", "DIRSTACK", "EPOCHREALTIME",
        "EPOCHSECONDS", "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "LINENO", "OPTIND", "PPID", "RANDOM",
        "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM", "UID",
    }
)  # fmt: skip
OWN_PREFIX = "HPCDDP_"
# The only variable with our prefix that a job file may set: fault injection.
FAULTS_VARIABLE = "HPCDDP_FAULTS"
IMAGE_SUFFIXES: Final = (".sif", ".sqsh", ".squashfs", ".simg", ".img")


def one_environment(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject combinations of conda, venv, uv, an interpreter and a container that exclude each other."""
    environment = spec.environment
    given = [name for name in ACTIVATED if getattr(environment, name) is not None]
    if not given:
        return
    first = given[0]
    for extra in given[1:]:
        yield f"environment.{extra}", f"is given, and environment.{first} is given too; keep one of them"
    if environment.container is not None:
        sentence = (
            "is given, and the tasks run in environment.container, which has an interpreter of its own; remove it, or "
            "write environment.container.python for an interpreter in the container"
        )
        yield f"environment.{first}", sentence
    elif environment.python is not None:
        sentence = (
            f"is given, and environment.{first} has an interpreter of its own; keep one of them (null takes a "
            "profile's value away)"
        )
        yield "environment.python", sentence


def _copy_is_worked_in(spec: JobSpec) -> Iterator[Finding]:
    """Reject a copy of the code in which no task would work."""
    container = spec.environment.container
    if spec.environment.code == "snapshot" and container is not None and container.workdir is not None:
        sentence = (
            f"is {container.workdir}, and environment.code is snapshot, whose tasks work in the copy of the code; "
            "remove one of them"
        )
        yield "environment.container.workdir", sentence


def paths_are_usable(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject paths that PATH cannot contain."""
    for name in ACTIVATED:
        path = getattr(spec.environment, name)
        if path is not None and ":" in path:
            sentence = f"is {path!r}, and a directory in PATH cannot contain a colon; choose another directory"
            yield f"environment.{name}", sentence


def container_shows_the_run(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject paths that the container's runtime cannot mount."""
    container = spec.environment.container
    if container is None:
        return
    paths = [("run_root", spec.run_root)]
    paths += [("environment.container.mounts", f"{mount.source}{mount.target}") for mount in container.mounted]
    if (data := data_mount_of(spec, container)) is not None:
        paths.append(("train.data_dir", data))
    for key, path in paths:
        if (held := unmountable(path, container.runtime)) is not None:
            yield key, f"holds {held}, and {container.runtime} cannot mount such a path; choose one without"


def data_mount_of(spec: JobSpec, container: Container) -> str | None:
    """Return the data directory, if the container needs a mount for it."""
    data_dir = spec.train.data_dir if spec.train is not None else None
    if data_dir is None or not data_dir.startswith("/"):
        return None
    shown = any(mount.host_path(data_dir) is not None for mount in container.mounted)
    return None if shown else data_dir


def image_is_found(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject the path of an image file that pyxis would look up in a registry."""
    container = spec.environment.container
    if container is None or container.image_file is not None:
        return
    if PurePath(container.image).suffix in IMAGE_SUFFIXES:
        sentence = (
            f"is {container.image!r}, and pyxis takes a name without a slash in front for one in a registry; write "
            f"./{container.image}"
        )
        yield "environment.container.image", sentence


# With a redirection alone, exec changes the descriptors of the shell.
_EXEC: Final = re.compile(r"^[ \t]*exec[ \t]+(?![0-9]*[<>&]|\{)\S", re.MULTILINE)


def setup_returns(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject a line that replaces the script by another program, so that no task would start."""
    for index, lines in enumerate(spec.environment.setup):
        if found := _EXEC.search(lines):
            line = lines[found.start() :].partition("\n")[0].strip()
            yield (
                f"environment.setup[{index}]",
                f"has {line!r}, which replaces the script, so that no task starts; remove it",
            )


def _lost_node_is_survived(spec: JobSpec) -> Iterator[Finding]:
    """Reject ``resources.min_nodes`` and ``spare_nodes``: no job goes on without a lost node yet."""
    if spec.may_lose_nodes:
        key = "resources.spare_nodes" if spec.resources.min_nodes is None else "resources.min_nodes"
        yield key, "is given, and no job goes on without a lost node yet; leave it out: the job is requeued then"


def variable_names(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Reject variables that a script cannot set."""
    environment = spec.environment
    named = [(f"environment.env.{name}", name) for name in environment.env]
    named += [("environment.pass_env", name) for name in environment.pass_env]
    for key, name in named:
        if name in SHELL_VARIABLES:
            yield key, f"names {name}, which bash reserves; remove it"
        elif name.upper().startswith(OWN_PREFIX) and name != FAULTS_VARIABLE:
            # The variables of the batch script are in lower case.
            yield key, f"names {name}, and hpcddp reserves {name[: len(OWN_PREFIX)]}*; rename it"
    for name in environment.pass_env:
        if name in environment.env:
            yield "environment.pass_env", f"names {name}, which environment.env sets too; keep one of the two"


_DEVICE = ("resources.gpus_per_node", "train.device")
_RANKS = ("resources.nodes", "resources.tasks_per_node", "resources.gpus_per_node")
RULES = (
    Rule(("train", "entrypoint", "command"), one_kind_of_work),
    Rule(("train", "entrypoint", "command", "batch"), batch_is_stated),
    Rule(("command",), _run_placeholders),
    Rule(("launcher", "command", *_RANKS), launcher_fits),
    Rule(("batch.global_batch_size", *_RANKS), batch_reaches_every_rank),
    Rule(("batch", *_RANKS), fixed_micro_batch_divides),
    Rule(("batch.unit", "batch.group"), groups_are_named),
    Rule(("launcher", "resources.tasks_per_node", "resources.gpus_per_node"), _one_task_per_gpu),
    Rule(("resources.gpu_type", "resources.mem_per_gpu", "resources.gpu_request", *_DEVICE), _gpu_fields_need_gpus),
    Rule(("resources.mem", "resources.mem_per_cpu", "resources.mem_per_gpu"), _one_memory),
    Rule(("train.dataset", "train.data_dir", "train.dataset_args"), _dataset_fields),
    Rule(("train.dataset", "train.num_classes", "train.model_args"), _classes),
    Rule(("train.precision", *_DEVICE), _precision_fits_device),
    Rule(("train.loss", "train.loss_reduction", "train.label_smoothing"), _own_loss),
    Rule(("train.optimizer",), _optimizer_constants),
    Rule(("learning_rate",), _schedule_constants),
    Rule(("learning_rate", "batch.global_batch_size", "train.optimizer"), rule_fits_optimizer),
    Rule(("requeue.signal_lead", "resources.time_limit"), _warning_before_the_end),
    Rule(("resources.min_nodes", "resources.spare_nodes"), _lost_node_is_survived),
    Rule(("launcher", "command", "resources"), _each_rank_has_its_gpu),
    Rule(("resources.sbatch", "resources.srun"), _flags_have_their_values),
    Rule(("environment.env", "environment.pass_env"), variable_names),
    Rule(("environment.setup",), setup_returns),
    Rule(("environment",), one_environment),
    Rule(("environment",), paths_are_usable),
    Rule(("environment",), _copy_is_worked_in),
    Rule(("environment.container", "run_root"), container_shows_the_run),
    Rule(("environment.container.image",), image_is_found),
    Rule(("checkpoint.best", "command", "train"), _best_metric_is_known),
)
