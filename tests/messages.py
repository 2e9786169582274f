"""Messages that tests compare whole; one golden file for each folder of tests.

A test takes the fixture ``golden`` and passes each message through ``golden.message(...)``, which compares it with
``tests/golden/messages/FOLDER.json`` and returns it. The test itself asserts the fact that the message must tell: the
field, the number, the way out. ``pytest PATH --update-golden`` writes the file anew.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
FOLDER = TESTS / "golden" / "messages"
COLLECTED = pytest.StashKey[frozenset[str]]()
"""The ids of the tests of a session, each case of a parameter with its own."""


class GoldenMessages:
    """The messages of one test, in the order in which it passes them.

    Args:
        request: the test.
        replacements: what differs from run to run, and the words that stand for it in the golden file.
    """

    def __init__(self, request: pytest.FixtureRequest, replacements: Mapping[str, str]) -> None:
        path = request.path.relative_to(TESTS)
        self._file = FOLDER / f"{path.parts[0] if len(path.parts) > 1 else 'top'}.json"
        self._test = f"{'/'.join(path.parts[1:]) or path.name}::{request.node.name}"
        self._replacements = dict(replacements)
        self._is_update = bool(request.config.getoption("--update-golden"))
        self._expected: list[str] = read_messages(self._file).get(self._test, [])
        self._passed: list[str] = []

    def message(self, text: object, replacements: Mapping[str, str] | None = None) -> str:
        """Compare a message with the golden file.

        Args:
            text: the message, or the error whose message it is.
            replacements: more of what differs from run to run.

        Returns:
            The message as it is.
        """
        message = str(text)
        stable = message
        for varying, word in {**(replacements or {}), **self._replacements}.items():
            stable = stable.replace(varying, word)
        position = len(self._passed)
        self._passed.append(stable)
        if not self._is_update:
            assert position < len(self._expected), f"no golden message yet; --update-golden writes it: {stable}"
            assert stable == self._expected[position]
        return message

    def finish(self) -> None:
        """Write the messages of the test if they are to be updated; else check that none is missing."""
        if self._is_update and self._passed:
            with _locked(self._file):
                write_messages(self._file, {**read_messages(self._file), self._test: self._passed})
        elif not self._is_update:
            assert self._passed == self._expected, "the golden file has more messages; --update-golden removes them"


def read_messages(file: Path) -> dict[str, list[str]]:
    """Return the messages of each test in a golden file; none if there is no such file."""
    if not file.exists():
        return {}
    messages: dict[str, list[str]] = json.loads(file.read_text())
    return messages


def write_messages(file: Path, messages: Mapping[str, Any]) -> None:
    """Write a golden file, sorted by test."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{json.dumps(messages, indent=1, sort_keys=True, ensure_ascii=False)}\n")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Let only one process of the tests write a golden file at a time."""
    descriptor = os.open(file.parent.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
