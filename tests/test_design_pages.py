"""The pages for people who change the code name files and functions that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "design").glob("*.md")))
FOLDERS = "hpcddp|tests|scripts|templates|docs|jobs|examples|benchmarks"
# What an installation has, and what a reader is to make.
PLACEHOLDERS = re.compile(r"^hpcddp/_(templates|jobs)$|NAME")
# The end of a name, and a function of Slurm.
NOT_OF_HPCDDP = {"_s", "_purge_missing_jobs"}


@cache
def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def names_in(module: str) -> set[str]:
    """Return the names that a module defines at its top, its classes' attributes as ``Class.name``."""
    file = ROOT.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


@cache
def private_names() -> set[str]:
    """Return the names that begin with an underscore: functions, methods, classes and values of modules."""
    defined = re.compile(r"^(?: *(?:def|class) )?(_[a-zA-Z]\w*)", re.MULTILINE)
    files = [*(ROOT / "hpcddp").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    return {name for file in files for name in defined.findall(file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_function_and_class_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for module, name in re.findall(r"`(hpcddp(?:\.\w+)+):(\w+(?:\.\w+)*)`", text):
        assert name in names_in(module), f"{module}:{name}"
    for file, name in re.findall(r"`(hpcddp/[\w/]+)\.py:(\w+(?:\.\w+)*)`", text):
        assert name in names_in(file.replace("/", ".")), f"{file}.py:{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_private_name_without_its_module_exists(page: Path) -> None:
    named = set(re.findall(r"`(?:\w+\.)*(_[a-zA-Z]\w*)`", page.read_text(encoding="utf-8")))
    assert named <= private_names() | NOT_OF_HPCDDP


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_is_named_exists(page: Path) -> None:
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", page.read_text(encoding="utf-8")):
        assert PLACEHOLDERS.search(path) or (ROOT / path).exists(), path


def test_the_rows_of_imports_are_the_layers_of_the_contract() -> None:
    page = (ROOT / "docs" / "design" / "README.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^ +\| \d+ \| (.*) \|$", page, re.MULTILINE)]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert rows == [re.findall(r"hpcddp\.(\w+)", layer) for layer in layers]


def test_every_section_of_the_batch_contract_that_the_code_cites_exists() -> None:
    numbered = {anchor.partition("-")[0] for anchor in headings(ROOT / "docs" / "design" / "batch-contract.md")}
    files = [*(ROOT / "hpcddp").rglob("*.py")]
    cited = {
        number
        for file in files
        for number in re.findall(r"batch\s+contract,\s+sections?\s+(\d)", file.read_text(encoding="utf-8"))
    }
    assert cited
    assert cited <= numbered
