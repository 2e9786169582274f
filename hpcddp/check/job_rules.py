"""Rules about a job file: its fields, its batch, its data, and what earlier runs of the job have measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from hpcddp.batch.job import has_batch_norm
from hpcddp.batch.plan import refuse_single_over_ranks, refuse_single_sample
from hpcddp.batch.refusals import PlanError
from hpcddp.check.finding import Example, Hit, Rule, Severity, Subject, split_message
from hpcddp.check.gpu_memory import gpu_memory_gib, state_bytes
from hpcddp.jobfile.cluster import Partition
from hpcddp.jobfile.merge import DEFAULT
from hpcddp.jobfile.units import TimeLimit
from hpcddp.stop.deadline import short_lead_sentence


def _job_file(subject: Subject) -> Iterator[Hit]:
    """Yield what is wrong with the job file itself."""
    for problem in subject.problems:
        said, fix = split_message(problem.sentence)
        name = problem.key or problem.file
        yield Hit(line=problem.line, key=problem.key, problem=f"{name} {said}", fix=fix)


def _single_sample(subject: Subject) -> Iterator[Hit]:
    """Yield a batch that leaves BatchNorm one sample."""
    spec, plan = subject.spec, subject.plan
    if spec is None or spec.train is None or plan is None or not has_batch_norm(spec.train.model):
        return
    refuse = refuse_single_sample if spec.train.batch_norm == "local" else refuse_single_over_ranks
    try:
        refuse(plan.batch)
    except PlanError as error:
        problem, fix = split_message(error.message)
        yield Hit(key="batch.global_batch_size", problem=problem, fix=fix)


def _time_limit(subject: Subject) -> Iterator[Hit]:
    """Yield a time limit within which the training cannot end, as an earlier run was measured."""
    spec, plan, measured = subject.spec, subject.plan, subject.measured
    if spec is None or plan is None or measured is None or plan.total_steps is None:
        return
    limit = spec.resources.time_limit
    if limit is None or limit.seconds is None:
        return
    needed_s = plan.total_steps * measured.step_s
    attempts = 1
    if "time_limit" in spec.requeue.causes:
        attempts += spec.requeue.max_time_limits
    if needed_s <= limit.seconds * attempts:
        return
    within = str(limit) if attempts == 1 else f"{limit}, {attempts} times"
    yield Hit(
        key="resources.time_limit",
        problem=f"{plan.total_steps:,} steps of {measured.step_s:.3g} s each, as run {measured.run_id} measured, take "
        f"{TimeLimit(math.ceil(needed_s))}, and the job has {within}",
        fix="write a longer resources.time_limit, fewer train.epochs, or let requeue.causes have time_limit",
    )


def _save_before_the_end(subject: Subject) -> Iterator[Hit]:
    """Yield a time limit or a preemption of which the job is warned too late to save."""
    spec, measured = subject.spec, subject.measured
    if spec is None or measured is None or measured.save_s is None:
        return
    lead = spec.signal_lead
    sentence = short_lead_sentence(None if lead is None else lead.total_seconds(), measured.step_s, measured.save_s)
    if sentence is not None:
        problem, fix = split_message(sentence)
        yield Hit(key="requeue.signal_lead", problem=f"{problem}, as run {measured.run_id} measured", fix=fix)
    needed_s = measured.step_s + measured.save_s
    for name, partition in _partitions(subject).items():
        # Slurm sends SIGTERM when the grace time begins, and SIGKILL when it has passed (slurm.conf(5), GraceTime).
        if partition.preempt_mode not in {"OFF", "SUSPEND,GANG"} and 0 < partition.grace_time_s < needed_s:
            yield Hit(
                key="resources.partition",
                problem=f"partition {name} gives a preempted job {partition.grace_time_s} s, and a step and a save take "
                f"{needed_s:.0f} s, as run {measured.run_id} measured",
                fix="write checkpoint.every so that the steps since the last save may be lost, or use another partition",
            )


def _partitions(subject: Subject) -> dict[str, Partition]:
    """Return the partitions that the job names, as its profile knows them."""
    spec, facts = subject.spec, None if subject.request is None else subject.request.job.cluster
    if spec is None or facts is None:
        return {}
    names = (spec.resources.partition or facts.default_partition or "").split(",")
    return {name: facts.partitions[name] for name in names if name in facts.partitions}


def _cpus(subject: Subject) -> Iterator[Hit]:
    """Yield a rank with too few CPUs for what loads its data; ``submit`` warns where the job states none."""
    spec, request = subject.spec, subject.request
    if spec is None or request is None:
        return
    key = "resources.cpus_per_task"
    cpus = spec.resources.cpus_per_task
    workers = None if spec.train is None else spec.train.num_workers
    if workers is not None and workers > cpus:
        yield Hit(
            key="train.num_workers",
            problem=f"train.num_workers is {workers}, and a rank has {cpus} CPU{'' if cpus == 1 else 's'} ({key})",
            fix=f"write {key}: {workers + 1}, or leave train.num_workers out",
        )
    elif spec.uses_gpus and cpus == 1 and request.job.origins.get(key) != DEFAULT:
        yield Hit(
            key=key,
            problem=f"{key} is 1, so that a GPU waits for the one CPU that starts its work and loads its data",
            fix=f"write {key}: 8, or the CPUs of a node divided by its GPUs (sinfo -o '%P %c %G')",
        )


def _classes(subject: Subject) -> Iterator[Hit]:
    """Yield data that cannot be opened as the job says, and data with more classes than the model has."""
    spec, data = subject.spec, subject.data
    if spec is None or spec.train is None or data is None:
        return
    train = spec.train
    if data.note is not None:
        # The note ends with what `plan` would need.
        problem, _ = split_message(data.note)
        yield Hit(key="train.dataset", problem=problem, fix="correct train.dataset, dataset_args, data_dir or num_classes")
    if data.classes is not None and train.num_classes is not None and train.num_classes < data.classes:
        yield Hit(
            key="train.num_classes",
            problem=f"train.num_classes is {train.num_classes}, and the data has {data.classes} classes",
            fix=f"write train.num_classes: {data.classes}, or leave it out",
        )


def _gpu_memory(subject: Subject) -> Iterator[Hit]:
    """Yield a model whose parameters, gradients and optimizer state alone need more memory than a GPU has."""
    spec = subject.spec
    if spec is None or spec.train is None or spec.device != "cuda":
        return
    name = _gpu_type(subject)
    gpu_gib = None if name is None else gpu_memory_gib(name)
    if gpu_gib is None:
        return
    needed = state_bytes(spec, directory=subject.directory)
    if needed is None or needed.total <= gpu_gib * 2**30:
        return
    yield Hit(
        key="train.model",
        problem=f"train.model has {needed.parameters:,} parameters, which need {needed.total / 2**30:.0f} GiB on each "
        f"GPU ({needed.description}) without any activations, and a GPU of type {name} has {gpu_gib} GiB",
        fix="use a smaller model or a larger GPU: DDP keeps the whole model on each of them",
    )


def _gpu_type(subject: Subject) -> str | None:
    """Return the type of the job's GPUs: as given, or the only one of its partitions; None if it is not known."""
    if subject.spec is not None and subject.spec.resources.gpu_type is not None:
        return subject.spec.resources.gpu_type
    types = {name for partition in _partitions(subject).values() for name in partition.gpu_types}
    return types.pop() if len(types) == 1 else None
