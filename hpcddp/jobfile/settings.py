"""Reader of TOML files with default settings, which names file and line in its errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path as FilePath
from typing import Any

from hpcddp.jobfile.document import Path, dotted
from hpcddp.jobfile.merge import Source
from hpcddp.jobfile.problems import Problem
from hpcddp.jobfile.text_file import read_text

JOB_KEYS = ("run_root", "resources", "environment", "checkpoint", "requeue", "launch")
"""The fields of a job file that may have default settings."""

_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""")
_AT_LINE = re.compile(r" \(at line ([0-9]+), column [0-9]+\)")


class SettingsError(ValueError):
    """A file with default settings cannot be used.

    Args:
        problems: why, each with its place.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(problem.sentence for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The content of a file with default settings.

    Args:
        values: the whole file.
        source: its name in errors and origins.
    """

    values: Mapping[str, Any]
    source: Source

    @property
    def job(self) -> Mapping[str, Any]:
        """The values that are defaults of a job."""
        return {key: value for key, value in self.values.items() if key in (*JOB_KEYS, "profile")}


def read_settings(file: FilePath, *, origin: str, kind: str, more_keys: Sequence[str] = ()) -> Settings:
    """Read a file with default settings.

    Args:
        file: the file.
        origin: the origin of its values in ``render --json``.
        kind: what the file is called in errors: "a profile".
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
    """Yield the line of each key, found by its form: tomllib does not report lines, and errors need them."""
    table: Path = ()
    for number, line in enumerate(text.splitlines(), start=1):
        key = _KEY.match(line)
        if line.lstrip().startswith("["):
            table = _header(line) or table
            yield table, number
        elif key is not None:
            yield (*table, *key[1].split(".")), number


def _header(line: str) -> Path | None:
    """Return the key path of a table's header, parsed as a TOML document of one line."""
    try:
        below: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None
    path: list[str] = []
    while isinstance(below, dict) and below:
        ((key, below),) = below.items()
        path.append(key)
    return tuple(path)
