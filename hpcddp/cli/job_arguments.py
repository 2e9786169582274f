"""The job as the command line describes it: options for fields of the job file, and the command after ``--``."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hpcddp.cli.help import ClickObject
from hpcddp.cli.options import (
    complete_accounts,
    complete_gpu_types,
    complete_mail_types,
    complete_partitions,
    complete_qos,
    run_argument,
)
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from hpcddp.jobfile.job import JobSpec
    from hpcddp.jobfile.overrides import Override
    from hpcddp.jobfile.problems import Problem
    from hpcddp.jobfile.read import ResolvedJob
    from hpcddp.run.directory import RunDirectory


class _Field(NamedTuple):
    """A field of the job file that has an option of its own."""

    path: str
    option: str
    help: str
    short: str | None = None
    """The option of sbatch with one letter."""
    listed: bool = False
    """Whether ``--help`` describes it; ``--help --all`` describes every option."""
    flag: bool = False
    metavar: str = "VALUE"
    values: Callable[..., Sequence[str]] | None = None
    """Completes its value in the shell."""


FIELDS = (
    _Field("run_root", "--run-root", "Directory of all runs; overrides run_root.", listed=True, metavar="DIR"),
    _Field("name", "--name", "Name of the job.", short="-J", metavar="NAME"),
    _Field("batch.global_batch_size", "--global-batch-size", "Samples of an optimizer step, over all ranks."),
    _Field("resources.nodes", "--nodes", "Number of nodes.", short="-N", listed=True),
    _Field("resources.min_nodes", "--min-nodes", "Nodes that must be left when a node is lost."),
    _Field("resources.spare_nodes", "--spare-nodes", "Nodes that take the places of lost ones."),
    _Field("resources.gpus_per_node", "--gpus-per-node", "GPUs on each node; one rank for each GPU.", listed=True),
    _Field("resources.gpu_type", "--gpu-type", "Kind of GPU, such as a100.", values=complete_gpu_types),
    _Field("resources.tasks_per_node", "--tasks-per-node", "Ranks on each node of a CPU job.", listed=True),
    _Field("resources.cpus_per_task", "--cpus-per-task", "CPUs of each rank.", short="-c", listed=True),
    _Field("resources.mem", "--mem", "Memory of each node, such as 64G.", listed=True),
    _Field("resources.mem_per_cpu", "--mem-per-cpu", "Memory for each CPU, in place of --mem."),
    _Field("resources.mem_per_gpu", "--mem-per-gpu", "Memory for each GPU, in place of --mem."),
    _Field("resources.time_limit", "--time", "Time limit: 2h, 90min, 1:30:00, or minutes.", short="-t", listed=True),
    _Field(
        "resources.partition", "--partition", "Slurm partition.", short="-p", listed=True, values=complete_partitions
    ),
    _Field("resources.account", "--account", "Account to charge.", short="-A", values=complete_accounts),
    _Field("resources.qos", "--qos", "Quality of service.", short="-q", values=complete_qos),
    _Field("resources.constraint", "--constraint", "Node features that are required.", short="-C"),
    _Field("resources.reservation", "--reservation", "Reservation to run in."),
    _Field("resources.nodelist", "--nodelist", "Nodes that the job must get.", short="-w"),
    _Field("resources.exclude", "--exclude", "Nodes that the job must not get.", short="-x"),
    _Field("resources.exclusive", "--exclusive", "Share the nodes with no other job.", flag=True),
    _Field("resources.licenses", "--licenses", "Licenses that the job holds.", short="-L"),
    _Field("resources.mail_type", "--mail-type", "When Slurm sends mail: END,FAIL.", values=complete_mail_types),
    _Field("resources.mail_user", "--mail-user", "Who gets the mail.", metavar="ADDRESS"),
)
"""The options, in the order of the help. ``resources.sbatch`` is set with ``--set resources.sbatch.FLAG=VALUE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArguments:
    """The fields of the job that the command line sets.

    Args:
        fields: the text of each option of ``FIELDS`` that is given, by the field's key path.
        command: the words after ``--``; None if there is no ``--``.
    """

    fields: Mapping[str, str]
    command: tuple[str, ...] | None

    @property
    def run_root(self) -> Path | None:
        """The value of ``--run-root``, in which ``--resume`` and ``--after`` look up runs too."""
        text = self.fields.get("run_root")
        return None if text is None else Path(text)

    @property
    def is_empty(self) -> bool:
        """Whether no field except ``run_root`` is set."""
        return self.fields.keys() <= {"run_root"} and self.command is None

    def load(
        self, job_file: Path | None, *, overrides: list[str] | None, sweep: Sequence[Override] = ()
    ) -> ResolvedJob:
        """Return the job of a job file and the command line.

        Args:
            job_file: None if the command line describes the whole job.
            overrides: the values of ``--set``.
            sweep: the fields that the sweep options set.

        Raises:
            UserError: there is neither a file nor a command, or one of them is invalid.
        """
        from hpcddp.api import read_job

        if job_file is None and self.command is None:
            raise UserError("no JOB is given; write a job file, or a command after --, as in: -- python train.py")
        options = [*self._overrides(self.fields), *sweep]
        return read_job(job_file, overrides, options=options)

    def change(
        self, spec: JobSpec, *, run: RunDirectory, overrides: list[str] | None, sweep: Sequence[Override] = ()
    ) -> ResolvedJob:
        """Return the job of a run with the changes of the command line.

        Args:
            spec: the job as it is.
            run: the run of this job.
            overrides: the values of ``--set``.
            sweep: the fields that the sweep options set, which make no change of a run.

        Raises:
            UserError: a change is invalid.
        """
        from hpcddp.api import profiles_directory
        from hpcddp.jobfile.read import change_job

        if sweep:
            raise UserError("--resume continues one run, and the sweep options start new ones; leave one of them out")
        if spec.train is None:
            _refuse_fields_of_training(spec, run, overrides or ())
        # The run stays where it is; --run-root says where it is looked up.
        fields = {path: text for path, text in self.fields.items() if path != "run_root"}
        return change_job(
            spec,
            file=str(run.job_file),
            overrides=overrides or (),
            options=self._overrides(fields),
            profiles=profiles_directory(os.environ),
            environment=os.environ,
        )

    def _overrides(self, fields: Mapping[str, str]) -> Sequence[Override | Problem]:
        """Return the values of these fields, by the options that set them, and the command."""
        from hpcddp.jobfile.overrides import read_options

        option_of = {field.path: field.option for field in FIELDS}
        texts = {path: (option_of[path], text) for path, text in fields.items()}
        return read_options(texts, self.command)


def _refuse_fields_of_training(spec: JobSpec, run: RunDirectory, overrides: Sequence[str]) -> None:
    """Reject ``--set train...`` for a run that is no training: its job would lack the other fields of a training."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if not key.startswith("train."):
            continue
        kind = "an entrypoint"
        instead = "leave it out"
        if spec.command is not None:
            kind = "a command"
            words = shlex.join(["hpcddp", "submit", "--resume", run_argument(run.path)])
            instead = f"change its arguments: {words} -- COMMAND"
        raise UserError(f"{key} (--set) is for a training, and the run {run.run_id} is {kind}; {instead}")


def field_options() -> list[ClickObject]:
    """Return the options of ``FIELDS`` as parameters of a command."""

    def options(**_: object) -> None:
        """Take the options: typer makes options from the parameters of a function, and in no other way."""

    parameters = [_as_parameter(field) for field in FIELDS]
    options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(options)
    return list(typer.main.get_command(app).params)


def take_field_texts(parameters: dict[str, Any]) -> dict[str, str]:
    """Remove the values of ``field_options`` from the parameters of a command, and return those that are given.

    The texts are by the key paths of the fields; that of a flag is ``true``.
    """
    texts = {}
    for field in FIELDS:
        value = parameters.pop(_parameter_name(field))
        if value is True:
            texts[field.path] = "true"
        elif value:
            texts[field.path] = value
    return texts


def _parameter_name(field: _Field) -> str:
    return field.option.removeprefix("--").replace("-", "_")


def _as_parameter(field: _Field) -> inspect.Parameter:
    attributes: dict[str, Any] = {"help": field.help, "hidden": not field.listed, "show_default": False}
    if not field.flag:
        # The help shows the metavar instead of the type.
        is_count = field.option.endswith(("nodes", "node", "task", "size"))
        attributes["metavar"] = "N" if is_count else field.metavar
        attributes["autocompletion"] = field.values
    names = [field.option] if field.short is None else [field.short, field.option]
    option = typer.Option(*names, **attributes)
    return inspect.Parameter(
        _parameter_name(field),
        inspect.Parameter.KEYWORD_ONLY,
        default=False if field.flag else None,
        annotation=Annotated[bool if field.flag else str | None, option],
    )
