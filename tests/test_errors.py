from __future__ import annotations

import pytest

from hpcddp.errors import listed, nearest


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("ResNet50", ("resnet18", "resnet50"), "resnet50"),
        ("resnet-50", ("resnet18", "resnet50"), "resnet50"),
        ("gpus", ("gpu_type", "gpus_per_node"), "gpus_per_node"),
        ("epoch", ("epochs", "eval_every"), "epochs"),
        ("eopchs", ("epochs", "eval_every"), "epochs"),
        ("x", ("epochs",), None),
        ("", ("epochs",), None),
        ("zzzz", ("epochs", "seed"), None),
    ],
)
def test_the_nearest_name_is_what_was_most_likely_meant(
    word: str, known: tuple[str, ...], expected: str | None
) -> None:
    assert nearest(word, known) == expected


@pytest.mark.parametrize(
    ("words", "expected"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c", "d"], "a, b, c and d")]
)
def test_words_are_listed_with_commas_and_one_and(words: list[str], expected: str) -> None:
    assert listed(words) == expected
