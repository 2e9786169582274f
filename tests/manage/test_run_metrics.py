"""What a report keeps of a log of metrics has the shape of the log, in a memory that does not grow with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.manage.attempt_times import Phase
from hpcddp.manage.run_metrics import RunMetrics, read_run_metrics
from tests.manage.runs import NOON, make

LINES = 30_000
BEGAN = (NOON, NOON + 1000)


def lines(first: int, last: int, *, at: float, **values: Any) -> list[str]:
    """Return a line every 0.01 s, with an evaluation of 20 s after step 10,000 and one of 1 ms after every 50th."""
    made = []
    for step in range(first, last + 1):
        at += 0.01
        document = {"step": step, "loss": 1 / step, "samples_seen": 8 * step, "samples_per_s": 800.0, "time": at}
        made.append(json.dumps({**document, **values}))
        if step % 50 == 0:
            eval_s = 20.0 if step == 10_000 else 0.001
            made.append(json.dumps({"step": step, "val_loss": 2.0, "eval_s": eval_s}))
            at += eval_s
    return made


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> RunMetrics:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    before = lines(1, 20_000, at=NOON)
    # One value that stands out.
    before[17_000] = before[17_000].replace('"loss": ', '"loss": 8, "other": ')
    path.write_text("\n".join([*before, *lines(20_001, LINES, at=NOON + 1060), ""]))
    return read_run_metrics(path)


def test_few_points_show_every_extreme(metrics: RunMetrics) -> None:
    points = metrics.points("loss", BEGAN, 600)
    assert 590 < len(points) < 610
    assert max(point.high for point in points if point.step > 1000) > 7
    assert sum(point.mean for point in points) / len(points) == pytest.approx(
        sum(metrics.values("loss")) / LINES, rel=0.05
    )
    assert [point.time for point in points] == sorted(point.time for point in points)
    best, last = metrics.best("loss"), metrics.last("loss")
    assert best is not None
    assert last is not None
    assert (best.step, last.step, metrics.last_step) == (LINES, LINES, LINES)
    # No point reaches from one attempt into the next.
    assert all((point.step > 20_000) == (point.attempt_index == 1) for point in points)


def test_no_line_is_counted_twice_where_the_clock_of_a_later_attempt_is_behind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.0, "time": {NOON + step}}}\n' for step in range(1, 151)))
    metrics = read_run_metrics(path)
    began = [NOON + s for s in (0, 100, 50)]
    assert [len(log.steps) for log in metrics.logs(began)] == [99, 0, 51]
    assert [point.attempt_index for point in metrics.points("loss", began, 150)] == [0] * 99 + [2] * 51


def test_the_rates_of_a_long_run_have_the_same_percentiles(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # Every second step is slow, so that no regular choice of steps has their median.
    rates = [100 + step / 1000 if step % 2 else 50.0 for step in range(200_000)]
    path.write_text("".join(f'{{"step": {step}, "samples_per_s": {rate}}}\n' for step, rate in enumerate(rates)))
    kept = sorted(read_run_metrics(path).values("samples_per_s"))
    assert 30_000 < len(kept) < 50_000
    assert kept[len(kept) // 10] == 50.0
    assert kept[9 * len(kept) // 10] == pytest.approx(260, rel=0.02)
    assert 0.48 < kept.count(50.0) / len(kept) < 0.52


def test_the_memory_of_a_report_does_not_grow_with_the_run(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hpcddp.manage.run_metrics import read_run_metrics\n"
        "read_run_metrics(Path(sys.argv[1]))\n"
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"
    )
    memory = []
    for name, count in (("short", 5000), ("long", 100_000)):
        path = tmp_path / name
        path.write_text("\n".join([*lines(1, count, at=NOON, lr=0.1, grad_norm=1.0), ""]))
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
        memory.append(int(done.stdout) / 1024)  # MiB
    assert memory[1] < memory[0] + 8


def test_the_part_of_a_long_attempt_that_a_later_one_repeats_does_not_count(tmp_path: Path) -> None:
    from hpcddp.manage.overview import entry_of, overview_of
    from hpcddp.manage.report import reports_of

    made = make(tmp_path).submitted().started(at=0).event("train", at=0, reason="python train.py")
    made.event("requeue", at=900, cause="crash").started(at=1000, attempt=1).event("train", at=1000, attempt=1)
    made.event("finish", at=1400, attempt=1).ended("finished")
    path = made.run.metrics
    path.write_text("\n".join([*lines(1, 10_000, at=NOON), *lines(6_346, 15_000, at=NOON + 1000), ""]))
    (report,) = reports_of(overview_of([entry_of(made.run)], ask=list, now=NOON + 4000).lines)
    rows = [(attempt.resumed_from, attempt.last_step, attempt.lost_steps) for attempt in report.attempts]
    assert rows == [(0, 6_345, 3655), (6_345, 15_000, 0)]
    # With the evaluations after 126 steps, of which a program records no duration.
    assert report.attempts[0].seconds[Phase.TRAINING] == pytest.approx(63.44 + 126 * 0.001, abs=0.01)
