"""Rules about a job file: its fields, its batch, its data, and what earlier runs of the job have measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from hpcddp.batch.job import has_batch_norm
from hpcddp.batch.plan import PlanError, refuse_single_over_ranks, refuse_single_sample
from hpcddp.check.finding import Example, Hit, Rule, Severity, Subject, split_message
from hpcddp.errors import counted
from hpcddp.jobfile.cluster import Partition
from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.merge import DEFAULT
from hpcddp.jobfile.units import TimeLimit
from hpcddp.stop.deadline import short_lead_sentence
from hpcddp.submission.checks import holds_files, python_behind_launcher
from hpcddp.submission.shell_commands import read_program


def _job_file(subject: Subject) -> Iterator[Hit]:
    """Yield what is wrong with the job file itself."""
    for problem in subject.problems:
        said, fix = split_message(problem.sentence)
        name = problem.key or problem.file
        yield Hit(line=problem.line, key=problem.key, problem=f"{name} {said}", fix=fix)


def _single_sample(subject: Subject) -> Iterator[Hit]:
    """Yield a batch that leaves BatchNorm one sample."""
    spec = subject.spec
    plan = subject.plan
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
    spec = subject.spec
    plan = subject.plan
    measured = subject.measured
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
    spec = subject.spec
    measured = subject.measured
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
                problem=f"partition {name} gives a preempted job {partition.grace_time_s} s, and a step and a save "
                f"take {needed_s:.0f} s, as run {measured.run_id} measured",
                fix="write a shorter checkpoint.every, because these steps are repeated, or use another partition",
            )


def _partitions(subject: Subject) -> dict[str, Partition]:
    """Return the partitions that the job names, as its profile knows them."""
    spec = subject.spec
    facts = None if subject.request is None else subject.request.job.cluster
    if spec is None or facts is None:
        return {}
    names = (spec.resources.partition or facts.default_partition or "").split(",")
    return {name: facts.partitions[name] for name in names if name in facts.partitions}


def _cpus(subject: Subject) -> Iterator[Hit]:
    """Yield a rank with too few CPUs for what loads its data; ``submit`` warns where the job states none."""
    spec = subject.spec
    request = subject.request
    if spec is None or request is None or request.cluster == "local":
        return
    key = "resources.cpus_per_task"
    cpus = spec.resources.cpus_per_task
    workers = None if spec.train is None else spec.train.num_workers
    if workers is not None and workers > cpus:
        yield Hit(
            key="train.num_workers",
            problem=f"train.num_workers is {workers}, and a rank has {counted(cpus, 'CPU')} ({key})",
            fix=f"write {key}: {workers + 1}, or leave train.num_workers out",
        )
    elif spec.uses_gpus and cpus == 1 and request.job.origins.get(key) != DEFAULT:
        yield Hit(
            key=key,
            problem=f"{key} is 1, so that a GPU waits for the one CPU that starts its work and loads its data",
            fix=f"write {key}: 8, or the CPUs of a node divided by its GPUs (sinfo -o '%P %c %G')",
        )


def _data(subject: Subject) -> Iterator[Hit]:
    """Yield data that cannot be opened as the job says, and data with more classes than the model has."""
    spec = subject.spec
    data = subject.data
    if spec is None or spec.train is None or data is None:
        return
    train = spec.train
    # `submit` says that a directory of data is missing or empty.
    is_here = train.data_dir is None or holds_files(Path(train.data_dir))
    if data.note is not None and is_here:
        # The note ends with what `plan` would need.
        problem, _ = split_message(data.note)
        yield Hit(
            key="train.dataset", problem=problem, fix="correct train.dataset, dataset_args, data_dir or num_classes"
        )
    if data.classes is not None and train.num_classes is not None and train.num_classes < data.classes:
        yield Hit(
            key="train.num_classes",
            problem=f"train.num_classes is {train.num_classes}, and the data has {data.classes} classes",
            fix=f"write train.num_classes: {data.classes}, or leave it out",
        )


def _model_arguments(subject: Subject) -> Iterator[Hit]:
    """Yield arguments with which torchvision does not build the model; ``submit`` reads a function of the user's."""
    train = None if subject.spec is None else subject.spec.train
    # Weights would be downloaded.
    if train is None or is_reference(train.model) or not train.model_args or "weights" in train.model_args:
        return
    if subject.model_refusal is not None:
        problem, fix = split_message(subject.model_refusal)
        yield Hit(key="train.model_args", problem=problem, fix=fix)


def _unreported_progress(subject: Subject) -> Iterator[Hit]:
    """Yield failures that the job allows, and that end the run earlier if its program reports no progress."""
    spec = subject.spec
    if spec is None or spec.command is None:
        return
    limit = spec.requeue.max_attempts_without_progress
    failures = spec.requeue.max_failures
    script, _ = python_behind_launcher(spec.command, subject.environment)
    text = "" if script is None or failures < limit else read_program(script)
    if not text or "hpcddp" in text.lower():
        return
    yield Hit(
        key="requeue.max_failures",
        problem=f"requeue.max_failures is {failures}, and {script} names neither HPCDDP_PROGRESS_FILE nor hpcddp",
        fix="let the program touch the file $HPCDDP_PROGRESS_FILE each time it has saved",
    )


_DATASET = """\
class Data:
    labels = [0, 1, 2, 3, 4] * 20

    def __len__(self):
        return 100

    def __getitem__(self, index):
        raise NotImplementedError


def make(split):
    return Data()
"""
_TRAIN = "train: {model: resnet18, dataset: synthetic, epochs: 10}\n"
_RUN = "runs/a/20260101-000000-0000"


def _measured_run(*, save_s: float) -> dict[str, str]:
    """Return the files of a run whose steps took 10 s each."""
    lines = "".join(f'{{"step": {step}, "time": {1000 + 10 * step}, "loss": 1.0}}\n' for step in range(1, 9))
    save = f'{{"event": "save", "time": 1080.0, "attempt": 0, "step": 8, "seconds": {save_s}, "format": 1}}\n'
    plan = '{"format": 1, "global_batch_size": 64, "world_size": 1, "steps_per_epoch": 16, "total_steps": 160}\n'
    return {f"{_RUN}/metrics.jsonl": lines, f"{_RUN}/events.jsonl": save, f"{_RUN}/plan.json": plan}


def _job(*lines: str) -> str:
    return "\n".join(("name: a", *lines, ""))


RULES = (
    Rule(
        code="job-file",
        severity=Severity.ERROR,
        otherwise="`hpcddp submit` refuses the job file",
        sources=("docs/job-file.md",),
        find=_job_file,
        bad=Example(_job("resource: {nodes: 2}", "command: [python, -V]")),
        good=Example(_job("resources: {nodes: 2}", "command: [python, -V]")),
    ),
    Rule(
        code="batch-norm-one-sample",
        severity=Severity.ERROR,
        otherwise="torch ends the training in the middle of an epoch: Expected more than 1 value per channel",
        sources=("https://github.com/pytorch/pytorch/issues/4534", "docs/design/batch-contract.md, section 2"),
        find=_single_sample,
        bad=Example(_job("resources: {tasks_per_node: 4}", "batch: {global_batch_size: 4}", _TRAIN)),
        good=Example(_job("resources: {tasks_per_node: 4}", "batch: {global_batch_size: 8}", _TRAIN)),
    ),
    Rule(
        code="time-limit-too-short",
        severity=Severity.WARNING,
        otherwise="the training ends unfinished",
        sources=("sbatch(1), --time",),
        find=_time_limit,
        bad=Example(
            _job(
                "resources: {time_limit: 10min}",
                "requeue: {causes: [preemption]}",
                "batch: {global_batch_size: 64}",
                _TRAIN,
            ),
            files=_measured_run(save_s=1),
            given="after a run whose steps took 10 s",
        ),
        good=Example(
            _job(
                "resources: {time_limit: 10min}",
                "requeue: {causes: [preemption, time_limit]}",
                "batch: {global_batch_size: 64}",
                _TRAIN,
            ),
            files=_measured_run(save_s=1),
            given="after a run whose steps took 10 s",
        ),
    ),
    Rule(
        code="save-too-late",
        severity=Severity.WARNING,
        otherwise="the job is ended before it has saved, and repeats the steps since its last save",
        sources=("sbatch(1), --signal", "slurm.conf(5), GraceTime"),
        find=_save_before_the_end,
        bad=Example(
            _job("requeue: {signal_lead: 60s}", "batch: {global_batch_size: 64}", _TRAIN),
            files=_measured_run(save_s=90),
            given="after a run whose steps took 10 s and whose save took 90 s",
        ),
        good=Example(
            _job("requeue: {signal_lead: 200s}", "batch: {global_batch_size: 64}", _TRAIN),
            files=_measured_run(save_s=90),
            given="after a run whose steps took 10 s and whose save took 90 s",
        ),
    ),
    Rule(
        code="cpus-for-loader",
        severity=Severity.WARNING,
        otherwise="the GPU waits for its data",
        sources=(
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader",
            "https://github.com/MLI-lab/DeepDeWedge/issues/25",
        ),
        find=_cpus,
        bad=Example(_job("resources: {gpus_per_node: 4, cpus_per_task: 1}", "command: [python, -V]")),
        good=Example(_job("resources: {gpus_per_node: 4, cpus_per_task: 8}", "command: [python, -V]")),
    ),
    Rule(
        code="data",
        severity=Severity.ERROR,
        otherwise="the job ends before its first step, or with a device-side assert at the first label that the model "
        "has no output for",
        sources=("https://github.com/milesial/Pytorch-UNet/issues/258",),
        find=_data,
        bad=Example(
            _job("batch: {global_batch_size: 8}", "train: {model: resnet18, dataset: 'mine:make', num_classes: 3}"),
            files={"mine.py": _DATASET},
            given="with a data set that has the labels 0 to 4",
        ),
        good=Example(
            _job("batch: {global_batch_size: 8}", "train: {model: resnet18, dataset: 'mine:make', num_classes: 5}"),
            files={"mine.py": _DATASET},
            given="with a data set that has the labels 0 to 4",
        ),
        is_slow=True,
    ),
    Rule(
        code="unreported-progress",
        severity=Severity.NOTE,
        otherwise="attempts that fail count as attempts without progress, of which "
        "requeue.max_attempts_without_progress in a row end the run, whatever requeue.max_failures is",
        sources=("docs/any-script.md, Progress",),
        find=_unreported_progress,
        bad=Example(
            _job("requeue: {max_failures: 5}", "command: [python, train.py]"),
            files={"train.py": "import torch\n"},
            given="beside a train.py without hpcddp",
        ),
        good=Example(
            _job("requeue: {max_failures: 5}", "command: [python, train.py]"),
            files={"train.py": "import os\n\nPROGRESS = os.environ['HPCDDP_PROGRESS_FILE']\n"},
            given="beside a train.py that touches HPCDDP_PROGRESS_FILE",
        ),
    ),
    Rule(
        code="model-arguments",
        severity=Severity.ERROR,
        otherwise="the job ends before its first step",
        sources=("https://pytorch.org/vision/stable/models.html",),
        find=_model_arguments,
        bad=Example(
            _job("batch: {global_batch_size: 8}", "train: {model: resnet18, model_args: {groups: 3}, dataset: digits}")
        ),
        good=Example(
            _job("batch: {global_batch_size: 8}", "train: {model: resnet18, model_args: {groups: 1}, dataset: digits}")
        ),
        is_slow=True,
    ),
)
"""The rules about a job file."""
