from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcddp.packages import shipped_directory
from hpcddp.slurm.directives import Directive
from hpcddp.submission.render import TemplateError, find_template, render_template
from tests.messages import GoldenMessages

VALUES: dict[str, Any] = {
    "name": "it's",
    "nodes": 3,
    "directives": (Directive("account", 'a "b"'), Directive("exclusive", None)),
    "setup": ("echo $HOME",),
}


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return tmp_path / "own.sh.j2"


def refusal(template: Path, text: str) -> str:
    template.write_text(text)
    with pytest.raises(TemplateError) as caught:
        render_template(str(template), VALUES)
    return str(caught.value)


def test_every_kind_of_value_has_a_filter_that_writes_it(template: Path) -> None:
    template.write_text(
        "{% for directive in directives %}\n#SBATCH {{ directive | sb }}\n{% endfor %}\n"
        "#SBATCH --comment={{ name | sb }}\necho {{ name | sh }} {{ nodes }}\n{{ setup[0] | verbatim }}\n"
    )
    assert render_template(str(template), VALUES) == (
        '#SBATCH --account="a \\"b\\""\n#SBATCH --exclusive\n'
        "#SBATCH --comment=\"it's\"\necho 'it'\"'\"'s' 3\necho $HOME\n"
    )


@pytest.mark.parametrize(
    "expression", ["name", "name | sh | upper", "name | sh ~ name", "setup", "none", "true", "1.5"]
)
def test_a_value_without_a_filter_is_refused(template: Path, golden: GoldenMessages, expression: str) -> None:
    message = golden.message(refusal(template, f"#!/bin/bash\necho {{{{ {expression} }}}}\n"))
    assert message.startswith(f"the template {template}:2 ")
    assert " no filter; " in message
    assert "{{ value | sh }} in shell, {{ value | sb }} in " in message


def test_an_unknown_variable_is_named_with_file_and_line(template: Path) -> None:
    assert refusal(template, "one\ntwo {{ nmae | sh }}\n") == (
        f"the template {template}:2 cannot be rendered: 'nmae' is undefined"
    )


def test_an_unknown_variable_without_a_filter_is_named_too(template: Path) -> None:
    assert refusal(template, "one\n\n{{ nmae }}\n") == (
        f"the template {template}:3 cannot be rendered: 'nmae' is undefined"
    )


def test_a_syntax_error_is_named_with_file_and_line(template: Path) -> None:
    assert refusal(template, "one\n{% if %}\n").startswith(f"the template {template}:2 cannot be rendered: ")


def test_an_error_inside_an_included_file_names_that_file(template: Path) -> None:
    part = template.with_name("part.j2")
    part.write_text("\n\n{{ 1 / 0 }}\n")
    assert refusal(template, "{% include 'part.j2' %}") == (
        f"the template {part}:3 cannot be rendered: division by zero"
    )


def test_a_value_that_cannot_be_written_names_the_line(template: Path, golden: GoldenMessages) -> None:
    message = golden.message(refusal(template, "#SBATCH --comment={{ 'a\\nb' | sb }}\n"))
    assert message.startswith(f"the template {template}:1 cannot be rendered: ")
    assert " is 'a\\nb', which holds a line break; " in message


@pytest.mark.parametrize(
    "expression",
    ["''.__class__.__mro__", "name.__init__.__globals__", "self.__init__.__globals__['os']", "cycler.__init__"],
)
def test_a_template_cannot_leave_the_sandbox(template: Path, expression: str) -> None:
    assert "unsafe" in refusal(template, f"{{{{ ({expression} | string) | sh }}}}")


def test_a_template_that_is_no_text_is_named(template: Path) -> None:
    template.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TemplateError, match=f"^the template {template} cannot be rendered: 'utf-8' codec"):
        render_template(str(template), VALUES)


def test_an_unknown_name_lists_the_known_ones(golden: GoldenMessages) -> None:
    with pytest.raises(TemplateError) as caught:
        find_template("sbtach")
    message = golden.message(caught.value)
    assert message.startswith("--template is 'sbtach', ")
    assert "; write one of sbatch, " in message


@pytest.mark.parametrize("name", ["./own", "own.j2", "/nowhere/own.sh.j2"])
def test_a_path_without_a_file_is_named(golden: GoldenMessages, name: str) -> None:
    with pytest.raises(TemplateError) as caught:
        find_template(name)
    message = golden.message(caught.value)
    assert message.startswith(f"--template is {name!r}, ")
    assert " no such file; " in message


def test_templates_lie_beside_the_package_in_a_checkout() -> None:
    assert shipped_directory("templates") == Path(__file__).parents[2] / "templates"
