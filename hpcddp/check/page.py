"""The page of the rules, ``docs/checks.md``, made from their tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

from hpcddp.check.check import LAYERS
from hpcddp.check.finding import Example, Rule, Subject
from hpcddp.script.syntax import bash_error

_INTRODUCTION: Final = """\
# What hpcddp check looks for

Written by `scripts/generate-docs` from the tables of rules in `hpcddp/check`: change those, not this page.

`hpcddp check JOB.yaml` or `hpcddp check SCRIPT.sh` finds what is wrong with a job before it waits in the queue. Nothing
is submitted, and nothing of a script is executed. For each finding it prints the line, what happens otherwise and what
to write instead.

An **error** means that the job fails, is refused, or does something else than its text says. A **warning** means that
it fails or wastes resources in circumstances that are common. A **note** points at text that is right, and easily
misread. The exit code is 2 if there is an error or a warning, else 0. `--json` prints one document.

`--fix` repairs in a script what is mechanical, keeps every other byte, and prints the change. It never changes a job
file.

A comment ignores a finding, in a script as in a job file, on its line or on the line above. A finding without a line is
ignored by a comment anywhere in the file:

```sh
export MASTER_PORT=29500  # hpcddp: ignore fixed-port
```

`hpcddp submit` looks at the job file in the same way, without the rules that read data or start a process, and prints a
line for each finding. It submits all the same.
"""
_LAYERS: Final = MappingProxyType(
    {
        "script": (
            "The script",
            "A script of your own, or the one that hpcddp writes for a job file, as sbatch and bash read it.",
        ),
        "job": (
            "The job file",
            "Its fields, its batch, its data where it can be opened here, and what its earlier runs measured.",
        ),
        "machine": ("This machine", "What `hpcddp submit` would say here."),
        "cluster": (
            "The cluster",
            "The limits that a [profile](profiles.md) or Slurm states, and the answer of `sbatch --test-only`.",
        ),
    }
)


def checks_page() -> str:
    """Return the text of the page."""
    return "\n".join(_page_lines())


def _page_lines() -> Iterator[str]:
    yield _INTRODUCTION
    for layer, rules in LAYERS.items():
        title, text = _LAYERS[layer]
        yield f"\n## {title}\n\n{text}"
        for rule in rules:
            yield from _rule_lines(rule)


def _rule_lines(rule: Rule) -> Iterator[str]:
    yield ""
    yield f"### {rule.code}"
    yield ""
    repair = " `--fix` repairs it." if _is_mechanical(rule) else ""
    yield f"{rule.severity.capitalize()}. Otherwise: {rule.otherwise}.{repair}"
    yield ""
    yield from _example_lines("Bad", rule.bad)
    yield ""
    yield from _example_lines("Good", rule.good)
    yield ""
    yield f"Sources: {', '.join(_source(source) for source in rule.sources)}."


def _is_mechanical(rule: Rule) -> bool:
    """Return whether a rule of the script repairs its own bad example."""
    if rule not in LAYERS["script"]:
        return False
    return any(hit.edits for hit in rule.find(Subject(text=rule.bad.text, directory=Path(), environment={})))


def _example_lines(name: str, example: Example) -> Iterator[str]:
    yield f"{name}, {example.given}:" if example.given else f"{name}:"
    yield ""
    if "#SBATCH" in example.text or example.text.startswith("#!"):
        # A block of sh on a page is text that bash can read.
        language = "sh" if bash_error(example.text) is None else "text"
    elif name == "Good":
        # A block of YAML on a page is a job file that can be loaded.
        language = "yaml"
    else:
        language = "text"
    yield f"```{language}"
    yield example.text.rstrip()
    yield "```"


def _source(source: str) -> str:
    return f"<{source}>" if source.startswith("https://") else source
