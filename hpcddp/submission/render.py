"""The renderer: from a request to the text of its sbatch script, which depends on nothing but the request.

The templates run in a sandboxed, strict environment of Jinja2, in which each value needs a filter that quotes it.
"""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path as FilePath
from typing import Any, NoReturn

from jinja2 import (
    ChoiceLoader,
    FileSystemLoader,
    PrefixLoader,
    StrictUndefined,
    TemplateNotFound,
    TemplateSyntaxError,
    UndefinedError,
    nodes,
)
from jinja2.sandbox import SandboxedEnvironment

from hpcddp.errors import HpcddpError, UserError, printable
from hpcddp.jobfile.document import Path, dotted, path_of
from hpcddp.jobfile.environment import VARIABLES, Mount
from hpcddp.jobfile.job import JobSpec, leaf_paths
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.resources import NodeRange
from hpcddp.jobfile.rules import data_mount_of
from hpcddp.jobfile.write import dump_for_script
from hpcddp.packages import shipped_directory
from hpcddp.slurm.directives import Directive, directives_for, quote_value, refuse_unwritable
from hpcddp.slurm.job_environment import FOREIGN_PREFIXES, foreign_step_options
from hpcddp.submission.request import SubmitRequest

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NUL = {"\0": "a NUL character"}


class RunIdError(UserError):
    """A text that is not a valid run id."""

    kind = "run_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedScript:
    """A script.

    Args:
        text: all of it.
        directives: its ``#SBATCH`` directives, in order.
    """

    text: str
    directives: tuple[Directive, ...]


def render_script(request: SubmitRequest) -> RenderedScript:
    """Render the script of a request.

    Raises:
        RunIdError: the run id is not valid.
        UnwritableValueError: a value holds what no quoting can carry; its field is named.
        DirectiveError: ``resources.sbatch`` holds a name that is not a flag.
        TemplateError: the template does not exist or cannot be rendered; file and line are named.
    """
    spec, run_id = request.job.spec, request.run_id
    if run_id is not None and _RUN_ID.fullmatch(run_id) is None:
        raise RunIdError(
            f"the run id is {run_id!r}, which cannot name a directory of a run; write 1 to 64 letters, digits, "
            "'.', '_' and '-', beginning with a letter or digit"
        )
    directives = directives_for(spec, run_id=run_id)
    _refuse_unwritable_words(spec, request.python)
    variables = _swept_variables(request)
    document = dump_for_script(spec).removesuffix("\n")
    # Slurm chooses the number when the job starts.
    has_node_range = isinstance(spec.resources.nodes, NodeRange)
    values: dict[str, Any] = {
        "name": spec.name,
        "run_id": run_id,
        "run_root": spec.run_root,
        "launcher": request.cluster,
        "foreign_prefixes": FOREIGN_PREFIXES,
        "foreign_variables": foreign_step_options(directive.flag for directive in directives),
        "directives": directives,
        # srun says in the log of a submitted run how a task has ended.
        "survives": all(spec.sized(nodes).survives for nodes in spec.node_counts)
        and request.cluster == "slurm"
        and run_id is not None,
        "may_lose_nodes": spec.may_lose_nodes,
        "spare_nodes": spec.resources.spare_nodes,
        "nodes": None if has_node_range else spec.nodes,
        "tasks": None if has_node_range else spec.tasks,
        "tasks_per_node": spec.tasks_per_node,
        "gpus_per_node": spec.resources.gpus_per_node,
        "cpus_per_task": spec.cpus_per_task,
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
    text = render_template(request.template, values)
    if not text.startswith("#!"):
        raise TemplateError(
            f"the template {request.template} makes a script whose first line does not begin with #!, which sbatch "
            "refuses; begin it with #!/bin/bash"
        )
    return RenderedScript(text=text, directives=directives)


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
        spec: the job.
        variables: the names of the swept environment variables.
    """
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
        "variables": list(dict.fromkeys([*environment.env, *variables, *environment.pass_env])),
    }


def _refuse_unwritable_words(spec: JobSpec, python: str) -> None:
    """Refuse values that no shell word can carry; only here is the field of each known."""
    environment = spec.environment
    fields = {"environment.python": python}
    fields |= {f"environment.env.{name}": value for name, value in environment.env.items()}
    fields |= {f"environment.modules[{index}]": module for index, module in enumerate(environment.modules)}
    fields |= {f"environment.setup[{index}]": line for index, line in enumerate(environment.setup)}
    for field, text in fields.items():
        refuse_unwritable(text, _NUL, field=field, place="a script")


def exported_values(request: SubmitRequest) -> dict[str, str]:
    """Return the values of ``environment.env`` that a script exports, without those that a sweep varies."""
    swept = _swept_variables(request)
    return {name: value for name, value in request.job.spec.environment.env.items() if name not in swept}


def _delimiter(document: str) -> str:
    """Return a delimiter for a here-document that is not a line of the document."""
    lines = set(document.splitlines())
    names = ("HPCDDP_JOB" if number == 0 else f"HPCDDP_JOB_{number}" for number in count())
    return next(name for name in names if name not in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptVariable:
    """The values of one environment variable: element i has number ``i // stride % count`` of them.

    Args:
        stride: the number of consecutive elements with the same value.
        count: the number of values.
    """

    values: tuple[str, ...]
    stride: int
    count: int


def _swept_variables(request: SubmitRequest) -> dict[str, SweptVariable]:
    """Return the environment variables to which a sweep gives other values in each element, by name."""
    table = request.sweep_table
    variables: dict[str, SweptVariable] = {}
    if table is None:
        return variables
    for key in table.keys:
        if path_of(key)[: len(VARIABLES)] != VARIABLES:
            continue
        values = tuple(table.element(index)[key] for index in range(len(table)))
        stride = 1
        if table.is_grid:
            values = table.values[key]
            stride = table.stride(key)
        variables[path_of(key)[-1]] = SweptVariable(values=values, stride=stride, count=len(values))
    return variables


SET = "<set>"
"""Printed in place of the value of an environment variable: the script needs the value, a list of fields does not."""


def describe(request: SubmitRequest, script: RenderedScript) -> dict[str, Any]:
    """Return the document of ``render --json``.

    Args:
        request: the request.
        script: its rendered script.
    """
    job, table = request.job, request.sweep_table
    return {
        "script": script.text,
        "directives": [{"flag": directive.flag, "value": directive.value} for directive in script.directives],
        "plan": None if request.plan is None else request.plan.as_json(),
        "elements": None if table is None else table.elements(),
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


DEFAULT_TEMPLATE = "sbatch"


def is_default_template(name: str | None) -> bool:
    """Return whether the value of ``--template`` means the default template; None does."""
    return name in {None, DEFAULT_TEMPLATE}


SUFFIX = ".sh.j2"
_SHIPPED = "hpcddp"
_EXTENDABLE = f"{_SHIPPED}/{DEFAULT_TEMPLATE}{SUFFIX}"
"""The default template by the name under which a template of the user's own extends it."""


class TemplateError(UserError):
    """A template that does not exist or cannot be rendered."""

    kind = "template"


class Written(str):
    """Text that a filter has quoted for its place in the script."""

    __slots__ = ()


def sb(value: Directive | str) -> Written:
    """Write a directive (``--flag=value``), or a value for the part after its equals sign.

    Raises:
        UnwritableValueError: no quoting can carry the value.
    """
    return Written(value if isinstance(value, Directive) else quote_value(value))


def sh(value: str) -> Written:
    """Write one word of a shell command.

    Raises:
        UnwritableValueError: no quoting can carry the value.
    """
    return Written(quote_word(value))


def quote_word(text: str) -> str:
    """Return ``text``, which may hold line breaks, as one word of a shell command.

    Raises:
        UnwritableValueError: it holds a NUL character or a lone surrogate.
    """
    refuse_unwritable(text, _NUL, field="the value", place="a shell word")
    return shlex.quote(text)


def comment(value: str) -> Written:
    """Write text into a comment, with escapes for line breaks and other control characters."""
    return Written(printable(value).replace("\n", "\\n"))


def verbatim(value: str) -> Written:
    """Write text that is shell code or the body of a here-document, unchanged."""
    return Written(value)


def _only_written(value: object) -> object:
    """Refuse a value that no filter has written; integers need none."""
    if isinstance(value, Written | StrictUndefined) or type(value) is int:
        return value
    raise TypeError(
        "a value has no filter; write {{ value | sh }} in shell, {{ value | sb }} in a directive, and "
        "{{ super() | verbatim }} for the block that is overridden"
    )


def render_template(name: str | None, values: Mapping[str, Any]) -> str:
    """Render a template.

    Args:
        name: a template's name, or a path, which holds a slash or ends in .j2; None is the default template.
        values: the variables of the template.

    Raises:
        TemplateError: the template does not exist or cannot be rendered; file and line are named.
    """
    path = find_template(name or DEFAULT_TEMPLATE)
    environment = _environment(path.parent)
    try:
        template = environment.get_template(path.name)
        if not is_default_template(name):
            _refuse_lost_lines(_lineage(environment, path))
        return template.render(values)
    except TemplateError:
        raise
    except Exception as error:  # noqa: BLE001  a template is a program: it may raise anything, and does not go on
        _explain(error, path, variables=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ancestor:
    """A template, or one that it extends.

    Args:
        name: its name for ``extends``.
        file: its file.
        source: the text of the file.
        tree: its syntax tree.
    """

    name: str
    file: str
    source: str
    tree: nodes.Template


def _lineage(environment: SandboxedEnvironment, path: FilePath) -> list[_Ancestor]:
    """Return a template and the templates above it, each the one that the one before it extends.

    Raises:
        TemplateNotFound: one of them does not exist.
        TemplateError: one of them extends itself.
    """
    lineage: list[_Ancestor] = []
    name: object = path.name
    # The name may also be an expression, which only the rendering knows.
    while isinstance(name, str):
        file = environment.get_template(name).filename or name
        source = FilePath(file).read_text(encoding="utf-8")
        tree = environment.parse(source, name, file)
        if any(name == ancestor.name for ancestor in lineage):
            raise TemplateError(
                f"the template {file} extends itself; write {_EXTENDABLE} for the default one", file=file
            )
        lineage.append(_Ancestor(name=name, file=file, source=source, tree=tree))
        extends = tree.find(nodes.Extends)
        name = extends.template.value if extends is not None and isinstance(extends.template, nodes.Const) else None
    return lineage


def _refuse_lost_lines(lineage: Sequence[_Ancestor]) -> None:
    """Refuse lines of a template that extends another one and that Jinja2 would leave out without a word.

    Raises:
        TemplateError: a line is outside of all blocks, or in a block that no template above has.
    """
    root = lineage[-1]
    blocks = [block.name for block in root.tree.find_all(nodes.Block)]
    for template in reversed(lineage[:-1]):
        for node in template.tree.body:
            lost: tuple[int, str] | None = None
            if isinstance(node, nodes.Block) and node.name not in blocks:
                lost = (node.lineno, f"overrides the block {node.name}, which {root.name} does not have")
            if isinstance(node, nodes.Output):
                lost = _text_outside_of_blocks(node)
            if lost is not None:
                line, problem = lost
                raise TemplateError(
                    f"the template {template.file}:{line} {problem}; write one of the blocks {', '.join(blocks)}",
                    file=template.file,
                    line=line,
                )
        blocks += [block.name for block in template.tree.find_all(nodes.Block) if block.name not in blocks]


def _text_outside_of_blocks(output: nodes.Output) -> tuple[int, str] | None:
    """Return the line and the problem of text that is in no block; None for blank lines."""
    for node in output.find_all(nodes.TemplateData):
        text = node.data.lstrip()
        if text:
            blank_lines = node.data.removesuffix(text).count("\n")
            return node.lineno + blank_lines, "is outside of all blocks, so that it would not be in the script"
    return None


_CHANGE = re.compile(r"^\{# changed: (.+) #\}$", re.MULTILINE)


def notes_about_template(name: str | None) -> tuple[str, ...]:
    """Return a warning about a template that is a copy of an older default template, and what has changed since.

    Args:
        name: the value of ``--template``; the template can be rendered.
    """
    if is_default_template(name):
        return ()
    path = find_template(name or DEFAULT_TEMPLATE)
    environment = _environment(path.parent)
    root = _lineage(environment, path)[-1]
    present = _CHANGE.findall(root.source)
    default = find_template(DEFAULT_TEMPLATE).read_text(encoding="utf-8")
    missing = [change for change in _CHANGE.findall(default) if change not in present]
    if not missing:
        return ()
    note = (
        f"the template {root.file} does not have what has changed in the default template: {'; '.join(missing)}; "
        f'extend that one ({{% extends "{_EXTENDABLE}" %}}), or take the changes over, each with its line '
        "{# changed: ... #} (docs/templates.md)"
    )
    return (note,)


def find_template(name: str) -> FilePath:
    """Return the file of a template.

    Args:
        name: its name or path.

    Raises:
        TemplateError: the file does not exist.
    """
    if "/" in name or name.endswith(".j2"):
        path = FilePath(name)
        if path.is_file():
            return path
        raise TemplateError(f"--template is {name!r}, and there is no such file; give the path of a template")
    folder = shipped_directory("templates")
    path = folder / f"{name}{SUFFIX}"
    if path.is_file():
        return path
    names = ", ".join(sorted(entry.name.removesuffix(SUFFIX) for entry in folder.glob(f"*{SUFFIX}")))
    raise TemplateError(
        f"--template is {name!r}, and there is no such template; write one of {names}, or a file's path"
    )


@cache
def _environment(folder: FilePath) -> SandboxedEnvironment:
    """Return the environment of a folder's templates, which compiles a template again after a change.

    They extend the default template by the name ``hpcddp/sbatch.sh.j2``, which is none of a file beside them.
    """
    shipped = FileSystemLoader(shipped_directory("templates"))
    environment = SandboxedEnvironment(
        loader=ChoiceLoader([PrefixLoader({_SHIPPED: shipped}), FileSystemLoader(folder)]),
        undefined=StrictUndefined,
        finalize=_only_written,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"sb": sb, "sh": sh, "comment": comment, "verbatim": verbatim}
    return environment


def _explain(error: Exception, path: FilePath, *, variables: Iterable[str]) -> NoReturn:
    """Raise a ``TemplateError`` with the line of the template at which the error occurred."""
    file: str = str(path)
    line: int | None = None
    if isinstance(error, TemplateSyntaxError):
        file, line = error.filename or file, error.lineno
    else:
        folders = {path.parent, shipped_directory("templates")}
        # Jinja2 rewrites tracebacks so that their frames are lines of templates.
        for frame in traceback.extract_tb(error.__traceback__):
            if FilePath(frame.filename).parent in folders:
                file, line = frame.filename, frame.lineno
    sentence = error.message if isinstance(error, HpcddpError) else str(error) or type(error).__name__
    if isinstance(error, UndefinedError):
        sentence = f"{sentence}; the variables are {', '.join(sorted(variables))}"
    if isinstance(error, TemplateNotFound):
        sentence = f"there is no template {sentence}; write {_EXTENDABLE} for the default one, or a file beside it"
    where = file if line is None else f"{file}:{line}"
    raise TemplateError(f"the template {where} cannot be rendered: {sentence}", file=file, line=line) from error
