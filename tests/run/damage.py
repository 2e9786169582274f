"""Ways in which a record's file is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

Damage = Callable[[Path], None]


def _content(content: bytes) -> Damage:
    def damage(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    return damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def newer(path: Path) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "format": 1000}))


def wrong_type(path: Path) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, next(key for key in document if key != "format"): [{}]}))


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def link(path: Path) -> None:
    moved = path.with_name("elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def too_large(path: Path) -> None:
    os.truncate(path, 1 << 40)


DAMAGES: Final[Mapping[str, Damage]] = {
    "empty": _content(b""),
    "truncated": truncate,
    "not UTF-8": _content(b'{"\xff": 1}'),
    "null": _content(b"null"),
    "a number": _content(b"7"),
    "a list": _content(b"[7]"),
    "nested too deeply": _content(b"[" * 100_000),
    "a number of too many digits": _content(b"1" * 10_000),
    "no format": _content(b"{}"),
    "a missing key": _content(b'{"format": 1}'),
    "a wrong type": wrong_type,
    "newer": newer,
    "a pipe": pipe,
    "a directory": directory,
    "a link": link,
    "a link to /dev/zero": endless,
    "too large": too_large,
}
"""Each takes the path of a file that is there; the sentence about it names the path."""
