"""Errors in the user's own code are named, with their traceback."""

from __future__ import annotations

from typing import Any

import pytest

from hpcddp.train.errors import DataError, ModelError, TrainingError, UserCodeError
from tests.distributed.training import result
from tests.messages import GoldenMessages
from tests.train import odd_code
from tests.train.conftest import Training

ODD = "tests.train.odd_code"


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (
            {"train__model": "tests.train.nowhere:model"},
            ("train.model is tests.train.nowhere:model", "ModuleNotFoundError: No module named 'tests.train.nowhere'"),
        ),
        ({"train__model": f"{ODD}:missing"}, ("odd_code.py) has no such name", "write the name of a function")),
        ({"train__model": f"{ODD}:NOT_A_FUNCTION"}, ("has a int of that name", "write the name of a function")),
        (
            {"train__model": f"{ODD}:fails", "train__model_args": {"depth": 3}},
            ("fails(num_classes=10, depth=3) failed: KeyError: 'my own mistake'",),
        ),
        ({"train__model": f"{ODD}:gives_a_number"}, ("returned a int", "only a torch.nn.Module", "return one")),
        ({"train__model": f"{ODD}:no_parameters"}, ("returned a Flatten without a parameter", "return one that has")),
        (
            {"train__dataset": f"{ODD}:fails"},
            (f"train.dataset is {ODD}:fails", "fails(split='train') failed: KeyError"),
        ),
        (
            {"train__dataset": f"{ODD}:gives_a_number"},
            ("returned a int for split train", "return a map-style data set"),
        ),
        (
            {"train__dataset": f"{ODD}:no_pairs", "train__num_classes": 2},
            (f"{ODD}:no_pairs gives Tensor at sample 0", "a pair (tensor, int label)"),
        ),
        (
            {"train__dataset": f"{ODD}:float_labels", "train__num_classes": 2},
            (f"{ODD}:float_labels gives (Tensor, float) at sample 0", "a pair (tensor, int label)"),
        ),
        (
            {"train__dataset": f"{ODD}:float_labels_of_val", "train__num_classes": 2},
            ("split val of dataset", "gives (Tensor, float) at sample 0", "a pair (tensor, int label)"),
        ),
        (
            {"train__dataset": f"{ODD}:failing_sample", "train__num_classes": 10},
            (f"dataset {ODD}:failing_sample failed: ValueError: sample is broken",),
        ),
        (
            {"train__dataset": f"{ODD}:failing_sample", "train__num_classes": 10, "train__num_workers": 1},
            (f"dataset {ODD}:failing_sample failed: ValueError: sample is broken",),
        ),
    ],
)
def test_failure_of_own_code_is_named(
    golden: GoldenMessages, training: Training, changes: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with pytest.raises(UserCodeError) as caught:
        training.train(**changes)
    message = golden.message(caught.value, {odd_code.__file__: "FILE"})
    for fact in facts:
        assert fact in message
    assert caught.value.exit_code == 70


def test_model_that_fails_on_the_data_is_named_with_what_it_got(golden: GoldenMessages, training: Training) -> None:
    with pytest.raises(UserCodeError) as caught:
        training.train(train__model=f"{ODD}:fails_on_digits")
    message = golden.message(caught.value, {str(caught.value.__cause__): "REASON OF TORCH"})
    assert f"train.model is {ODD}:fails_on_digits" in message
    assert "dataset tests.distributed.own_code:few_digits" in message
    assert "shape (2, 3, 32, 32): RuntimeError: " in message
    assert caught.value.exit_code == 70


def test_traceback_of_own_code_is_kept(training: Training) -> None:
    with pytest.raises(UserCodeError) as caught:
        training.train(train__model=f"{ODD}:fails")
    assert 'raise KeyError("my own mistake")' in caught.value.traceback
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (
            {"train__dataset": f"{ODD}:no_pairs"},
            ("train.num_classes is null", f"dataset {ODD}:no_pairs", "write train.num_classes"),
        ),
        (
            {"train__dataset": "synthetic", "train__num_classes": 9},
            ("train.num_classes is 9", "dataset synthetic has 10 classes", "write 10 or more"),
        ),
        (
            {"train__dataset": f"{ODD}:label_beyond", "train__num_classes": 7},
            ("has label 7 at sample 0", "7 classes, 0..6", "write a larger train.num_classes"),
        ),
        (
            {"train__num_classes": 9},
            ("9 classes, 0..8", "split train", "has labels 0..9", "write train.num_classes 10 or more"),
        ),
        (
            {"train__dataset": f"{ODD}:labels_of_val_beyond"},
            ("split val", "has labels 3..3", "write train.num_classes 4"),
        ),
        (
            {"train__dataset": f"{ODD}:late_label", "train__dataset_args": {"label": 7}, "train__num_classes": 7},
            ("has label 7,", "7 classes, 0..6", "write a larger train.num_classes"),
        ),
        (
            # What cross entropy would leave out in silence.
            {"train__dataset": f"{ODD}:late_label", "train__dataset_args": {"label": -100}, "train__num_classes": 7},
            ("has label -100", "7 classes, 0..6"),
        ),
        (
            {"train__dataset": f"{ODD}:two_shapes", "train__num_classes": 2},
            ("different shapes ((3, 32, 32), (3, 31, 32))", "give all samples the same shape"),
        ),
        (
            {"train__dataset": f"{ODD}:empty", "train__num_classes": 2},
            (f"dataset {ODD}:empty has no samples", "split train"),
        ),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(
    golden: GoldenMessages, training: Training, changes: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with pytest.raises(DataError) as caught:
        training.train(**changes)
    message = golden.message(caught.value)
    for fact in facts:
        assert fact in message


@pytest.mark.parametrize(
    ("model", "output"), [("wrong_outputs", "a tensor of shape (2, 11)"), ("dictionary_outputs", "a dict")]
)
def test_outputs_that_are_no_logits_are_refused(
    golden: GoldenMessages, training: Training, model: str, output: str
) -> None:
    with pytest.raises(ModelError) as caught:
        training.train(train__model=f"{ODD}:{model}")
    message = golden.message(caught.value)
    assert f"train.model is {ODD}:{model}" in message
    assert f"returns {output} for 2 samples" in message
    assert "logits of shape (2, 10)" in message
    assert not training.run.metrics.exists()


def test_inputs_need_not_be_images(training: Training) -> None:
    training.train(
        train__model=f"{ODD}:embedding",
        train__dataset=f"{ODD}:whole_numbers",
        train__num_classes=3,
        train__channels_last=True,
        batch__global_batch_size=5,
    )
    assert result(training.run.path)["status"] == "finished"


def test_job_without_a_train_section_is_refused(golden: GoldenMessages, training: Training) -> None:
    with pytest.raises(TrainingError) as caught:
        training.train(train=None)
    message = golden.message(caught.value)
    assert "no train section" in message
    assert "write one" in message
