"""TOML files whose values lie under a job file, read so that an error names file and line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path as FilePath
from typing import Any

from hpcddp.spec.document import Path, dotted
from hpcddp.spec.layers import Source
from hpcddp.spec.problems import Problem
from hpcddp.spec.textfile import read_text

JOB_KEYS = ("run_root", "resources", "environment", "checkpoint", "requeue", "launch")
"""The fields of a job file that such a file may hold too."""

_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""")
_AT_LINE = re.compile(r" \(at line ([0-9]+), column [0-9]+\)")


class SettingsError(ValueError):
    """Such a file cannot be used.

    Args:
        problems: why, each with its place.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(problem.sentence for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What such a file holds.

    Args:
        values: everything in it.
        source: how errors and origins name it.
    """

    values: Mapping[str, Any]
    source: Source

    @property
    def job(self) -> Mapping[str, Any]:
        """What of it lies under a job."""
        return {key: value for key, value in self.values.items() if key in (*JOB_KEYS, "profile")}


def read_settings(file: FilePath, *, origin: str, kind: str, more_keys: Sequence[str] = ()) -> Settings:
    """Read such a file.

    Args:
        file: the file.
        origin: what the origin of its values is called.
        kind: what it is, in a sentence: "a profile".
        more_keys: the keys that it may hold besides those of a job.

    Raises:
        SettingsError: it is not TOML, or holds what does not belong there.
    """
    text = read_text(file)
    if isinstance(text, Problem):
        raise SettingsError(text)
    values = _parse(text, file)
    source = Source(origin=origin, file=str(file), lines=dict(_find_lines(text)))
    keys = (*JOB_KEYS, *more_keys)
    problems = [_foreign_key(key, source, kind, keys) for key in values if key not in keys]
    problems += [_clock_value(path, source) for path, value in _leaves(values) if isinstance(value, date | time)]
    if problems:
        raise SettingsError(*problems)
    return Settings(values=values, source=source)


def _parse(text: str, file: FilePath) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _AT_LINE.search(str(error))
        sentence = f"is no TOML ({_AT_LINE.sub('', str(error))}); check quotes, brackets and equals signs"
        raise SettingsError(Problem(file=str(file), line=int(place[1]) if place else None, sentence=sentence)) from None


def _foreign_key(key: str, source: Source, kind: str, keys: Sequence[str]) -> Problem:
    sentence = f"is not for {kind}, which holds {', '.join(keys)}; write it in the job file"
    return Problem(file=source.file, line=source.line_of((key,)), key=key, sentence=sentence)


def _clock_value(path: Path, source: Source) -> Problem:
    sentence = "is a date or time of TOML, and a text belongs here; put double quotes around it"
    return Problem(file=source.file, line=source.line_of(path), key=dotted(path), sentence=sentence)


def _leaves(values: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _find_lines(text: str) -> Iterator[tuple[Path, int]]:
    """Find keys by their look: tomllib does not tell where a key stands, and an error should."""
    table: Path = ()
    for number, line in enumerate(text.splitlines(), start=1):
        key = _KEY.match(line)
        if line.lstrip().startswith("["):
            table = _header(line) or table
            yield table, number
        elif key is not None:
            yield (*table, *key[1].split(".")), number


def _header(line: str) -> Path | None:
    """Return the key path of a table's header, which is a small TOML file by itself."""
    try:
        below: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None
    path: list[str] = []
    while isinstance(below, dict) and below:
        ((key, below),) = below.items()
        path.append(key)
    return tuple(path)
