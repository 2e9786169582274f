"""Typed records are checked when they are read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from hpcddp.run.record import Record, RecordError, create_record, read_record, write_record
from tests.messages import GoldenMessages
from tests.run.damage import DAMAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Record):
    ADVICE: ClassVar[str] = "remove it"

    number: int
    seconds: float
    text: str | None
    kind: Literal["a", "b"] = "a"
    is_new: bool = False
    parts: tuple[Part, ...] = ()
    counts: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(Record):
    ADVICE: ClassVar[str] = "remove it"

    number: int
    facts: Mapping[str, Any] = field(default_factory=dict)


WHOLE = Sample(number=1, seconds=2.5, text="x", kind="b", is_new=True, parts=(Part(name="p"),), counts={"n": 1})


def test_what_is_written_is_read_again_and_says_its_format(tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    write_record(path, WHOLE)
    assert read_record(path, Sample) == WHOLE
    assert json.loads(path.read_text())["format"] == 1


def test_a_record_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path / "nothing.json", Sample) is None
    (tmp_path / "file").touch()
    assert read_record(tmp_path / "file" / "nothing.json", Sample) is None


def test_a_record_without_a_format_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    path.write_text('{"number": 1, "seconds": 2, "text": null}')
    with pytest.raises(RecordError) as caught:
        read_record(path, Sample)
    assert caught.value.message == f"{path} is damaged: it has no format; remove it"


def test_keys_that_are_not_known_are_ignored_or_kept_as_facts(tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    path.write_text('{"format": 1, "number": 1, "seconds": 2, "text": null, "added": {}}')
    assert read_record(path, Sample) == Sample(number=1, seconds=2.0, text=None)
    found = read_record(path, Open)
    assert found == Open(number=1, facts={"seconds": 2, "text": None, "added": {}})
    write_record(path, Open(number=2, facts={"added": 3}))
    assert json.loads(path.read_text()) == {"format": 1, "number": 2, "added": 3}


def test_the_first_creator_wins(tmp_path: Path) -> None:
    assert create_record(tmp_path / "x.json", Open(number=1))
    assert not create_record(tmp_path / "x.json", Open(number=2))
    assert read_record(tmp_path / "x.json", Open) == Open(number=1)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_record_is_one_sentence_that_names_its_file(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "sample.json"
    write_record(path, WHOLE)
    damage(path)
    with pytest.raises(RecordError) as caught:
        read_record(path, Sample)
    assert caught.value.message.startswith(f"{path} ")
    assert "\n" not in caught.value.message
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"number": 1.5}, "its number is 1.5"),
        ({"number": True}, "its number is true"),
        ({"number": "1"}, 'its number is "1"'),
        ({"seconds": None}, "its seconds is null"),
        ({"seconds": float("nan")}, "its seconds is NaN"),
        ({"seconds": 10**400}, "its seconds is 1000"),
        ({"text": 1}, "its text is 1"),
        ({"kind": "c"}, 'its kind is "c"'),
        ({"kind": []}, "its kind is a list"),
        ({"is_new": 1}, "its is_new is 1"),
        ({"parts": {}}, "its parts is an object"),
        ({"parts": [{}]}, "it has no name"),
        ({"parts": ["x"]}, 'it holds "x", not a JSON object'),
        ({"counts": []}, "its counts is a list"),
        ({"format": "1"}, 'its format is "1"'),
        ({"format": -1}, "its format is -1"),
        ({"format": 0}, "its format is 0"),
        ({"format": True}, "its format is true"),
        ({"format": 2}, "it has format 2"),
        ({"labels": {"x": 1}}, "its labels is an object in which 'x' has a value of another type"),
    ],
)
def test_a_value_of_another_type_is_named(
    tmp_path: Path, change: dict[str, Any], said: str, golden: GoldenMessages
) -> None:
    path = tmp_path / "sample.json"
    path.write_text(json.dumps({**WHOLE.as_document(), **change}))
    with pytest.raises(RecordError) as caught:
        read_record(path, Sample)
    assert said in golden.message(caught.value)


def test_the_error_crosses_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(RecordError("x is damaged", path=Path("x"))))
    assert (error.message, error.path) == ("x is damaged", Path("x"))
