"""Golden files of messages."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.messages import COLLECTED, FOLDER, TESTS, GoldenMessages, read_messages, write_messages


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_every_golden_message_belongs_to_a_test(file: Path, request: pytest.FixtureRequest) -> None:
    collected = request.config.stash[COLLECTED]
    if any("::" in argument for argument in request.config.args):
        # Some cases of a test may not be collected.
        collected = frozenset()
    functions_collected = {node.partition("[")[0] for node in collected}
    folder = TESTS if file.stem == "top" else TESTS / file.stem
    functions: dict[Path, set[str]] = {}
    for test in read_messages(file):
        name, _, case = test.partition("::")
        path = folder / name
        if path not in functions:
            tree = ast.parse(path.read_text())
            functions[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        node = f"{path.relative_to(TESTS.parent)}::{case}"
        has_test = case.partition("[")[0] in functions[path]
        if node.partition("[")[0] in functions_collected:
            has_test = node in collected
        assert has_test, f"{test} has no test; remove it from {file.name}"


def test_another_message_fails(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.messages.FOLDER", tmp_path)
    write_messages(tmp_path / "top.json", {f"test_messages.py::{request.node.name}": ["x is 3; write 4"]})
    assert GoldenMessages(request, {}).message("x is 3; write 4") == "x is 3; write 4"
    with pytest.raises(AssertionError):
        GoldenMessages(request, {}).message("x is 3; write 5")
    with pytest.raises(AssertionError, match="has more messages"):
        GoldenMessages(request, {}).finish()


def test_a_message_without_a_golden_one_fails(request: pytest.FixtureRequest) -> None:
    with pytest.raises(AssertionError, match="no golden message yet"):
        GoldenMessages(request, {}).message("x is 3")


def test_what_differs_from_run_to_run_is_replaced(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.messages.FOLDER", tmp_path)
    write_messages(tmp_path / "top.json", {f"test_messages.py::{request.node.name}": ["DIR/a is no file of job JOB"]})
    messages = GoldenMessages(request, {"/home/x": "DIR"})
    messages.message("/home/x/a is no file of job 77", {"77": "JOB"})
