"""The time at which a training stops so that a save fits."""

from __future__ import annotations

import pytest

from hpcddp.stop.deadline import Deadline, Durations, short_lead_sentence


def durations(*seconds: float) -> Durations:
    kept = Durations()
    for each in seconds:
        kept.add(each)
    return kept


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [((), None), ((3.0,), 3.0), ((1.0, 9.0), 9.0), (tuple(range(1, 101)), 95), ((*[1.0] * 19, 50.0), 1.0)],
)
def test_p95_is_what_95_of_100_do_not_exceed(seconds: tuple[float, ...], expected: float | None) -> None:
    assert durations(*seconds).p95() == expected


def test_only_the_newest_durations_are_kept() -> None:
    kept = durations(*[100.0] * 600, *[1.0] * 512)
    assert (len(kept), kept.p95()) == (512, 1.0)


def test_without_a_limit_the_end_is_never_near() -> None:
    assert not Deadline().is_near(1e12, step_s=1.0, save_s=1.0)


@pytest.mark.parametrize(("now", "expected"), [(949.9, False), (950.0, True), (1200.0, True)])
def test_two_steps_a_save_and_ten_seconds_must_fit(now: float, *, expected: bool) -> None:
    assert Deadline(end_time=1000.0).is_near(now, step_s=5.0, save_s=30.0) is expected


@pytest.mark.parametrize(("length_s", "need_s"), [(60.0, 11.2), (3600.0, 70.0), (86400.0, 70.0)])
def test_a_save_without_a_measurement_is_assumed_to_take_a_fraction_of_the_job(length_s: float, need_s: float) -> None:
    assert Deadline(end_time=length_s, start_time=0.0).need_s(None, None) == pytest.approx(need_s)


def test_a_short_lead_gives_a_warning_with_the_value_to_write() -> None:
    assert short_lead_sentence(30.0, 10.0, 40.0) == (
        "requeue.signal_lead is 30 s, and a step takes 10.0 s and a save 40.0 s (95 of 100), so that a save may not "
        "fit before the time limit; write 100s or more"
    )


@pytest.mark.parametrize(
    ("lead", "step", "save"), [(None, 10.0, 40.0), (50.0, 10.0, 40.0), (1.0, None, 40.0), (1.0, 10.0, None)]
)
def test_a_lead_that_is_long_enough_or_unknown_gives_no_warning(
    lead: float | None, step: float | None, save: float | None
) -> None:
    assert short_lead_sentence(lead, step, save) is None
