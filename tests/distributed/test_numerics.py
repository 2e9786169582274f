"""Arithmetic over four ranks: BatchNorm, the end of an optimizer step, the replica guard."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.numerics import main
from tests.messages import GoldenMessages
from tests.ranks import run_forked

RANKS = 4


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Run every check in one process group; return what each rank says, by check."""
    folder = tmp_path_factory.mktemp("numerics")
    ended = run_forked(main, (folder, RANKS), world_size=RANKS, logs=folder)
    assert ended.codes == [0] * RANKS, ended.outputs
    documents = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {check: [document[check] for document in documents] for check in documents[0]}


def test_synchronised_batch_norm_equals_one_process_for_any_shares(answers: dict[str, list[Any]]) -> None:
    for errors in answers["batch_norm"]:
        assert len(errors) == 35
        assert max(errors.values()) <= 1e-12


def test_running_statistics_over_ranks_have_their_closed_form(answers: dict[str, list[Any]]) -> None:
    assert answers["closed_form"] == [pytest.approx([0.3, 0.9 + 0.1 * 20 / 3, 1.0], rel=0, abs=1e-15)] * RANKS


def test_variance_of_numbers_far_from_zero_is_stable(answers: dict[str, list[Any]]) -> None:
    assert max(answers["far_from_zero"]) < 1e-4


def test_one_value_over_all_ranks_is_refused_by_every_rank(
    golden: GoldenMessages, answers: dict[str, list[Any]]
) -> None:
    message = golden.message(answers["one_value"][0])
    assert answers["one_value"] == [message] * RANKS
    assert "more than 1 value per channel" in message
    assert "got 1" in message


def test_clipping_comes_once_after_the_reduction(answers: dict[str, list[Any]]) -> None:
    # Rank gradients (3, 4) and (0, 0.5) have the mean (1.5, 2.25), of length 2.7042; clipped before, it would be
    # (0.3, 0.65).
    assert answers["clipping"] == [pytest.approx([0.5547, 0.8320, 0.0], rel=0, abs=1e-4)] * RANKS


def test_parameter_that_some_ranks_leave_out_gets_the_exact_gradient(answers: dict[str, list[Any]]) -> None:
    for errors in answers["unused"]:
        assert max(errors["1"], errors["2"]) <= 1e-12
        assert errors["moved"] > 1e-3


def test_parameter_that_some_ranks_leave_out_unsaid_is_named_and_nobody_waits_for_ever(
    golden: GoldenMessages,
    answers: dict[str, list[Any]],
) -> None:
    first, *others = answers["unreached"]
    for rank, message in enumerate(others, start=1):
        golden.message(message)
        assert "in step 1 no gradient reached" in message
        assert f"sometimes.weight on rank {rank}" in message
        assert "find_unused_parameters = True" in message
    assert len(others) == RANKS - 1
    assert "nothing" not in first


def test_overflow_on_one_rank_skips_the_step_on_all(answers: dict[str, list[Any]]) -> None:
    first = answers["overflow"][0]
    assert all(steps == first for steps in answers["overflow"])
    assert [step["skipped"] for step in first] == [False, True, False]
    assert [step["scale"] for step in first] == [1024.0, 512.0, 512.0]
    # Neither the weights nor their average moved in the step that was left out.
    assert first[0]["entries"] == first[1]["entries"] != first[2]["entries"]


def test_average_moves_once_per_step_statistics_included(answers: dict[str, list[Any]]) -> None:
    assert max(answers["average"]) <= 1e-14


def test_guard_finds_a_rate_that_differs_and_is_silent_before(
    golden: GoldenMessages, answers: dict[str, list[Any]]
) -> None:
    ((step, rank, code, message),) = answers["guard"][0]["alarms"]
    assert (step, rank, code) == (55, 1, 70)
    golden.message(message)
    assert "after step 55 rank 1 differs" in message
    assert "learning rate and 0.weight and 4 more" in message
    assert all(seen == answers["guard"][0] for seen in answers["guard"])


def test_guard_finds_a_buffer_that_differs_but_leaves_local_statistics_alone(
    golden: GoldenMessages, answers: dict[str, list[Any]]
) -> None:
    for (said,) in answers["guard_of_buffers"]:
        golden.message(said)
        assert said.startswith("2 after step 7 rank 2 differs")
        assert "in mask," in said


def test_statistics_are_merged_by_their_counts_within_and_between_ranks(answers: dict[str, list[Any]]) -> None:
    # Means 0, 1, (2), 3 with counts 2, 4, 0, 2; variances 1, 2, (3), 4. Other buffers are rank 0's.
    within, between = (2 * 1 + 4 * 2 + 2 * 4) / 8, (2 * 1.25**2 + 4 * 0.25**2 + 2 * 1.75**2) / 8
    for seen in answers["merging"]:
        assert seen["merged"] == [[0.0], [1.25, 1.0], [within + between, 2.0], 3]
        assert seen["put_back"]
        assert seen["of_nothing"] == [[0.0], [0.0, 1.0], [1.0, 2.0], 3]


def test_every_rank_gets_its_own_buffers_back_from_a_checkpoint(answers: dict[str, list[Any]]) -> None:
    assert answers["merging"][0]["names"] == ["model.1.running_mean", "model.1.running_var", "model.own"]
    assert [seen["own_again"] for seen in answers["merging"]] == [
        [[float(rank)], [float(rank), 1.0]] for rank in range(RANKS)
    ]
