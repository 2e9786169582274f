"""From a resolved job to the text of its sbatch script. Nothing but the arguments decides on a byte of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from hpcddp.errors import UserError
from hpcddp.launch import templating
from hpcddp.launch.variables import swept_variables
from hpcddp.slurm.directives import Directive, directives_for
from hpcddp.slurm.grammar import refuse_unwritable
from hpcddp.spec.environment import Mount
from hpcddp.spec.environment_rules import data_mount_of
from hpcddp.spec.job import JobSpec
from hpcddp.spec.read import ResolvedJob
from hpcddp.spec.write import dump_job

Launcher = Literal["slurm", "local"]

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NUL = {"\0": "a NUL character"}


class RunIdError(UserError):
    """A run id is not one."""

    kind = "run_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedScript:
    """A script.

    Args:
        text: all of it.
        directives: what it asks sbatch for, in order.
    """

    text: str
    directives: tuple[Directive, ...]


def render_script(
    job: ResolvedJob,
    *,
    python: str,
    run_id: str | None,
    launcher: Launcher = "slurm",
    template: str | None = None,
) -> RenderedScript:
    """Render the script of a job.

    Args:
        job: the resolved job.
        python: the interpreter that the tasks run.
        run_id: the run's id; None is a script for sbatch by hand, which derives the id from the job id.
        launcher: what starts the tasks: srun, or submitit's controller on this machine.
        template: a template's name or path; None is the default one.

    Raises:
        RunIdError: the run id is not one.
        UnwritableValueError: a value holds what no quoting can carry; its field is named.
        DirectiveError: ``resources.sbatch`` holds something that is no flag.
        TemplateError: there is no such template, or it is wrong; file and line are named.
    """
    if run_id is not None and _RUN_ID.fullmatch(run_id) is None:
        raise RunIdError(
            f"the run id is {run_id!r}, which cannot name a directory of a run; write 1 to 64 letters, digits, "
            "'.', '_' and '-', beginning with a letter or digit"
        )
    spec = job.spec
    directives = directives_for(spec, run_id=run_id)
    _refuse_unwritable_words(spec, python)
    variables = swept_variables(spec)
    document = dump_job(spec, environment_values=False).removesuffix("\n")
    values: dict[str, Any] = {
        "name": spec.name,
        "run_id": run_id,
        "run_root": spec.run_root,
        "launcher": launcher,
        "directives": directives,
        "nodes": spec.resources.nodes,
        "tasks": spec.world_size,
        "tasks_per_node": spec.tasks_per_node,
        "gpus_per_node": spec.resources.gpus_per_node,
        "cpus_per_task": spec.resources.cpus_per_task,
        "modules": spec.environment.modules,
        "conda": spec.environment.conda,
        "venv": spec.environment.venv,
        "uv": spec.environment.uv,
        "container": _container(spec),
        "setup": spec.environment.setup,
        "env": {name: value for name, value in spec.environment.env.items() if name not in variables},
        "is_sweep": spec.sweep is not None,
        "variables": variables,
        "pass_env": spec.environment.pass_env,
        "python": python,
        "job_document": document,
        "job_delimiter": _delimiter(document),
    }
    return RenderedScript(text=templating.render(template, values), directives=directives)


def _container(spec: JobSpec) -> dict[str, Any] | None:
    """Return what a template needs to know about the container, None for none."""
    environment, container = spec.environment, spec.environment.container
    if container is None:
        return None
    data = data_mount_of(spec, container)
    mounts = (*container.mounted, *([] if data is None else [Mount(source=data, target=data)]))
    return {
        "image": container.image,
        "image_file": container.image_file,
        "runtime": container.runtime,
        "python": container.python,
        "workdir": container.workdir,
        "mounts": [str(mount) for mount in mounts],
        "variables": list(dict.fromkeys([*environment.env, *swept_variables(spec), *environment.pass_env])),
    }


def _refuse_unwritable_words(spec: JobSpec, python: str) -> None:
    """Find what cannot be written, here where the field is known."""
    environment = spec.environment
    fields = {"environment.python": python}
    fields |= {f"environment.env.{name}": value for name, value in environment.env.items()}
    fields |= {f"environment.modules[{index}]": module for index, module in enumerate(environment.modules)}
    fields |= {f"environment.setup[{index}]": line for index, line in enumerate(environment.setup)}
    for field, text in fields.items():
        refuse_unwritable(text, _NUL, field=field, place="a script")


def _delimiter(document: str) -> str:
    """Return a line that ends a here-document and does not stand in this one."""
    lines = set(document.splitlines())
    names = ("HPCDDP_JOB" if number == 0 else f"HPCDDP_JOB_{number}" for number in count())
    return next(name for name in names if name not in lines)
