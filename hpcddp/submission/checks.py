"""The checks of a job, or of the elements of a sweep, before it is submitted, as far as this machine can make them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any, Final

from hpcddp.errors import UserError, counted, listed
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.document import neighbour
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.launchers import PYTHON, find_launcher, program_of_python
from hpcddp.jobfile.merge import DEFAULT
from hpcddp.jobfile.placeholders import RUN_PLACEHOLDERS, as_text, placeholders_of, words_outside_shell_texts
from hpcddp.jobfile.resources import NodeRange
from hpcddp.jobfile.sweep import assignment, element_spec, field_of
from hpcddp.jobfile.units import format_duration
from hpcddp.packages import is_installed
from hpcddp.run.trackers import PACKAGES
from hpcddp.site.rules import is_about
from hpcddp.slurm import commands
from hpcddp.slurm.directives import request_of
from hpcddp.slurm.hostlist import HostListError, expand
from hpcddp.submission.environment_checks import (
    container_obstacles,
    environment_obstacles,
    runs_in_this_python,
    setup_obstacles,
)
from hpcddp.submission.function_checks import function_obstacles, meant_module
from hpcddp.submission.request import Check, Obstacle, SubmissionError, SubmitRequest
from hpcddp.submission.shell_commands import shell_obstacles
from hpcddp.vendors import vendor_here


def command_obstacles(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the obstacles to the job's command."""
    if spec.command is None:
        return
    yield from _program(spec, environment)
    yield from _srun(spec)
    yield from _empty_values(spec)
    yield from _launcher(spec, environment)
    yield from _script(spec, environment)


def _program(spec: JobSpec, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield a program that is not on this machine, where nothing in the job can provide it."""
    section = spec.environment
    prepared = section.modules or section.setup or section.container or section.conda
    if spec.command is None or prepared or "PATH" in section.env:
        return
    # An activated environment has its programs there, and the task looks there last.
    beside = Path(section.interpreter or sys.executable).parent
    name = spec.command[0]
    if shutil.which(name, path=f"{environment.get('PATH', os.defpath)}:{beside}") is None:
        reason = f"no program {name!r} is on PATH here"
        if "/" in name:
            reason = f"{name!r} is not a program that can be run here"
        way = "correct its name, or write its path"
        if Path(name).is_file():
            interpreter = "python" if name.endswith(".py") else "bash"
            way = f"write {interpreter} {shlex.join(spec.command)}"
        yield Obstacle(sentence=f"command is {shlex.join(spec.command)}, but {reason}; {way}")


def _srun(spec: JobSpec) -> Iterator[Obstacle]:
    """Yield srun as the command of a task: it would wait for the CPUs of this task until the time limit."""
    words = spec.command or ()
    # Assignments and env may stand before it.
    program = next(dropwhile(lambda word: word == "env" or re.fullmatch(r"\w+=.*", word), words), "")
    name = Path(program).name
    # With this option, srun shares the CPUs of the task (srun(1)).
    if name in {"srun", "salloc"} and "--overlap" not in words:
        yield Obstacle(
            sentence=f"command is {shlex.join(words)}, and hpcddp starts the tasks with srun itself; leave {name} and "
            "its options out, and write --nodes and --tasks-per-node before --",
            can_force=False,
        )


# Of torchrun, accelerate and scripts that take the same; a variable of a task is empty where the job is submitted.
_RANK_OPTIONS: Final = re.compile("--(?:node|machine)[-_]rank|--nnodes|--num[-_](?:machines|nodes)", re.ASCII)


def _empty_values(spec: JobSpec) -> Iterator[Obstacle]:
    """Yield an option for a rank or a number of nodes whose value the shell has expanded to nothing."""
    words = spec.command or ()
    for word, following in pairwise((*words, "")):
        option, equals, value = word.partition("=")
        if not _RANK_OPTIONS.fullmatch(option):
            continue
        if not equals and not following.startswith("-"):
            value = following
        if value:
            continue
        yield Obstacle(
            sentence=f"command is {shlex.join(words)}, and {option} has no value: a variable such as $SLURM_NODEID is "
            "empty here, and set in the tasks only; let a shell in the task read it: -- bash -c 'COMMAND', in single "
            "quotes",
            can_force=False,
        )


def _launcher(spec: JobSpec, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield torchrun or another launcher as the command of several tasks that would not form one world."""
    words = spec.command or ()
    launcher = find_launcher(words, {**environment, **spec.environment.env})
    if launcher is None or spec.tasks == 1 or spec.launcher_command is not None:
        return
    why = launcher.obstacle(tasks=spec.tasks, nodes=spec.nodes)
    if why is None:
        return
    advice = launcher.advice
    if launcher.program:
        advice = f"{advice}: -- {shlex.join(launcher.program)}"
    yield Obstacle(sentence=f"command is {shlex.join(words)}, and {why}; {advice}", can_force=False)


def _script(spec: JobSpec, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield a Python script or module that does not exist; shell lines of the job may change to another directory."""
    if spec.environment.container:
        return
    words = spec.command or ()
    variables = {**environment, **spec.environment.env}
    script, module = python_behind_launcher(words, variables)
    why = None
    if script is not None and not Path(script).is_file():
        instead = "check its path, which is relative to the directory of submission"
        near = neighbour(Path(script))
        if near:
            instead = f"did you mean {near}?"
        why = f"there is no file {script!r} here; {instead}"
    elif module is not None:
        # Only what is near is named: another Python may have modules that are unknown here.
        near_module = meant_module(module, variables)
        if near_module is not None:
            why = f"there is no module {module} here; did you mean {near_module}?"
    if why is not None:
        yield Obstacle(sentence=f"command is {shlex.join(words)}, and {why}", certain=not spec.environment.setup)


def python_behind_launcher(words: Sequence[str], variables: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the script and the module that a command runs with Python, also behind a launcher; None for neither."""
    launcher = find_launcher(words, variables)
    if launcher is not None and launcher.program:
        return program_of_python(launcher.program)
    return program_of_python(words)


def _too_few_nodes(spec: JobSpec, cluster: Cluster, _: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield a list of more nodes than the job asks for: it must get all of them."""
    nodelist = spec.resources.nodelist
    # A list with a slash is the name of a file (sbatch(1), --nodelist).
    if cluster != "slurm" or nodelist is None or "/" in nodelist:
        return
    try:
        hosts = set(expand(nodelist))
    except HostListError:
        return
    if len(hosts) > spec.nodes:
        yield Obstacle(
            sentence=f"resources.nodes is {spec.resources.nodes}, and resources.nodelist is {nodelist}, and the job "
            f"must get all {len(hosts)} of these nodes; write --nodes {len(hosts)}, or a shorter list",
            can_force=False,
        )


def _unused_cpus(spec: JobSpec, cluster: Cluster, _: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield a list of CPUs of more tasks than a node has: the ranks of a launcher would share those of the first."""
    for flag, value in spec.resources.srun.items():
        # Also abbreviated.
        match = re.fullmatch("cpu-b[a-z]*=(?:[a-z]+,)?ma(?:p|sk)_[a-z]+[:=](.*)", f"{flag}={value}")
        if cluster != "local" and match is not None and match[1].count(",") >= spec.tasks_per_node:
            yield Obstacle(
                sentence=f"resources.srun.{flag} lists the CPUs of {match[1].count(',') + 1} tasks, and a node has "
                f"{counted(spec.tasks_per_node, 'task')} for {counted(spec.ranks_per_node, 'rank')}, so that the ranks "
                "get the beginning of the list alone; list the CPUs of each task, or add --set "
                f"resources.srun.{flag}=null",
                certain=spec.tasks_per_node < spec.ranks_per_node,
                can_force=False,
            )


def _too_many_nodes(spec: JobSpec, cluster: Cluster, _: Mapping[str, str]) -> Iterator[Obstacle]:
    if cluster != "slurm" and isinstance(spec.resources.nodes, NodeRange):
        number = "1" if cluster == "local" else "N with as many nodes as the allocation has"
        yield Obstacle(
            sentence=f"resources.nodes is {spec.resources.nodes}, a range from which Slurm chooses when it starts a "
            f"job, but --cluster {cluster} does not submit to Slurm; add --set resources.nodes={number}",
            can_force=False,
        )
    elif cluster == "local" and spec.nodes > 1:
        yield Obstacle(
            sentence=f"resources.nodes is {spec.resources.nodes}, but this machine is one node; "
            "add --set resources.nodes=1",
            can_force=False,
        )


# sbatch(1), --signal: "the signal may be sent up to 60 seconds earlier than specified".
_EARLIER = timedelta(seconds=60)


def _early_warning(spec: JobSpec, cluster: Cluster, _: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield a time limit so short that Slurm may warn of it at the job's start; what a command does then is unknown."""
    limit = spec.resources.time_limit
    lead = spec.signal_lead
    if cluster != "slurm" or spec.command is not None or limit is None or limit.seconds is None or lead is None:
        return
    earliest = lead + _EARLIER
    if limit.seconds <= earliest.total_seconds():
        yield Obstacle(
            sentence=f"resources.time_limit is {limit}, and Slurm may warn the job {format_duration(earliest)} before "
            "its end (requeue.signal_lead, and 1min earlier), so that it stops soon after its start; write a longer "
            "limit, or requeue.signal_lead null, with which it stops by the clock",
            certain=False,
        )


def _no_gpu(spec: JobSpec, cluster: Cluster, _: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield GPUs that this machine does not have; a command may do without them, and decides that itself."""
    if cluster != "local" or spec.device == "cpu" or vendor_here() is not None:
        return
    asked = "train.device is cuda"
    count = spec.resources.gpus_per_node
    if count:
        asked = f"resources.gpus_per_node is {count}"
    instead = "train.device=cpu"
    if spec.train is None:
        instead = f"resources.gpus_per_node=0 --set resources.tasks_per_node={spec.ranks_per_node}"
    yield Obstacle(
        sentence=f"{asked}, and this machine has no GPU in /dev; to run on its CPUs, add --set {instead}",
        certain=spec.command is None,
    )


def _unset_variables(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    unset = [name for name in spec.environment.pass_env if name not in environment]
    if unset:
        yield Obstacle(
            sentence=f"environment.pass_env names {', '.join(unset)}, not set here; export it, or remove the name",
            can_force=False,
        )


def _missing_data(spec: JobSpec, _: Cluster, __: Mapping[str, str]) -> Iterator[Obstacle]:
    if spec.train is None or spec.train.data_dir is None:
        return
    data_dir = spec.train.data_dir
    stage = spec.environment.stage
    if stage is not None and Path(data_dir).is_relative_to(stage.target):
        return
    path_here = _path_outside_container(spec, data_dir)
    if holds_files(Path(path_here)):
        return
    data_text = f"train.data_dir is {data_dir!r}"
    if path_here != data_dir:
        data_text = f"{data_text}, which is {path_here!r} here"
    if not Path(path_here).exists():
        problem = "that directory does not exist"
    elif Path(path_here).is_dir():
        problem = "that directory is empty"
    else:
        problem = "that is not a directory"
    yield Obstacle(sentence=f"{data_text}, but {problem}; give the directory that holds the data")


def _path_outside_container(spec: JobSpec, path: str) -> str:
    """Return the path on the host of a path of the job; it is the same without a container or a mount for it."""
    container = spec.environment.container
    if container is None:
        return path
    for mount in container.mounted:
        host_path = mount.host_path(path)
        if host_path is not None:
            return host_path
    return path


def holds_files(directory: Path) -> bool:
    """Return whether a directory holds anything; True for one that this user may not list."""
    try:
        with os.scandir(directory) as entries:
            return any(entries)
    except PermissionError:
        return True
    except OSError:
        return False


_SERVER = "MLFLOW_TRACKING_URI"


def _tracker_obstacles(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the trackers that are not installed, and MLflow without the address of its server.

    Only this interpreter is looked at: with another one, a missing tracker is a warning of the task.
    """
    names = spec.trackers.use or ()
    if runs_in_this_python(spec.environment):
        for name in names:
            if not is_installed(name):
                yield Obstacle(
                    sentence=f"trackers.use names {name}, which {sys.executable} does not have; run: "
                    f"{shlex.quote(sys.executable)} -m pip install {PACKAGES[name]}, or remove the name"
                )
    server = spec.trackers.tracking_uri or environment.get(_SERVER) or spec.environment.env.get(_SERVER)
    if "mlflow" in names and not server:
        yield Obstacle(
            sentence=f"trackers.use names mlflow, and nothing says where its server is; export {_SERVER}, or write it "
            "into trackers.tracking_uri"
        )
    if "wandb" in names and not _may_have_wandb_key({**environment, **spec.environment.env}):
        yield Obstacle(
            sentence="trackers.use names wandb, but no key for it was found; run: wandb login, or export WANDB_API_KEY "
            "(WANDB_MODE=offline needs none)"
        )


_WANDB_WITHOUT_KEY = frozenset({"offline", "dryrun", "disabled"})


def _may_have_wandb_key(variables: Mapping[str, str]) -> bool:
    """Return whether W&B may find a key: ``WANDB_API_KEY``, or one in the file of ``wandb login`` (docs.wandb.ai)."""
    if variables.get("WANDB_API_KEY") or variables.get("WANDB_MODE", "").lower() in _WANDB_WITHOUT_KEY:
        return True
    home = Path(variables.get("HOME", ""))
    return any(file.exists() for file in (Path(variables.get("NETRC") or home / ".netrc"), home / "_netrc"))


# srun numbers its steps from 0; the steps of a batch script and of salloc's own shell have the numbers above.
_LARGEST_STEP: Final = 0xFFFFFFF0


def allocation_obstacles(spec: JobSpec, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield why a job cannot run in the allocation of this shell."""
    if cluster != "here":
        return
    problem = _problem_of_shell(environment)
    if problem is None:
        problem = _problem_of_allocation(spec, environment["SLURM_JOB_ID"], environment)
    if problem is None:
        return
    salloc = ["salloc"]
    for directive in request_of(spec):
        if directive.value is None:
            salloc.append(f"--{directive.flag}")
        else:
            salloc.append(f"--{directive.flag}={directive.value}")
    yield Obstacle(
        sentence=f"--cluster here: {problem}; submit in the shell that this command opens: {shlex.join(salloc)}; or "
        "give the job to the queue: --cluster slurm",
        can_force=False,
    )


def _problem_of_shell(environment: Mapping[str, str]) -> str | None:
    """Return why this shell has no allocation for a job, or None if it names one."""
    job_id = environment.get("SLURM_JOB_ID")
    step = environment.get("SLURM_STEP_ID", "")
    if not job_id:
        return "this shell is in no allocation, because SLURM_JOB_ID is not set"
    if not (job_id.isascii() and job_id.isdecimal()):
        return f"SLURM_JOB_ID is {job_id!r}, which is not a job id"
    if step.isascii() and step.isdecimal() and int(step) < _LARGEST_STEP:
        return f"srun has started this shell as a step of job {job_id}, and the step holds the CPUs that the tasks need"
    return None


def _problem_of_allocation(spec: JobSpec, job_id: str, environment: Mapping[str, str]) -> str | None:
    """Return why the job cannot run in an allocation, or None if it can."""
    try:
        job = commands.show_job(job_id, environment=environment)
    except commands.SlurmCommandError as error:
        return f"SLURM_JOB_ID is {job_id}, and Slurm does not show that job ({error.message})"
    if job is None or job.get("JobState") != "RUNNING":
        return f"SLURM_JOB_ID is {job_id}, but that job is not running"
    if not job.get("UserId", "").endswith(f"({os.getuid()})"):
        return f"SLURM_JOB_ID is {job_id}, but that job belongs to another user"
    nodes = job.get("NumNodes", "")
    if nodes.isdecimal() and int(nodes) < spec.nodes:
        # srun itself refuses tasks and GPUs that do not fit.
        return f"resources.nodes is {spec.nodes}, and the allocation, job {job_id}, has {nodes}"
    return None


CHECKS_OF_ELEMENT: tuple[Check, ...] = (command_obstacles, shell_obstacles, function_obstacles, _missing_data)
"""The checks whose result may differ between the elements of a sweep, which share one environment."""
CHECKS: tuple[Check, ...] = (
    allocation_obstacles,
    _too_few_nodes,
    _unused_cpus,
    _too_many_nodes,
    _no_gpu,
    _early_warning,
    _unset_variables,
    setup_obstacles,
    environment_obstacles,
    container_obstacles,
    command_obstacles,
    shell_obstacles,
    function_obstacles,
    _tracker_obstacles,
    _missing_data,
)
"""All checks, in the order of their messages."""
CHECKS_OF_JOB: tuple[Check, ...] = (_too_few_nodes, _unused_cpus, setup_obstacles, command_obstacles, shell_obstacles)
"""The checks that may find what cannot run on any machine."""


def obstacles_to(request: SubmitRequest, checks: Sequence[Check] = CHECKS) -> list[Obstacle]:
    """Return what keeps a job from running, or may do so, as far as this machine shows it."""
    spec = request.job.spec
    # A run that is resumed has its relative paths in the directory from which it was submitted.
    with chdir(request.directory) if request.directory.is_dir() else nullcontext():
        return [obstacle for check in checks for obstacle in check(spec, request.cluster, request.environment)]


def check_submittable(request: SubmitRequest, checks: Sequence[Check] = CHECKS) -> tuple[str, ...]:
    """Check a job, or each element of its sweep.

    Elements that differ only in values without influence on the checks are checked once.

    Args:
        checks: the checks to run.

    Returns:
        What may keep the job from running, a sentence each.

    Raises:
        SubmissionError: the job cannot run, every reason is named; or an element cannot, whose values are named.
        PlanError: its batch cannot be split as the job asks.
    """
    if request.elements:
        return _check_sweep(request, checks)
    obstacles = obstacles_to(request, checks)
    errors = [obstacle for obstacle in obstacles if obstacle.certain]
    if request.force:
        errors = [obstacle for obstacle in errors if not obstacle.can_force]
    if errors:
        # A job on this machine gets no other node.
        may_force = request.cluster != "local" and all(obstacle.can_force for obstacle in errors)
        hint = "If the nodes of the job have what is missing here, add --force." if may_force else None
        raise SubmissionError("\n".join(obstacle.sentence for obstacle in errors), hint=hint)
    notes = tuple(obstacle.sentence for obstacle in obstacles)
    # Computed here, so that a batch without a plan is refused; the run directory gets the same plan.
    plan = request.plan
    if plan is None:
        return notes
    # A command that states no batch is rendered without these imports.
    from hpcddp.batch.job import short_epoch

    return (*notes, *short_epoch(plan.batch))


def check_renderable(request: SubmitRequest) -> None:
    """Refuse a job for the reasons for which ``submit`` refuses it on every machine: its script may be for another one.

    Raises:
        UserError: the job cannot run; every reason is named.
    """
    check_submittable(replace(request, force=True), CHECKS_OF_JOB)


def unfilled_placeholders(request: SubmitRequest) -> Iterator[str]:
    """Yield a sentence about placeholders in the command of a new run that no sweep fills.

    ``${name}`` is a variable, and the code after ``python -c`` has braces of its own. The command of an element that is
    resumed has its values, and its braces are meant.
    """
    words = request.job.spec.command or ()
    if not words or request.run.path.exists():
        return
    is_python = PYTHON.fullmatch(Path(words[0]).name) is not None
    texts = []
    for word_before, word in pairwise(words):
        is_python_code = is_python and word_before == "-c"
        if not is_python_code:
            texts.append(word)
    names = sorted(placeholders_of(texts) - {*RUN_PLACEHOLDERS}.union(*request.elements))
    if not names:
        return
    placeholders = listed([f"{{{name}}}" for name in names])
    options = " ".join(f"--sweep {name}=VALUE,VALUE" for name in names)
    yield (
        f"command holds {placeholders}, which no sweep gives a value, so that the program gets the braces as they are; "
        f"to try several values, add {options}"
    )


# A variable or a home directory at the beginning of a value, or behind an equals sign or a colon.
_UNEXPANDED = re.compile(r"(?:^|[=:])(?:\$\{?[A-Za-z_]|~/)", re.ASCII)


def unexpanded_values(request: SubmitRequest) -> Iterator[str]:
    """Yield a sentence about values that look as if a shell would expand them: the program gets them as they are."""
    spec = request.job.spec
    unexpanded = [
        f"environment.env.{name}" for name, value in spec.environment.env.items() if _UNEXPANDED.search(value)
    ]
    words = words_outside_shell_texts(spec.command or ())
    unexpanded += [f"the word {word!r} of command" for word in words if _UNEXPANDED.search(word)]
    unexpanded += [
        f"resources.srun.{flag}" for flag, value in spec.resources.srun.items() if _UNEXPANDED.search(str(value))
    ]
    if unexpanded:
        yield (
            f"{', '.join(unexpanded)}: $NAME and ~/ are not expanded there, so that the program gets them as they are; "
            "write the whole path, or let a shell in the task expand it: -- bash -c 'COMMAND'"
        )


_CPUS: Final = "resources.cpus_per_task"


def cpus_for_gpus(request: SubmitRequest) -> Iterator[str]:
    """Yield a sentence about GPUs whose ranks have a single CPU, because the job does not say how many they need."""
    spec = request.job.spec
    if request.cluster == "local" or not spec.uses_gpus or request.job.origins.get(_CPUS) != DEFAULT:
        return
    yield (
        f"{_CPUS} is not given, so that each GPU has 1 CPU for the training and its data loader; add --cpus-per-task "
        "8, or the CPUs of a node divided by its GPUs (sinfo -o '%P %c %G')"
    )


def bound_gpus(request: SubmitRequest) -> Iterator[str]:
    """Yield a sentence about flags of srun with which the program of a rank may see its GPU alone."""
    spec = request.job.spec
    srun = spec.resources.srun
    binding = srun.get("gpu-bind", srun.get("gpus-per-task", "none"))
    if binding != "none" and spec.command is not None and spec.tasks_per_node > 1 and request.cluster != "local":
        yield (
            "resources.srun binds each rank to its GPU, so that it may see that one alone, as number 0, whatever "
            "LOCAL_RANK is; let the program use GPU 0 if it sees one, and add resources.srun.gres-flags: "
            "allow-task-sharing if NCCL does not reach the GPUs of the other ranks"
        )


def _requeue_by_request(request: SubmitRequest) -> Iterator[str]:
    """Yield a sentence about a cluster that may not requeue the job; what its nodes may do is not seen from here."""
    facts = request.job.cluster
    if facts is None or facts.preemption.requeue or not is_about(facts, request.environment):
        return
    if request.chain or request.elements or request.cluster != "slurm" or not request.job.spec.requeue.causes:
        return
    yield (
        f"cluster {facts.name} requeues only jobs that ask for it (JobRequeue=0), as this one does; where that is "
        "refused, the run stops at its time limit, and --chain N submits N jobs that go on in turn"
    )


def notes_about(request: SubmitRequest) -> tuple[str, ...]:
    """Return what ``submit`` warns of beside the obstacles, a sentence each."""
    return (
        *unfilled_placeholders(request),
        *unexpanded_values(request),
        *cpus_for_gpus(request),
        *bound_gpus(request),
        *_requeue_by_request(request),
    )


# The fields that the batch plan and the data depend on.
_PLANNED = ("batch", "learning_rate", "train", "entrypoint", "command")


LARGEST_LOCAL_SWEEP = 256
"""The most elements of a sweep on this machine: each is a process from the submission on."""


def _check_sweep(request: SubmitRequest, checks: Sequence[Check]) -> tuple[str, ...]:
    """Check the elements of a sweep, as ``check_submittable`` does."""
    if request.cluster == "here":
        raise SubmissionError(
            "--cluster here runs one job, and this one is a sweep; submit its elements one by one (--set sweep=null, "
            "and --set for the values), or the sweep to the queue: --cluster slurm"
        )
    if request.cluster == "local" and len(request.elements) > LARGEST_LOCAL_SWEEP:
        raise SubmissionError(
            f"the sweep has {len(request.elements)} elements, each of them a process of this machine, but at most "
            f"{LARGEST_LOCAL_SWEEP} are allowed; split it into several sweeps"
        )
    notes: dict[str, None] = {}
    checked: set[str] = set()
    for index, values in enumerate(request.elements):
        planned = {
            key: value
            for key, value in values.items()
            if key != "train.seed" and field_of(key).partition(".")[0] in _PLANNED
        }
        if as_text(planned) in checked:
            continue
        checked.add(as_text(planned))
        try:
            notes |= dict.fromkeys(_check_element(request, planned, checks))
        except UserError as error:
            if not planned:
                raise
            sentence = f"element {index} of the sweep, with {assignment(planned)}: {error.message}"
            raise SubmissionError(sentence, hint=error.hint) from error
        # All elements share one environment, and checking it may take seconds.
        checks = [check for check in checks if check in CHECKS_OF_ELEMENT]
    return tuple(notes)


def _check_element(request: SubmitRequest, values: Mapping[str, Any], checks: Sequence[Check]) -> tuple[str, ...]:
    """Check a job with the values of an element of its sweep."""
    whole = request.job.spec
    element = element_spec(whole, values)
    if (element.tasks, element.ranks_per_node) != (whole.tasks, whole.ranks_per_node):
        # Its command has another launcher, or another number of ranks.
        raise SubmissionError(
            f"its command needs {element.tasks} Slurm tasks for {element.world_size} ranks, and the command of the job "
            f"needs {whole.tasks} for {whole.world_size}; submit once for each command"
        )
    return check_submittable(replace(request, job=replace(request.job, spec=element)), checks)
