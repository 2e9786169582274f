from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.jobfile.units import LONGEST_SECONDS, TimeLimit, UnitError, format_duration, parse_duration
from tests.facts import assert_facts
from tests.messages import GoldenMessages

TIMES = {
    "90": 90 * 60,
    "010": 10 * 60,
    "10:00": 10 * 60,
    "90:30": 90 * 60 + 30,
    "1:30:00": 5400,
    "100:00:00": 360_000,
    "12:00:00": 43_200,
    "1-12": 36 * 3600,
    "1-12:30": 36 * 3600 + 1800,
    "2-00:00:00": 172_800,
    "0-00:00:30": 30,
    "90min": 5400,
    "90 min": 5400,
    "2h": 7200,
    "1.5h": 5400,
    "90s": 90,
    " 5 ": 300,
    "10m": 600,
    "5 m": 300,
    "1h30m": 5400,
    "1h 30min": 5400,
    "3h05m": 11_100,
    "2d04h": 187_200,
    "1d": 86_400,
    "2H": 7200,
    "2 hours": 7200,
    "1 day 12 hours": 129_600,
}
NO_TIMES = {
    "0": ("reads 0 as unlimited",),
    "00:00": ("reads 0 as unlimited",),
    "0-0": ("reads 0 as unlimited",),
    "0min": ("reads 0 as unlimited",),
    "10:60": ("60 as minutes or seconds", "below 60"),
    "1:60:00": ("60 as minutes or seconds", "below 60"),
    "1-24": ("24 hours after the days", "a day has 24"),
    "1-23:60": ("60 as minutes or seconds", "below 60"),
    "": ("not a time",),
    "-5": ("not a time",),
    "1:2:3:4": ("not a time",),
    "1x": ("not a time",),
    "30m1h": ("not a time",),
    "1h1h": ("not a time",),
    "1h30": ("not a time",),
    "1-2h": ("not a time",),
    "٣": ("not a time",),
    "1.0001s": ("not a whole number of seconds",),
    "99999999999": ("longer than Slurm can count (24855 days)",),
}


@pytest.mark.parametrize(("text", "seconds"), TIMES.items())
def test_a_time_is_read_as_slurm_reads_it(text: str, seconds: int) -> None:
    assert TimeLimit.parse(text).seconds == seconds


@pytest.mark.parametrize("text", ["unlimited", "UNLIMITED", "Unlimited"])
def test_unlimited_has_no_seconds(text: str) -> None:
    assert TimeLimit.parse(text) == TimeLimit(None)
    assert str(TimeLimit.parse(text)) == "UNLIMITED"


@pytest.mark.parametrize(("text", "why"), NO_TIMES.items(), ids=NO_TIMES)
def test_what_is_no_time_is_refused_with_the_reason(text: str, why: tuple[str, ...], golden: GoldenMessages) -> None:
    with pytest.raises(UnitError) as caught:
        TimeLimit.parse(text)
    assert_facts(golden.message(caught.value), *why)


@given(st.integers(1, LONGEST_SECONDS))
def test_the_canonical_text_of_a_time_reads_back(seconds: int) -> None:
    assert TimeLimit.parse(str(TimeLimit(seconds))).seconds == seconds


@given(
    days=st.none() | st.integers(0, 400),
    hours=st.integers(0, 23),
    minutes=st.integers(0, 59),
    seconds=st.integers(0, 59),
)
def test_every_clock_form_means_the_sum_of_its_parts(days: int | None, hours: int, minutes: int, seconds: int) -> None:
    total = (days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds
    text = f"{hours}:{minutes}:{seconds:02d}"
    if total:
        assert TimeLimit.parse(text if days is None else f"{days}-{text}").seconds == total
    if minutes * 60 + seconds:
        assert TimeLimit.parse(f"{minutes}:{seconds}").seconds == minutes * 60 + seconds


@given(st.text(alphabet="0123456789:-. hmins", max_size=12))
def test_any_text_is_a_time_of_at_least_a_second_or_refused(text: str) -> None:
    try:
        limit = TimeLimit.parse(text)
    except UnitError:
        return
    assert limit.seconds is not None
    assert 1 <= limit.seconds <= LONGEST_SECONDS


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10min", 600), ("2h", 7200), ("0.5h", 1800), ("10 min", 600), ("1m40s", 100), ("2d", 172_800)],
)
def test_a_duration_is_a_number_with_its_unit(text: str, seconds: int) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("120", "it has no unit"),
        ("1.5", "it has no unit"),
        ("soon", "it is not a duration"),
        ("10x", "it is not a duration"),
        ("10:00", "it is not a duration"),
        ("0s", "it must be longer than zero"),
        ("0.5s", "it is not a whole number"),
        ("99999999h", "it is longer than 24855 days"),
    ],
)
def test_what_is_no_duration_is_refused_with_the_reason(text: str, why: str, golden: GoldenMessages) -> None:
    with pytest.raises(UnitError) as caught:
        parse_duration(text)
    assert_facts(golden.message(caught.value), why)


@given(st.integers(1, LONGEST_SECONDS))
def test_the_text_of_a_duration_reads_back(seconds: int) -> None:
    duration = timedelta(seconds=seconds)
    assert parse_duration(format_duration(duration)) == duration
