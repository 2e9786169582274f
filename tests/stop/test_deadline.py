"""The end of the job, which moves, and the time at which a training stops so that a save fits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

import pytest

from hpcddp.stop.deadline import Deadline, Durations, EndTime, KnownEnd, moved_sentence, short_lead_sentence
from tests.messages import GoldenMessages
from tests.waiting import join_threads

LEAD_S = 50.0


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
    assert EndTime(KnownEnd(end_time=None, time=0.0)).left_s(1e12, lead_s=1.0) == math.inf


@pytest.mark.parametrize(("now", "expected"), [(949.9, False), (950.0, True), (1200.0, True)])
def test_two_steps_a_save_and_ten_seconds_must_fit(now: float, *, expected: bool) -> None:
    need_s = Deadline(end_time=1000.0).need_s(5.0, 30.0)
    assert (EndTime(KnownEnd(end_time=1000.0, time=0.0)).left_s(now, lead_s=need_s) <= need_s) is expected


@pytest.mark.parametrize(("length_s", "need_s"), [(60.0, 11.2), (3600.0, 70.0), (86400.0, 70.0)])
def test_a_save_without_a_measurement_is_assumed_to_take_a_fraction_of_the_job(length_s: float, need_s: float) -> None:
    assert Deadline(end_time=length_s, start_time=0.0).need_s(None, None) == pytest.approx(need_s)


def test_a_short_lead_gives_a_warning_with_the_value_to_write(golden: GoldenMessages) -> None:
    sentence = golden.message(short_lead_sentence(30.0, 10.0, 40.0))
    for fact in ("requeue.signal_lead is 30 s", "a step takes 10.0 s", "a save 40.0 s", "write 100s or more"):
        assert fact in sentence


@pytest.mark.parametrize(
    ("lead", "step", "save"), [(None, 10.0, 40.0), (50.0, 10.0, 40.0), (1.0, None, 40.0), (1.0, 10.0, None)]
)
def test_a_lead_that_is_long_enough_or_unknown_gives_no_warning(
    lead: float | None, step: float | None, save: float | None
) -> None:
    assert short_lead_sentence(lead, step, save) is None


class Answers:
    """Answers to the question for the end of the job, one after the other; the last one again and again."""

    def __init__(self, *ends: float | None, now: Callable[[], float]) -> None:
        self._ends, self._now, self.asked = list(ends), now, 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self) -> KnownEnd | None:
        self.asked += 1
        time, end = self._now(), self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]
        self.may_answer.wait()
        return None if end is None else KnownEnd(end_time=None if end == math.inf else end, time=time)


class Job:
    """A job that begins at 0 and ends at 1000, as one rank sees it."""

    def __init__(self, *ends: float | None) -> None:
        self.now = 0.0
        self.moves: list[float | None] = []
        self.answers = Answers(*ends, now=lambda: self.now)
        self.end = EndTime(KnownEnd(end_time=1000.0, time=0.0), self.answers, on_move=self.moves.append)

    def is_over(self, now: float) -> bool:
        """Return whether the rank would stop, after the answers to earlier questions have come."""
        self.now = now
        stops = self.end.left_s(now, lead_s=LEAD_S) <= LEAD_S
        if self.answers.may_answer.is_set():
            self.wait_for_answer()
        return stops

    @staticmethod
    def wait_for_answer() -> None:
        join_threads("hpcddp-end-time")


@pytest.fixture
def job_of() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(*ends: float | None) -> Job:
        jobs.append(Job(*ends))
        return jobs[-1]

    yield make
    for job in jobs:
        job.answers.may_answer.set()
        job.wait_for_answer()


def test_a_longer_limit_is_noticed_before_the_old_end(job_of: Callable[..., Job]) -> None:
    job = job_of(2000.0)
    assert [job.is_over(now) for now in (0, 100, 935, 951, 1000, 1900)] == [False] * 6
    assert [job.is_over(now) for now in (1935, 1949, 1951)] == [False, False, True]
    assert job.moves == [2000.0]


def test_a_limit_that_is_raised_shortly_before_the_old_end_is_noticed(job_of: Callable[..., Job]) -> None:
    job = job_of(1000.0, 2000.0)
    assert [job.is_over(now) for now in (935, 942, 951, 1000)] == [False] * 4
    assert (job.moves, job.answers.asked) == ([2000.0], 2)


def test_a_shorter_limit_is_noticed_within_three_minutes(job_of: Callable[..., Job]) -> None:
    job = job_of(300.0)
    assert [job.is_over(now) for now in (100, 179)] == [False, False]
    assert job.answers.asked == 0
    assert [job.is_over(now) for now in (181, 251)] == [False, False]
    # The answer from 181 is too old to act on.
    assert job.is_over(252)
    assert (job.moves, job.answers.asked) == ([300.0], 2)


def test_a_limit_that_is_removed_ends_nothing(job_of: Callable[..., Job]) -> None:
    job = job_of(math.inf)
    assert [job.is_over(now) for now in (940, 960, 5000)] == [False] * 3
    assert job.moves == [None]


def test_a_job_that_wakes_up_after_its_old_end_asks_first(job_of: Callable[..., Job]) -> None:
    job = job_of(1000.0, 1000.0, 1600.0)
    assert [job.is_over(now) for now in (935, 945)] == [False, False]
    # Suspended for ten minutes.
    assert [job.is_over(now) for now in (1545, 1546, 1549)] == [False] * 3
    assert job.is_over(1551)


def test_an_answer_that_is_late_does_not_block_and_the_old_end_counts(job_of: Callable[..., Job]) -> None:
    job = job_of(2000.0)
    job.answers.may_answer.clear()
    assert [job.is_over(now) for now in (935, 949)] == [False, False]
    assert job.is_over(950)
    assert job.answers.asked == 1
    job.answers.may_answer.set()
    job.wait_for_answer()
    assert not job.is_over(951)


def test_without_an_answer_the_old_end_counts(job_of: Callable[..., Job]) -> None:
    job = job_of(None)
    assert [job.is_over(now) for now in (200, 949, 950, 953)] == [False] * 4
    assert job.is_over(955)
    assert job.moves == []


def test_it_is_asked_for_rarely(job_of: Callable[..., Job]) -> None:
    job = job_of(1000.0)
    assert not any(job.is_over(now) for now in range(930))
    assert job.answers.asked == 5


def test_slow_steps_ask_a_step_earlier() -> None:
    now, asked = 0.0, []

    def ask() -> KnownEnd:
        asked.append(now)
        return KnownEnd(end_time=1000.0, time=now)

    end = EndTime(KnownEnd(end_time=1000.0, time=800.0), ask)
    for now in (805.0, 865.0, 925.0, 985.0):
        left_s = end.left_s(now, lead_s=LEAD_S, pause_s=60.0)
        Job.wait_for_answer()
    assert (asked, left_s) == ([925.0], 15.0)


def test_a_move_is_told() -> None:
    assert moved_sentence(None) == "Slurm has removed the job's time limit"
    assert "the end of the job to 19" in moved_sentence(0.0)
