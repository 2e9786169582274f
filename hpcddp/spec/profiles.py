"""Cluster profiles: TOML files whose values a job file takes where it gives none."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, time
from pathlib import Path as FilePath
from typing import Any

from hpcddp.spec.document import Path, dotted
from hpcddp.spec.layers import Source
from hpcddp.spec.names import nearest
from hpcddp.spec.problems import Problem
from hpcddp.spec.textfile import read_text

DEFAULT_PROFILE = "default"
PROFILE_KEYS = ("run_root", "resources", "environment", "checkpoint", "requeue", "launch")

_HEADER = re.compile(r"\s*\[\s*([A-Za-z0-9_.\s-]+?)\s*\]")
_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*=""")
_AT_LINE = re.compile(r" \(at line ([0-9]+), column [0-9]+\)")


class ProfileError(ValueError):
    """A profile cannot be used.

    Args:
        problems: why, each with its place.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(problem.sentence for problem in problems))
        self.problems = problems


def read_profile(name: str | None, profiles: FilePath | None) -> tuple[Mapping[str, Any], Source] | None:
    """Read a profile.

    Args:
        name: its name; None is ``default``, which need not exist.
        profiles: the directory of profiles; None where there is none.

    Returns:
        Its values and how errors name it, or None where the default one does not exist.

    Raises:
        ProfileError: it does not exist, is not TOML, or holds what no profile holds.
    """
    file = None if profiles is None else profiles / f"{name or DEFAULT_PROFILE}.toml"
    if file is None or not _is_there(file):
        if name is None:
            return None
        raise ProfileError(_missing(name, profiles))
    text = read_text(file)
    if isinstance(text, Problem):
        raise ProfileError(text)
    values = _parse(text, file)
    source = Source(origin=f"profile {name or DEFAULT_PROFILE}", file=str(file), lines=dict(_find_lines(text)))
    problems = [_foreign_key(key, source) for key in values if key not in PROFILE_KEYS]
    problems += [_clock_value(path, source) for path, value in _leaves(values) if isinstance(value, date | time)]
    if problems:
        raise ProfileError(*problems)
    return values, source


def _is_there(file: FilePath) -> bool:
    """Return whether there is such a file; one that cannot be seen is not there (`sudo -u`, a home of another's)."""
    try:
        return file.exists()
    except OSError:
        return False


def _missing(name: str, profiles: FilePath | None) -> Problem:
    there = sorted(file.stem for file in profiles.glob("*.toml")) if profiles is not None else []
    near = nearest(name, there)
    known = f"there are {', '.join(there)}" if there else "leave profile out"
    if profiles is not None and not there:
        known = f"make {profiles / name}.toml, or leave profile out"
    instead = f"did you mean {near}?" if near else known
    return Problem(file="", key="profile", value=name, sentence=f"is {name!r}, and there is no such profile; {instead}")


def _parse(text: str, file: FilePath) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _AT_LINE.search(str(error))
        sentence = f"is no TOML ({_AT_LINE.sub('', str(error))}); check quotes, brackets and equals signs"
        raise ProfileError(Problem(file=str(file), line=int(place[1]) if place else None, sentence=sentence)) from None


def _foreign_key(key: str, source: Source) -> Problem:
    sentence = f"is not for a profile, which holds {', '.join(PROFILE_KEYS)}; write it in the job file"
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
        header, key = _HEADER.match(line), _KEY.match(line)
        if header is not None:
            table = tuple(part.strip() for part in header[1].split("."))
            yield table, number
        elif key is not None:
            yield (*table, *key[1].split(".")), number
