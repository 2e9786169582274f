"""The renderer: from a request to the text of its sbatch script, which depends on nothing but the request."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcddp import vendors
from hpcddp.errors import UserError, listed
from hpcddp.jobfile.document import Path, dotted, path_of
from hpcddp.jobfile.environment import VARIABLES, Mount
from hpcddp.jobfile.job import JobSpec, leaf_paths
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.resources import NodeRange
from hpcddp.jobfile.rules import data_mount_of
from hpcddp.jobfile.write import dump_for_script
from hpcddp.slurm.directives import Directive, UnwritableValueError, directives_for, refuse_unwritable
from hpcddp.slurm.job_environment import FOREIGN_PREFIXES, foreign_step_options
from hpcddp.submission.request import SubmitRequest
from hpcddp.submission.template import (
    NOT_IN_A_WORD,
    TemplateError,
    is_default_template,
    refuse_broken_shell,
    refuse_unread_directives,
    render_template,
)

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class RunIdError(UserError):
    """A text that is not a valid run id."""

    kind = "run_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedScript:
    """A script.

    Args:
        directives: its ``#SBATCH`` directives, in order.
    """

    text: str
    directives: tuple[Directive, ...]


def render_script(request: SubmitRequest) -> RenderedScript:
    """Render the script of a request.

    Raises:
        RunIdError: the run id is not valid.
        UnwritableValueError: a value holds what no quoting can carry; its field is named.
        TemplateError: the template does not exist or cannot be rendered; file and line are named.
    """
    spec = request.job.spec
    run_id = request.run_id
    if run_id is not None and _RUN_ID.fullmatch(run_id) is None:
        raise RunIdError(
            f"the run id is {run_id!r}, which cannot name a directory of a run; write 1 to 64 letters, digits, "
            "'.', '_' and '-', beginning with a letter or digit"
        )
    directives = directives_for(spec, run_id=run_id)
    _refuse_unwritable_texts(spec, request.python)
    text = render_template(request.template, _template_values(request, directives))
    if not text.startswith("#!"):
        raise TemplateError(
            f"the template {request.template} makes a script whose first line does not begin with #!, which sbatch "
            "refuses; begin it with #!/bin/bash"
        )
    _refuse_dos_line_breaks(text)
    if not is_default_template(request.template):
        refuse_broken_shell(text, request.template)
        refuse_unread_directives(text, request.template)
    return RenderedScript(text=text, directives=directives)


def notes_about_script(request: SubmitRequest, script: RenderedScript) -> tuple[str, ...]:
    """Return a warning about a template of the user's own: flags of the job that its script lacks."""
    if is_default_template(request.template) or request.cluster != "slurm":
        return ()
    # Only a template of the user's own needs the reader of scripts.
    from hpcddp.script.directives import DIRECTIVE
    from hpcddp.script.parse import parse_script

    # Flags of resources.sbatch may be abbreviated, so that those of the job are read in the same way.
    present = {flag.name.removeprefix("no-") for flag in parse_script(script.text).flags}
    lines = "\n".join(f"{DIRECTIVE} {directive}" for directive in script.directives)
    flags = [flag.name for flag in parse_script(lines).flags]
    missing = [f"--{flag}" for flag in flags if flag.removeprefix("no-") not in present]
    if not missing:
        return ()
    note = (
        f"the template {request.template} makes a script without {listed(missing)}, for which sbatch takes its own "
        "defaults; write {{ super() | verbatim }} into the block head, or the directives that are missing"
    )
    return (note,)


def _template_values(request: SubmitRequest, directives: Sequence[Directive]) -> dict[str, Any]:
    """Return the values of the variables that a template may use, by name."""
    spec = request.job.spec
    variables = _swept_variables(request)
    document = dump_for_script(spec).removesuffix("\n")
    nodes: int | None = spec.nodes
    tasks: int | None = spec.tasks
    if isinstance(spec.resources.nodes, NodeRange):
        # Slurm chooses the number when the job starts.
        nodes = None
        tasks = None
    return {
        "name": spec.name,
        "run_id": request.run_id,
        "run_root": spec.run_root,
        "launcher": request.cluster,
        "foreign_prefixes": FOREIGN_PREFIXES,
        "foreign_variables": foreign_step_options(directive.flag for directive in directives),
        "directives": directives,
        "spare_nodes": spec.resources.spare_nodes,
        "nodes": nodes,
        "tasks": tasks,
        "tasks_per_node": spec.tasks_per_node,
        "gpus_per_node": spec.resources.gpus_per_node,
        # Tasks get no GPUs for which their job has not asked, unless srun asks for them (srun(1), --gres).
        "gpu_request": spec.resources.gpu_request,
        "cpus_per_task": spec.cpus_per_task,
        "srun_flags": [
            # A step that asks for --gpus-per-node, which it also has from its job, gets no other resource unasked.
            *(
                f"--gres={directive.value}"
                for directive in directives
                if directive.flag == "gres" and spec.resources.gpu_request != "gres"
            ),
            *(
                f"--{flag}" if value is True else f"--{flag}={value}"
                for flag, value in sorted(spec.resources.srun.items())
            ),
        ],
        "modules": spec.environment.modules,
        "conda": spec.environment.conda,
        "venv": spec.environment.venv,
        "uv": spec.environment.uv,
        "container": _container(spec, variables),
        "copies_code": spec.environment.code == "snapshot",
        "setup": spec.environment.setup,
        "stage": spec.environment.stage,
        "env": exported_values(request),
        "is_sweep": spec.sweep is not None,
        "variables": variables,
        "pass_env": spec.environment.pass_env,
        "python": request.python,
        "work": _work_of(spec),
        "job_document": document,
        "job_delimiter": _delimiter(document),
    }


def _work_of(spec: JobSpec) -> str:
    """Return what each task of a job runs, for a person."""
    if spec.command is not None:
        return shlex.join(spec.command)
    if spec.entrypoint is not None:
        return f"the function {spec.entrypoint}"
    if spec.train is not None:
        return f"the built-in training of {spec.train.model} on {spec.train.dataset}"
    return "nothing"


def _container(spec: JobSpec, variables: Iterable[str]) -> dict[str, Any] | None:
    """Return the values that a template needs for the container; None without one.

    Args:
        variables: the names of the swept environment variables.
    """
    environment = spec.environment
    container = environment.container
    if container is None:
        return None
    mounts = list(container.mounted)
    data = data_mount_of(spec, container)
    if data is not None:
        mounts.append(Mount(source=data, target=data))
    return {
        "image": container.image,
        "image_file": container.image_file,
        "runtime": container.runtime,
        "gpu_options": [
            (vendor.container_option, [f"{vendors.ROOT / pattern}" for pattern in vendor.device_files])
            for vendor in vendors.VENDORS
        ],
        "python": container.python,
        "workdir": container.workdir,
        "mounts": [str(mount) for mount in mounts],
        "variables": list(dict.fromkeys([*environment.env, *variables, *environment.pass_env])),
    }


def _refuse_unwritable_texts(spec: JobSpec, python: str) -> None:
    """Refuse texts that no script can carry; only here is the field of each known."""
    refuse_unwritable(python, NOT_IN_A_WORD, field="environment.python", place="a script")
    for path, value in leaf_paths(spec):
        for field, text in _texts_in(value, dotted(path)):
            refuse_unwritable(text, NOT_IN_A_WORD, field=field, place="a script")


def _texts_in(value: object, field: str) -> Iterator[tuple[str, str]]:
    """Yield the key path and the text of each text in the value of a field."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _texts_in(entry, f"{field}.{key}")
    elif isinstance(value, Sequence):
        for index, entry in enumerate(value):
            yield from _texts_in(entry, f"{field}[{index}]")


def _refuse_dos_line_breaks(text: str) -> None:
    """Refuse a script with a line that ends with a carriage return, as sbatch does ("DOS line breaks").

    Raises:
        UnwritableValueError: has the line.
    """
    before, line_break, _ = text.partition("\r\n")
    if line_break:
        line = before.rpartition("\n")[2].strip()
        raise UnwritableValueError(
            f"the script has a line that ends with a carriage return ({line!r:.80}), which sbatch refuses; remove it "
            "from environment.env, environment.setup or the template"
        )


def exported_values(request: SubmitRequest) -> dict[str, str]:
    """Return the values of ``environment.env`` that a script exports, without those that a sweep varies."""
    swept = _swept_variables(request)
    return {name: value for name, value in request.job.spec.environment.env.items() if name not in swept}


def _delimiter(document: str) -> str:
    """Return a delimiter for a here-document that is not a line of the document."""
    lines = set(document.splitlines())
    delimiter = "HPCDDP_JOB"
    number = 0
    while delimiter in lines:
        number += 1
        delimiter = f"HPCDDP_JOB_{number}"
    return delimiter


def _swept_variables(request: SubmitRequest) -> dict[str, tuple[tuple[str, ...], int]]:
    """Return the environment variables to which a sweep gives other values in each element, by name.

    Each has its values, and the number of consecutive elements with the same one; behind the last, they begin again.
    """
    sweep = request.job.spec.sweep or ()
    variables = {}
    if isinstance(sweep, Mapping):
        stride = len(request.elements)
        for key, values in sweep.items():
            stride //= len(values)
            variables[path_of(key)] = (values, stride)
    else:
        for key in sweep[0] if sweep else ():
            variables[path_of(key)] = (tuple(element.get(key) for element in sweep), 1)
    return {path[-1]: variable for path, variable in variables.items() if path[:-1] == VARIABLES}


SET = "<set>"
"""Printed in place of the value of an environment variable: the script needs the value, a list of fields does not."""


def describe(request: SubmitRequest, script: RenderedScript) -> dict[str, Any]:
    """Return the document of ``render --json``."""
    job = request.job
    return {
        "script": script.text,
        "directives": [{"flag": directive.flag, "value": directive.value} for directive in script.directives],
        "plan": None if request.plan is None else request.plan.as_json(),
        "elements": request.elements or None,
        "fields": {dotted(path): {"value": value, "origin": job.origins[dotted(path)]} for path, value in _fields(job)},
    }


def _fields(job: ResolvedJob) -> Iterator[tuple[Path, Any]]:
    """Yield every field that is not a section; of a mapping whose keys the user names, each entry too."""
    document = job.spec.model_dump(mode="json")
    document["environment"]["env"] = dict.fromkeys(job.spec.environment.env, SET)
    for path, field in leaf_paths(job.spec):
        value: Any = document
        for key in path:
            value = value[key]
        yield path, value
        if isinstance(field, Mapping):
            yield from (((*path, key), entry) for key, entry in value.items())
