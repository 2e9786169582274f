"""The Jinja2 environment of the templates: sandboxed, strict, and each value needs a filter that quotes it."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import FileSystemLoader, StrictUndefined, TemplateSyntaxError
from jinja2.sandbox import SandboxedEnvironment

from hpcddp.errors import HpcddpError, UserError
from hpcddp.slurm.directives import Directive, quote_value, refuse_unwritable

DEFAULT_TEMPLATE = "sbatch"
SUFFIX = ".sh.j2"


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


def quote_word(text: str, *, field: str = "the value") -> str:
    """Return ``text`` as one word of a shell command.

    Args:
        text: the word, which may hold line breaks.
        field: its name in an error message.

    Raises:
        UnwritableValueError: it holds a NUL character or a lone surrogate.
    """
    refuse_unwritable(text, {"\0": "a NUL character"}, field=field, place="a shell word")
    return shlex.quote(text)


def verbatim(value: str) -> Written:
    """Write text that is shell code or the body of a here-document, unchanged."""
    return Written(value)


def _only_written(value: object) -> object:
    """Refuse a value that no filter has written; integers need none."""
    if isinstance(value, Written | StrictUndefined) or type(value) is int:
        return value
    raise TypeError("a value has no filter; write {{ value | sh }} in shell, {{ value | sb }} in a directive")


def render(name: str | None, values: Mapping[str, Any]) -> str:
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
        return environment.get_template(path.name).render(values)
    except Exception as error:  # noqa: BLE001  a template is a program: it may raise anything, and does not go on
        _explain(error, path)


def find_template(name: str) -> Path:
    """Return the file of a template.

    Args:
        name: its name or path.

    Raises:
        TemplateError: the file does not exist.
    """
    if "/" in name or name.endswith(".j2"):
        path = Path(name)
        if path.is_file():
            return path
        raise TemplateError(f"--template is {name!r}, and there is no such file; give the path of a template")
    folder = templates_directory()
    path = folder / f"{name}{SUFFIX}"
    if path.is_file():
        return path
    known = ", ".join(sorted(entry.name.removesuffix(SUFFIX) for entry in folder.glob(f"*{SUFFIX}")))
    raise TemplateError(
        f"--template is {name!r}, and there is no such template; write one of {known}, or a file's path"
    )


def templates_directory() -> Path:
    """Return the directory of the templates: in an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_templates"
    return installed if installed.is_dir() else package.parent / "templates"


@cache
def _environment(folder: Path) -> SandboxedEnvironment:
    """Return the environment of a folder's templates, which compiles a template again after a change."""
    environment = SandboxedEnvironment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        finalize=_only_written,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"sb": sb, "sh": sh, "verbatim": verbatim}
    return environment


def _explain(error: Exception, path: Path) -> NoReturn:
    """Raise a ``TemplateError`` with the line of the template at which the error occurred."""
    file: str = str(path)
    line: int | None = None
    if isinstance(error, TemplateSyntaxError):
        file, line = error.filename or file, error.lineno
    else:
        # Jinja2 rewrites tracebacks so that their frames are lines of templates.
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename).parent == path.parent:
                file, line = frame.filename, frame.lineno
    sentence = error.message if isinstance(error, HpcddpError) else str(error) or type(error).__name__
    where = file if line is None else f"{file}:{line}"
    raise TemplateError(f"the template {where} cannot be rendered: {sentence}", file=file, line=line) from error
