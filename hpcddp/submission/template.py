"""Templates of the script: the default one, and those of the user's own, which may extend it.

They run in a sandboxed, strict environment of Jinja2, in which each value needs a filter that quotes it.
"""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import (
    BaseLoader,
    ChoiceLoader,
    Environment,
    PrefixLoader,
    StrictUndefined,
    TemplateNotFound,
    TemplateSyntaxError,
    UndefinedError,
)
from jinja2.loaders import split_template_path
from jinja2.sandbox import SandboxedEnvironment

from hpcddp.errors import HpcddpError, UserError, printable
from hpcddp.jobfile.document import read_text
from hpcddp.jobfile.problems import Problem
from hpcddp.packages import shipped_directory
from hpcddp.script.syntax import BASH_SYNTAX, interpreter_of, script_error
from hpcddp.slurm.directives import Directive, quote_value, refuse_unwritable

NOT_IN_A_WORD: Final = {"\0": "a NUL character"}
"""What no word of a shell command can hold, with a name for it."""

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


def _text(value: object, filter_name: str) -> str:
    """Return a value as the text that a filter quotes.

    Raises:
        TypeError: the value is neither a text nor an integer.
        UndefinedError: it is an undefined variable.
    """
    _refuse_none(value)
    if not isinstance(value, str | StrictUndefined) and type(value) is not int:
        raise TypeError(f"the filter {filter_name} takes a text, and the value is {value!r:.80}")
    return str(value)


def _refuse_none(value: object) -> None:
    if value is None:
        raise TypeError("the value is none in this script; write its line inside {% if VALUE %} ... {% endif %}")


def sb(value: Directive | str | int) -> Written:
    """Write a directive (``--flag=value``), or a value for the part after its equals sign.

    Raises:
        UnwritableValueError: no quoting can carry the value.
    """
    if isinstance(value, Directive):
        return Written(value)
    return Written(quote_value(_text(value, "sb")))


def sh(value: str | int) -> Written:
    """Write one word of a shell command.

    Raises:
        UnwritableValueError: no quoting can carry the value.
    """
    return Written(quote_word(_text(value, "sh")))


def quote_word(text: str) -> str:
    """Return ``text``, which may hold line breaks, as one word of a shell command.

    Raises:
        UnwritableValueError: it holds a NUL character or a lone surrogate.
    """
    refuse_unwritable(text, NOT_IN_A_WORD, field="the value", place="a shell word")
    return shlex.quote(text)


def comment(value: str | int) -> Written:
    """Write text into a comment, with escapes for line breaks and other control characters."""
    return Written(printable(_text(value, "comment")).replace("\n", "\\n"))


def verbatim(value: str | int) -> Written:
    """Write text that is shell code or the body of a here-document, unchanged.

    Raises:
        UnwritableValueError: it holds a NUL character or a lone surrogate.
    """
    text = _text(value, "verbatim")
    refuse_unwritable(text, NOT_IN_A_WORD, field="the value", place="a script")
    return Written(text)


def _only_written(value: object) -> object:
    """Refuse a value whose last filter is none of ``sb``, ``sh``, ``comment`` and ``verbatim``; integers need none."""
    _refuse_none(value)
    if isinstance(value, Written | StrictUndefined) or type(value) is int:
        return value
    raise TypeError(
        "a value does not end with a filter of hpcddp; write {{ value | sh }} in shell, {{ value | sb }} in a "
        "directive, and {{ super() | verbatim }} for the block that is overridden"
    )


def render_template(name: str | None, values: Mapping[str, Any]) -> str:
    """Render a template.

    Args:
        name: a template's name, or a path, which holds a slash or ends in .j2; None is the default template.
        values: the variables of the template.

    Raises:
        TemplateError: the template does not exist or cannot be rendered; file and line are named.
    """
    path = find_template(name)
    try:
        return _environment(path.parent).get_template(path.name).render(values)
    except TemplateError:
        raise
    except Exception as error:  # noqa: BLE001  a template is a program: it may raise anything, and does not go on
        _explain(error, path, variables=values)


def refuse_broken_shell(text: str, template: str | None) -> None:
    """Refuse the script of a user's template that bash cannot parse; ``bash -n`` runs none of it.

    Raises:
        TemplateError: has bash's first error.
    """
    if interpreter_of(text) not in BASH_SYNTAX:
        return
    error = script_error(text)
    if error is not None:
        raise TemplateError(
            f"the template {template} makes a script that bash cannot parse ({error}); correct the template there "
            "or above, and look at the script without it (hpcddp render)"
        )


def refuse_unread_directives(text: str, template: str | None) -> None:
    """Refuse the script of a user's template that has directives behind its first command.

    Raises:
        TemplateError: has the first of these lines.
    """
    if interpreter_of(text) not in BASH_SYNTAX:
        return
    # Only a template of the user's own needs the reader of scripts.
    from hpcddp.script.parse import parse_script

    script = parse_script(text)
    for line in script.unread_directives:
        raise TemplateError(
            f"the template {template} makes a script in which line {line.number} ({line.text.strip()}) stands behind "
            f"the command in line {script.first_command}, where sbatch reads no directives; write the command into the "
            "block environment, or behind all directives"
        )


def find_template(name: str | None) -> Path:
    """Return the file of a template.

    Args:
        name: its name or path; None is the default template.

    Raises:
        TemplateError: the file does not exist.
    """
    if name is None:
        name = DEFAULT_TEMPLATE
    if "/" in name or name.endswith(".j2"):
        path = Path(name)
        try:
            if path.is_file():
                return path
            problem = "which is not a regular file" if path.exists() else "but that file does not exist"
        except OSError as error:
            problem = f"which cannot be read ({error.strerror})"
        raise TemplateError(f"--template is {name!r}, {problem}; give the path of a template")
    folder = shipped_directory("templates")
    path = folder / f"{name}{SUFFIX}"
    if path.is_file():
        return path
    names = ", ".join(sorted(entry.name.removesuffix(SUFFIX) for entry in folder.glob(f"*{SUFFIX}")))
    raise TemplateError(
        f"--template is {name!r}, but no template has that name; write one of {names}, or a file's path"
    )


def template_to_record(name: str | None) -> str | None:
    """Return the value of ``--template`` for the record of a submission, with which a resumption finds the template."""
    return None if is_default_template(name) else str(find_template(name).absolute())


def _text_of(file: Path) -> str:
    """Return the text of a template.

    Raises:
        TemplateError: it cannot be read, or is not a text of at most 1 MB.
    """
    text = read_text(file)
    if isinstance(text, Problem):
        where = file if text.line is None else f"{file}:{text.line}"
        raise TemplateError(f"the template {where} {text.sentence}", file=str(file), line=text.line)
    return text


class _FolderLoader(BaseLoader):
    """Loads the templates of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool]]:  # noqa: ARG002  Jinja2 passes it
        """Return the text of a template, its file, and whether the file still has this text.

        Raises:
            TemplateNotFound: the folder has no such file.
        """
        file = self._folder.joinpath(*split_template_path(template))
        if not file.is_file():
            raise TemplateNotFound(template)
        text = _text_of(file)
        return text, str(file), lambda: _text_of(file) == text


@cache
def _environment(folder: Path) -> SandboxedEnvironment:
    """Return the environment of a folder's templates, which compiles a template again after a change.

    They extend the default template by the name ``hpcddp/sbatch.sh.j2``, which no file beside them can have.
    """
    shipped = _FolderLoader(shipped_directory("templates"))
    environment = SandboxedEnvironment(
        loader=ChoiceLoader([PrefixLoader({_SHIPPED: shipped}), _FolderLoader(folder)]),
        undefined=StrictUndefined,
        finalize=_only_written,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"sb": sb, "sh": sh, "comment": comment, "verbatim": verbatim}
    return environment


def _explain(error: Exception, path: Path, *, variables: Iterable[str]) -> NoReturn:
    """Raise a ``TemplateError`` with the line of the template at which the error occurred."""
    file: str = str(path)
    line: int | None = None
    if isinstance(error, TemplateSyntaxError):
        file = error.filename or file
        line = error.lineno
    else:
        folders = {path.parent, shipped_directory("templates")}
        # Jinja2 rewrites tracebacks so that their frames are lines of templates.
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename).parent in folders:
                file = frame.filename
                line = frame.lineno
    sentence = error.message if isinstance(error, HpcddpError) else str(error) or type(error).__name__
    if isinstance(error, UndefinedError):
        sentence = f"{sentence}; the variables are {', '.join(sorted(variables))}"
    if isinstance(error, RecursionError):
        sentence = "it includes, imports or calls itself, directly or through another one, without an end; remove that"
    if isinstance(error, TemplateNotFound):
        sentence = f"there is no template {sentence}; write {_EXTENDABLE} for the default one, or a file beside it"
    where = file if line is None else f"{file}:{line}"
    raise TemplateError(f"the template {where} cannot be rendered: {sentence}", file=file, line=line) from error
