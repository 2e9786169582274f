"""The job as the command line describes it: options for fields of the job file, and the command after ``--``."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

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
    from hpcddp.cli.field_options import FieldOption
    from hpcddp.jobfile.job import JobSpec
    from hpcddp.jobfile.overrides import Override
    from hpcddp.jobfile.problems import Problem
    from hpcddp.jobfile.read import ResolvedJob
    from hpcddp.run.directory import RunDirectory


# What completes the value of an option in a shell.
_COMPLETIONS: Final[Mapping[str, Callable[..., Sequence[str]]]] = MappingProxyType(
    {
        "--gpu-type": complete_gpu_types,
        "--partition": complete_partitions,
        "--account": complete_accounts,
        "--qos": complete_qos,
        "--mail-type": complete_mail_types,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArguments:
    """The fields of the job that the command line sets.

    Args:
        fields: the text of each option that is given, by the key path of its field.
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

        if job_file is None and not self.command:
            raise UserError("no JOB is given; write a job file, or a command after --, as in: -- python train.py")
        options = [*self._overrides(self.fields), *sweep]
        return read_job(job_file, overrides, options=options)

    def change(
        self, spec: JobSpec, *, run: RunDirectory, overrides: list[str] | None, sweep: Sequence[Override] = ()
    ) -> ResolvedJob:
        """Return the job of a run with the changes of the command line.

        Args:
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
        from hpcddp.cli.field_options import field_options
        from hpcddp.jobfile.overrides import read_options

        option_of = {option.path: option.name for option in field_options()}
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


def field_parameters() -> list[ClickObject]:
    """Return the options of the fields as parameters of a command."""
    from hpcddp.cli.field_options import field_options

    def options(**_: object) -> None:
        """Take the options: typer makes options from the parameters of a function, and in no other way."""

    parameters = [_as_parameter(option) for option in field_options()]
    options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(options)
    return list(typer.main.get_command(app).params)


def take_field_texts(parameters: dict[str, Any]) -> dict[str, str]:
    """Remove the values of ``field_parameters`` from the parameters of a command, and return those that are given.

    The texts are by the key paths of the fields; that of a switch is ``true``.

    Raises:
        UserError: one is empty.
    """
    from hpcddp.cli.field_options import field_options

    texts = {}
    for option in field_options():
        value = parameters.pop(_parameter_name(option))
        if value is True:
            texts[option.path] = "true"
        elif value == "":
            raise UserError(f"{option.name} is empty; write a value, or leave the option out")
        elif value:
            texts[option.path] = value
    return texts


def _parameter_name(option: FieldOption) -> str:
    return option.name.removeprefix("--").replace("-", "_")


def _as_parameter(option: FieldOption) -> inspect.Parameter:
    attributes: dict[str, Any] = {"help": option.help, "hidden": not option.is_listed, "show_default": False}
    if not option.is_switch:
        # The help shows the metavar instead of the type.
        attributes["metavar"] = option.metavar
        attributes["autocompletion"] = _COMPLETIONS.get(option.name)
    names = [option.name] if option.letter is None else [option.letter, option.name]
    return inspect.Parameter(
        _parameter_name(option),
        inspect.Parameter.KEYWORD_ONLY,
        default=False if option.is_switch else None,
        annotation=Annotated[bool if option.is_switch else str | None, typer.Option(*names, **attributes)],
    )
