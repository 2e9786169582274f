from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.packages import shipped_directory
from hpcddp.slurm.directives import Directive, UnwritableValueError
from hpcddp.submission.render import notes_about_script, render_script
from hpcddp.submission.template import TemplateError, find_template, render_template
from tests.messages import GoldenMessages
from tests.submission.requests import request_of
from tests.submission.script_runner import LAUNCHERS

VALUES: dict[str, Any] = {
    "name": "it's",
    "nodes": 3,
    "run_id": None,
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
    "expression", ["name", "name | upper", "name | sh | upper", "name | sh ~ name", "setup", "true", "1.5"]
)
def test_a_value_without_a_filter_is_refused(template: Path, golden: GoldenMessages, expression: str) -> None:
    message = golden.message(refusal(template, f"#!/bin/bash\necho {{{{ {expression} }}}}\n"))
    assert message.startswith(f"the template {template}:2 ")
    assert " a value does not end with a filter of hpcddp; " in message
    assert "{{ value | sh }} in shell, {{ value | sb }} in " in message


@pytest.mark.parametrize("expression", ["run_id", "run_id | sh", "run_id | sb", "none"])
def test_a_value_that_is_none_is_told(template: Path, golden: GoldenMessages, expression: str) -> None:
    message = golden.message(refusal(template, f"#!/bin/bash\necho {{{{ {expression} }}}}\n"))
    assert message.startswith(f"the template {template}:2 ")
    assert " the value is none in this script; write its line inside {% if VALUE %}" in message


def test_an_unknown_variable_is_named_with_file_and_line_and_the_variables_are_listed(template: Path) -> None:
    assert refusal(template, "one\ntwo {{ nmae | sh }}\n") == (
        f"the template {template}:2 cannot be rendered: 'nmae' is undefined; "
        "the variables are directives, name, nodes, run_id, setup"
    )


def test_an_unknown_variable_without_a_filter_is_named_too(template: Path) -> None:
    assert refusal(template, "one\n\n{{ nmae }}\n") == (
        f"the template {template}:3 cannot be rendered: 'nmae' is undefined; "
        "the variables are directives, name, nodes, run_id, setup"
    )


def test_a_syntax_error_is_named_with_file_and_line(template: Path) -> None:
    assert refusal(template, "one\n{% if %}\n").startswith(f"the template {template}:2 cannot be rendered: ")


def test_an_error_inside_an_included_file_names_that_file(template: Path) -> None:
    part = template.with_name("part.j2")
    part.write_text("\n\n{{ 1 / 0 }}\n")
    assert refusal(template, "{% include 'part.j2' %}") == (
        f"the template {part}:3 cannot be rendered: division by zero"
    )


def test_an_error_in_the_template_that_is_extended_names_that_file(template: Path) -> None:
    default = shipped_directory("templates") / "sbatch.sh.j2"
    message = refusal(template, f"{EXTENDS}{{% block tasks %}}\n{{% endblock %}}\n")
    assert message.startswith(f"the template {default}:")
    assert "is undefined; the variables are directives, name, nodes, run_id, setup" in message


EXTENDS = '{% extends "hpcddp/sbatch.sh.j2" %}\n'


def rendered(template: str | None, **more: Any) -> str:
    job = {"name": "example", "command": ("python", "train.py"), **more}
    resolved = ResolvedJob(spec=JobSpec.model_validate(job), origins={})
    return render_script(replace(request_of(resolved, run_id="r1"), template=template)).text


def test_a_template_overrides_a_block_and_keeps_all_other_bytes(template: Path) -> None:
    template.write_text(
        EXTENDS
        + "{% block head %}\n{{ super() | verbatim }}# of the site\n{% endblock %}\n"
        + "{% block before_tasks %}\n  monitor &\n{% endblock %}\n"
        + "{% block after_tasks %}\n  kill %1\n{% endblock %}\n"
    )
    default = rendered(None)
    head, separator, rest = default.partition("\n\n# The job")
    before, middle, after = rest.partition("  if [[ -z $hpcddp_interrupted ]]; then\n")
    tasks, end, decision = after.partition("  fi\n")
    expected = [
        head,
        "\n# of the site",
        separator,
        before,
        "  monitor &\n",
        middle,
        tasks,
        end,
        "  kill %1\n",
        decision,
    ]
    assert rendered(str(template)) == "".join(expected)


@pytest.mark.parametrize("block", ["environment", "tasks"])
def test_a_template_replaces_a_block(template: Path, block: str) -> None:
    template.write_text(f"{EXTENDS}{{% block {block} %}}\necho replaced\n{{% endblock %}}\n")
    script = rendered(str(template), environment={"modules": ("cuda",)})
    assert script.count("echo replaced\n") == 1
    assert ("module load cuda" in script, "srun" in script) == (block != "environment", block != "tasks")


def test_a_template_extends_another_of_the_users_own(template: Path) -> None:
    template.with_name("site.sh.j2").write_text(
        f"{EXTENDS}{{% block environment %}}\n{{% block site %}}\n{{% endblock %}}\n{{% endblock %}}\n"
    )
    template.write_text('{% extends "site.sh.j2" %}\n{% block site %}\necho site\n{% endblock %}\n')
    assert "\necho site\n" in rendered(str(template))


def test_a_template_of_the_same_name_as_the_default_one_extends_it(template: Path) -> None:
    own = template.with_name("sbatch.sh.j2")
    own.write_text(EXTENDS)
    assert rendered(str(own)) == rendered(None)


def test_a_condition_with_a_block_may_stand_in_a_block(template: Path) -> None:
    template.write_text(
        EXTENDS + "{% block after_tasks %}\n{% if name %}\n{% block own %}\necho own\n{% endblock %}\n{% endif %}\n"
        "{% endblock %}\n"
    )
    assert "\necho own\n" in rendered(str(template))


def test_what_a_template_defines_outside_of_its_blocks_is_used_in_them(template: Path) -> None:
    template.write_text(
        EXTENDS
        + "{% macro line(word) %}\necho {{ word | sh }}\n{% endmacro %}\n{% set more %}\necho more\n{% endset %}\n"
        "{% block after_tasks %}\n{{ line('macro') | verbatim }}{{ more | verbatim }}{% endblock %}\n"
    )
    assert "\necho macro\necho more\n" in rendered(str(template))


@pytest.mark.parametrize("name", ["sbatch.sh.j2", "hpcddp/sbtach.sh.j2"])
def test_a_template_that_extends_nothing_gets_the_name_of_the_default_one(
    template: Path, golden: GoldenMessages, name: str
) -> None:
    message = golden.message(refusal(template, f'{{% extends "{name}" %}}\n'))
    assert message.startswith(f"the template {template}")
    assert f"no template {name}; write hpcddp/sbatch.sh.j2 " in message


@pytest.mark.parametrize("tag", ["include 'own.sh.j2'", "import 'own.sh.j2' as own"])
def test_a_template_that_includes_itself_is_refused(template: Path, golden: GoldenMessages, tag: str) -> None:
    message = golden.message(refusal(template, f"#!/bin/bash\n{{% {tag} %}}\n"))
    assert message.startswith(f"the template {template}:2 ")
    assert " it includes, imports or calls itself, " in message


@pytest.mark.parametrize("text", ["", "\n#!/bin/bash\n"])
def test_a_template_of_something_that_is_no_script_is_refused(
    template: Path, golden: GoldenMessages, text: str
) -> None:
    template.write_text(text)
    with pytest.raises(TemplateError) as caught:
        rendered(str(template))
    assert golden.message(caught.value).endswith("begin it with #!/bin/bash")


COMMANDS = {
    "plain": (("python", "train.py", "--lr", "0.1"), "python train.py --lr 0.1"),
    "line break": (("sh", "-c", "a\ntouch x"), r"sh -c 'a\ntouch x'"),
    "carriage return and escape": (("a", "\r\x1b[2J"), r"a '\r\x1b[2J'"),
}


@pytest.mark.parametrize("case", COMMANDS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_command_stands_in_one_line_above_what_starts_the_tasks(case: str, launcher: Cluster) -> None:
    command, shown = COMMANDS[case]
    resolved = ResolvedJob(spec=JobSpec.model_validate({"name": "example", "command": command}), origins={})
    lines = render_script(request_of(resolved, run_id="r1", cluster=launcher)).text.split("\n")
    starts = {"slurm": "    srun ", "here": "    srun ", "local": "    trap '' USR2"}
    (number,) = (number for number, line in enumerate(lines) if line.startswith(starts[launcher]))
    assert lines[number - 1] == f"    #   {shown}"


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


NO_TEXTS = {
    "not UTF-8": (b"#!/bin/bash\n\xff\n", ":2 is not UTF-8 (byte 0xff)"),
    "NUL": (b"#!/bin/bash\n\0\n", " contains NUL bytes"),
    "large": (b"#!/bin/bash\n" + b"#\n" * 500_000, " is larger than 1 MB"),
}


@pytest.mark.parametrize("case", NO_TEXTS)
def test_a_template_that_is_no_short_text_is_named(template: Path, golden: GoldenMessages, case: str) -> None:
    content, problem = NO_TEXTS[case]
    template.write_bytes(content)
    with pytest.raises(TemplateError) as caught:
        render_template(str(template), VALUES)
    message = golden.message(caught.value)
    assert message.startswith(f"the template {template}{problem}")
    assert refusal(template.with_name("top.sh.j2"), f'{{% extends "{template.name}" %}}\n') == message


def test_a_template_that_begins_with_a_byte_order_mark_is_read_without_it(template: Path) -> None:
    template.write_bytes(b"\xef\xbb\xbf#!/bin/bash\r\n")
    assert render_template(str(template), VALUES) == "#!/bin/bash\n"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_template_that_is_no_file_is_named(
    template: Path, golden: GoldenMessages, make: Callable[[Path], None]
) -> None:
    make(template)
    with pytest.raises(TemplateError) as caught:
        find_template(str(template))
    assert " is not a regular file; " in golden.message(caught.value)


def test_an_unknown_name_lists_the_known_ones(golden: GoldenMessages) -> None:
    with pytest.raises(TemplateError) as caught:
        find_template("sbtach")
    message = golden.message(caught.value)
    assert message.startswith("--template is 'sbtach', ")
    assert "; write one of sbatch, " in message


def test_an_empty_name_is_not_that_of_the_default_template() -> None:
    with pytest.raises(TemplateError, match=r"^--template is '', "):
        render_template("", VALUES)


def test_a_name_that_is_too_long_is_no_mistake_of_hpcddp() -> None:
    with pytest.raises(
        TemplateError, match=r"which cannot be read \(File name too long\); give the path of a template$"
    ):
        find_template(f"{'x' * 300}.j2")


@pytest.mark.parametrize("name", ["./own", "own.j2", "/nowhere/own.sh.j2"])
def test_a_path_without_a_file_is_named(golden: GoldenMessages, name: str) -> None:
    with pytest.raises(TemplateError) as caught:
        find_template(name)
    message = golden.message(caught.value)
    assert message.startswith(f"--template is {name!r}, ")
    assert "that file does not exist; " in message


def test_templates_lie_beside_the_package_in_a_checkout() -> None:
    assert shipped_directory("templates") == Path(__file__).parents[2] / "templates"


@pytest.mark.parametrize("interpreter", ["/bin/sh", "/usr/bin/env -S bash -l"])
def test_a_script_of_sh_or_behind_env_is_parsed_too(interpreter: str, template: Path) -> None:
    template.write_text(f"#!{interpreter}\nif true; then\necho\n")
    with pytest.raises(TemplateError, match="bash cannot parse"):
        rendered(str(template))


def test_a_script_that_bash_cannot_parse_is_refused_before_it_is_submitted(
    template: Path, golden: GoldenMessages
) -> None:
    template.write_text("#!/bin/bash\nif true; then\necho\n")
    with pytest.raises(TemplateError) as caught:
        rendered(str(template))
    error = re.search(r"\((line .*)\);", str(caught.value))
    assert error is not None
    # Its words are those of the version of bash.
    message = golden.message(caught.value, {error[1]: "ERROR"})
    assert "bash cannot parse (line " in message
    template.write_text("#!/usr/bin/env python3\nif True: print(1)\n")
    assert rendered(str(template)) == template.read_text()


def test_directives_behind_a_command_are_refused(template: Path, golden: GoldenMessages) -> None:
    head = "{% block head %}\n#!/bin/bash\nset -u\n{{ super() | verbatim }}{% endblock %}\n"
    template.write_text(EXTENDS + head)
    with pytest.raises(TemplateError) as caught:
        rendered(str(template))
    message = golden.message(caught.value)
    assert "line 4 (#SBATCH --job-name=example) stands behind the command in line 2, " in message
    template.write_text(EXTENDS + "{% block before_tasks %}\ncat <<END\n#SBATCH --hold\nEND\n{% endblock %}\n")
    assert "#SBATCH --hold" in rendered(str(template))


HEADS = {
    "all are missing": ("", "--job-name, --nodes, --ntasks-per-node, --cpus-per-task, --comment, --output, --error, "),
    "other values": ("{{ super() | verbatim }}#SBATCH -N 3 --no-requeue\n", None),
    "some are missing": (
        "#SBATCH -J own -N 2 -c 4 --no-requeue --output=own.log\n",
        "--ntasks-per-node, --comment, --error, --open-mode and --signal, ",
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_script_that_lacks_directives_of_its_job_gives_a_warning(
    template: Path, golden: GoldenMessages, case: str
) -> None:
    lines, missing = HEADS[case]
    template.write_text(f"{EXTENDS}{{% block head %}}\n#!/bin/bash\n{lines}{{% endblock %}}\n")
    # sbatch also takes the beginning of a flag.
    resources = {"sbatch": {"comm": "text"}}
    spec = JobSpec.model_validate({"name": "example", "command": ("true",), "resources": resources})
    request = replace(request_of(spec), template=str(template))
    notes = notes_about_script(request, render_script(request))
    if missing is None:
        assert notes == ()
    else:
        (note,) = notes
        assert f" a script without {missing}" in golden.message(note)
        assert note.endswith("write {{ super() | verbatim }} into the block head, or the directives that are missing")
    # Only sbatch reads them.
    elsewhere = replace(request, cluster="local")
    assert notes_about_script(elsewhere, render_script(elsewhere)) == ()


def test_a_here_document_that_takes_the_rest_of_the_script_is_refused(template: Path, golden: GoldenMessages) -> None:
    template.write_text(EXTENDS + "{% block environment %}\ncat >settings <<EOF\nlr: 0.1\n{% endblock %}\n")
    with pytest.raises(TemplateError) as caught:
        rendered(str(template))
    assert "the here-document does not end (wanted `EOF')" in golden.message(caught.value)
    template.write_text(EXTENDS + "{% block environment %}\necho $(cat <<EOF\nlr: 0.1\nEOF)\n{% endblock %}\n")
    assert "EOF)" in rendered(str(template))


def test_a_script_with_dos_line_breaks_is_refused(template: Path, golden: GoldenMessages) -> None:
    template.write_text(EXTENDS + '{% block before_tasks %}\necho {{ "a\\r\\nb" | sh }}\n{% endblock %}\n')
    with pytest.raises(UnwritableValueError) as caught:
        rendered(str(template))
    assert 'a line that ends with a carriage return ("echo \'a")' in golden.message(caught.value)


@pytest.mark.parametrize("expression", ["setup | sh", "directives | verbatim", "1.5 | comment"])
def test_a_filter_says_which_value_it_does_not_take(template: Path, golden: GoldenMessages, expression: str) -> None:
    message = golden.message(refusal(template, f"#!/bin/bash\necho {{{{ {expression} }}}}\n"))
    assert " takes a text, and the value is " in message


def test_an_integer_may_have_a_filter(template: Path) -> None:
    template.write_text("#!/bin/bash\necho {{ nodes | sh }} {{ nodes | sb }} # {{ nodes | comment }}\n")
    assert render_template(str(template), VALUES) == "#!/bin/bash\necho 3 3 # 3\n"
