"""The elements of a sweep by a metric, the best first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcddp.errors import UserError
from hpcddp.manage.overview import SweepStatus, overview_of
from hpcddp.manage.overview_text import elements_table
from hpcddp.manage.ranking import is_smaller_better, rank
from hpcddp.manage.report import reports_of
from hpcddp.run.record import write_record
from hpcddp.run.result import Result
from hpcddp.run.sweep import Chunk, Sweep, write_sweep
from hpcddp.slurm.job import State
from tests.manage.runs import NOON, FakeRun, make
from tests.messages import GoldenMessages

Lines = list[dict[str, Any]]


def sweep_of(root: Path, *elements: tuple[Mapping[str, Any], Lines | None]) -> SweepStatus:
    """Write a sweep whose elements have these values and lines of metrics; None is an element that waits."""
    made = make(root, "sweep").submitted("50")
    chunks = (Chunk(job_id="50", first=0, count=len(elements)),)
    sweep = Sweep(sweep_id="sweep", path=made.run.path, elements=tuple(values for values, _ in elements), chunks=chunks)
    write_sweep(sweep)
    for index, (_, lines) in enumerate(elements):
        if lines is not None:
            run = make(root, sweep.run_id(index)).submitted(f"50_{index}").started(f"50_{index}").run
            run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (line,) = overview_of([sweep], ask=list, now=NOON).lines
    assert isinstance(line, SweepStatus)
    return line


def resumed(sweep: SweepStatus, *changes: dict[str, Any]) -> SweepStatus:
    """Return the sweep after a resumption of its first element with changes."""
    FakeRun(sweep.sweep.run(0)).submitted("51_0", changes=changes)
    (line,) = overview_of([sweep.sweep], ask=list, now=NOON).lines
    assert isinstance(line, SweepStatus)
    return line


def of_metric(name: str, *values: float | None, root: Path) -> SweepStatus:
    return sweep_of(root, *(({"lr": place}, [{"step": 1, name: value}]) for place, value in enumerate(values)))


def order(sweep: SweepStatus, metric: str) -> list[int]:
    return list(rank(sweep, metric).values)


def plain(text: str, _: State) -> str:
    return text


@pytest.mark.parametrize(
    ("name", "expected"),
    [("val_accuracy", [1, 2, 0]), ("loss", [0, 2, 1]), ("val_loss", [0, 2, 1]), ("top1_Error", [0, 2, 1])],
)
def test_the_best_is_first_and_a_loss_or_an_error_is_better_if_smaller(
    name: str, expected: list[int], tmp_path: Path
) -> None:
    assert order(of_metric(name, 0.1, 0.9, 0.5, root=tmp_path), name) == expected
    assert is_smaller_better(name) == (expected[0] == 0)


def test_the_newest_value_counts_even_far_before_the_last_step(tmp_path: Path) -> None:
    steps: Lines = [{"step": step, "loss": 1.0, "time": NOON + step} for step in range(2000)]
    early: Lines = [{"step": 1, "val_accuracy": 0.9}, {"step": 2, "val_accuracy": 0.2}]
    sweep = sweep_of(tmp_path, ({"a": 1}, [*early, *steps]), ({"a": 2}, [{"step": 1, "val_accuracy": 0.5}]))
    assert list(rank(sweep, "val_accuracy").values.items()) == [(1, 0.5), (0, 0.2)]


def test_those_without_a_finite_value_come_last_in_their_order(tmp_path: Path) -> None:
    diverged: Lines = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": None}]
    huge: Lines = [{"step": 1, "loss": 10**400}]
    sweep = sweep_of(
        tmp_path, ({"a": 1}, diverged), ({"a": 2}, None), ({"a": 3}, huge), ({"a": 4}, [{"step": 1, "loss": 2}])
    )
    assert list(rank(sweep, "loss").values.items()) == [(3, 2.0), (0, None), (1, None), (2, None)]


def test_the_result_counts_where_the_metrics_do_not_have_it(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, ({"a": 1}, []), ({"a": 2}, []))
    for index, accuracy in enumerate((0.25, 0.75)):
        result = Result(status="finished", val_accuracy=accuracy, wall_s=10.0 - index)
        write_record(sweep.sweep.run(index).result, result)
    assert order(sweep, "val_accuracy") == [1, 0]
    assert order(sweep, "wall_s") == [0, 1]


def test_an_unknown_metric_is_refused_with_the_names_that_there_are(tmp_path: Path, golden: GoldenMessages) -> None:
    sweep = sweep_of(tmp_path, ({"a": 1}, [{"step": 1, "loss": 0.1, "note": "x"}, {"step": 1, "val_accuracy": 0.5}]))
    with pytest.raises(UserError) as caught:
        rank(sweep, "val_acuracy")
    message = golden.message(caught.value)
    assert "--sort is 'val_acuracy'" in message
    assert "did you mean val_accuracy?" in message
    assert message.endswith("loss, val_accuracy")


def test_before_the_first_metric_the_elements_are_in_their_own_order(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, ({"a": 1}, None), ({"a": 2}, None))
    assert list(rank(sweep, "val_accuracy").values.items()) == [(0, None), (1, None)]


def test_the_table_has_the_elements_in_this_order_with_the_metric(tmp_path: Path) -> None:
    sweep = of_metric("val_accuracy", 0.25, 0.75, root=tmp_path)
    head, *rows = elements_table(sweep, ranking=rank(sweep, "val_accuracy"), width=60, paint=plain)
    assert head.split() == ["run", "values", "state", "attempt", "step", "val_accuracy"]
    assert [row.split()[::5] for row in rows[:2]] == [["sweep_1", "0.75"], ["sweep_0", "0.25"]]
    assert [row.split()[1] for row in rows[:2]] == ["lr=1", "lr=0"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_table_fits_the_terminal_whatever_the_values_are(width: int, tmp_path: Path) -> None:
    values = {f"key_{number}": "x" * number * 9 for number in range(7)} | {"hostile": "\x1b[31m\n"}
    sweep = sweep_of(tmp_path, (values, [{"step": 1, "loss": 1.25}]), ({"hostile": {"a": 1}}, None))
    head, *rows = elements_table(sweep, ranking=rank(sweep, "loss"), width=width, paint=plain)
    table = [head, *(row for row in rows if not row.startswith("(columns hidden: "))]
    assert all(len(line) <= width for line in table)
    assert not any("\x1b" in line or "\n" in line for line in rows)
    assert "loss" in head


def test_the_document_has_the_elements_in_this_order(tmp_path: Path) -> None:
    document = rank(of_metric("val_accuracy", 0.1, 0.9, root=tmp_path), "val_accuracy").as_json()
    assert [(one["index"], one["metric"], one["values"]) for one in document["elements"]] == [
        (1, 0.9, {"lr": 1}), (0, 0.1, {"lr": 0}),
    ]  # fmt: skip
    assert (document["sorted_by"], document["smaller_is_better"], document["sweep_id"]) == (
        "val_accuracy",
        False,
        "sweep",
    )


def test_a_value_that_a_resumption_has_changed_is_the_one_with_which_the_element_runs(tmp_path: Path) -> None:
    values: tuple[Mapping[str, Any], ...] = ({"learning_rate.base": 0.01}, {"learning_rate.base": 0.02})
    sweep = sweep_of(tmp_path, *((value, [{"step": 1, "loss": 0.5, "time": NOON}]) for value in values))
    sweep = resumed(sweep, {"key": "learning_rate.base", "before": 0.01, "after": 0.3, "attempt": 1})
    assert sweep.values == ["base=0.01 -> 0.3", "base=0.02"]
    assert [one["values"] for one in sweep.as_json()["elements"]] == [
        {"learning_rate.base": 0.3}, {"learning_rate.base": 0.02},
    ]  # fmt: skip
    assert rank(sweep, "loss").as_json()["elements"][0]["values"] == {"learning_rate.base": 0.3}
    first, second = reports_of([sweep])
    assert (first.as_json()["values"], second.as_json()["values"]) == (
        {"learning_rate.base": 0.3}, {"learning_rate.base": 0.02},
    )  # fmt: skip


def test_a_changed_command_no_longer_tells_the_values_of_its_placeholders(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, ({"lr": "1e-3", "train.seed": 0}, [{"step": 1, "loss": 0.5}]))
    command = ["python", "train.py", "--lr"]
    sweep = resumed(sweep, {"key": "command", "before": [*command, "1e-3"], "after": [*command, "0.7"], "attempt": 1})
    assert sweep.values == ["lr=1e-3 (changed) seed=0"]
    assert sweep.as_json()["elements"][0]["values"] == {"lr": None, "train.seed": 0}


def test_a_text_has_no_quotes_among_the_values(tmp_path: Path) -> None:
    assert sweep_of(tmp_path, ({"lr": "1e-3", "flag": True}, None)).values == ["lr=1e-3 flag=true"]
