"""Errors in the user's own code are named, with their traceback."""

from __future__ import annotations

from typing import Any

import pytest

from hpcddp.train.errors import DataError, ModelError, TrainingError, UserCodeError
from tests.distributed.training import result
from tests.train.conftest import Training

ODD = "tests.train.odd_code"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"train__model": "tests.train.nowhere:model"},
            (
                "train.model is tests.train.nowhere:model, and importing tests.train.nowhere failed: "
                "ModuleNotFoundError: No module named 'tests.train.nowhere'"
            ),
        ),
        (
            {"train__model": f"{ODD}:missing"},
            "odd_code.py) has no such name; write the name of a function in it",
        ),
        (
            {"train__model": f"{ODD}:NOT_A_FUNCTION"},
            "has a int of that name, which is no function; write the name of a function in it",
        ),
        (
            {"train__model": f"{ODD}:fails", "train__model_args": {"depth": 3}},
            "fails(num_classes=10, depth=3) failed: KeyError: 'my own mistake'",
        ),
        (
            {"train__model": f"{ODD}:gives_a_number"},
            "returned a int, and only a torch.nn.Module can be trained; return one",
        ),
        (
            {"train__model": f"{ODD}:no_parameters"},
            "returned a Flatten without a parameter that requires a gradient, so that there is nothing to train",
        ),
        (
            {"train__model": f"{ODD}:fails_on_digits"},
            (
                "which failed on two samples of dataset tests.distributed.own_code:few_digits, a tensor of shape "
                "(2, 3, 32, 32): RuntimeError: "
            ),
        ),
        (
            {"train__dataset": f"{ODD}:fails"},
            "train.dataset is tests.train.odd_code:fails, and fails(split='train') failed: KeyError",
        ),
        (
            {"train__dataset": f"{ODD}:gives_a_number"},
            "returned a int for split train, and that has no length or no indexing; return a map-style data set",
        ),
        (
            {"train__dataset": f"{ODD}:no_pairs", "train__num_classes": 2},
            "gives Tensor at sample 0; give a pair (tensor, int label)",
        ),
        (
            {"train__dataset": f"{ODD}:float_labels", "train__num_classes": 2},
            "gives (Tensor, float) at sample 0; give a pair (tensor, int label)",
        ),
        (
            {"train__dataset": f"{ODD}:float_labels_of_val", "train__num_classes": 2},
            (
                "split val of dataset tests.train.odd_code:float_labels_of_val gives (Tensor, float) at sample 0; "
                "give a pair (tensor, int label)"
            ),
        ),
        (
            {"train__dataset": f"{ODD}:failing_sample", "train__num_classes": 10},
            "loading samples of dataset tests.train.odd_code:failing_sample failed: ValueError: sample is broken",
        ),
        (
            {"train__dataset": f"{ODD}:failing_sample", "train__num_classes": 10, "train__num_workers": 1},
            "loading samples of dataset tests.train.odd_code:failing_sample failed: ValueError: sample is broken",
        ),
    ],
)
def test_failure_of_own_code_is_named(training: Training, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        training.train(**changes)
    assert sentence in caught.value.message
    assert caught.value.exit_code == 70


def test_traceback_of_own_code_is_kept(training: Training) -> None:
    with pytest.raises(UserCodeError) as caught:
        training.train(train__model=f"{ODD}:fails")
    assert 'raise KeyError("my own mistake")' in caught.value.traceback
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"train__dataset": f"{ODD}:no_pairs"},
            (
                "train.num_classes is null, and dataset tests.train.odd_code:no_pairs has neither classes nor targets "
                "nor labels to count; write train.num_classes"
            ),
        ),
        (
            {"train__dataset": "synthetic", "train__num_classes": 9},
            "train.num_classes is 9, and dataset synthetic has 10 classes; write 10 or more",
        ),
        (
            {"train__dataset": f"{ODD}:label_beyond", "train__num_classes": 7},
            "has label 7 at sample 0, and the model has 7 classes, 0..6; write a larger train.num_classes",
        ),
        (
            {"train__num_classes": 9},
            (
                "the model has 9 classes, 0..8, but split train of dataset "
                "tests.distributed.own_code:few_digits has labels 0..9; write train.num_classes 10 or more, with labels"
            ),
        ),
        (
            {"train__dataset": f"{ODD}:labels_of_val_beyond"},
            "split val of dataset tests.train.odd_code:labels_of_val_beyond has labels 3..3; write train.num_classes 4",
        ),
        (
            {"train__dataset": f"{ODD}:late_label", "train__dataset_args": {"label": 7}, "train__num_classes": 7},
            "has label 7, and the model has 7 classes, 0..6; write a larger train.num_classes",
        ),
        (
            # What cross entropy would leave out in silence.
            {"train__dataset": f"{ODD}:late_label", "train__dataset_args": {"label": -100}, "train__num_classes": 7},
            "has label -100, and the model has 7 classes, 0..6",
        ),
        (
            {"train__dataset": f"{ODD}:two_shapes", "train__num_classes": 2},
            "gives tensors of different shapes ((3, 32, 32), (3, 31, 32)), which make no batch",
        ),
        (
            {"train__dataset": f"{ODD}:empty", "train__num_classes": 2},
            "dataset tests.train.odd_code:empty has no samples in split train; give it some",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(training: Training, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        training.train(**changes)
    assert sentence in caught.value.message


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            f"{ODD}:wrong_outputs",
            "which returns a tensor of shape (2, 11) for 2 samples, and the loss needs logits of shape (2, 10)",
        ),
        (f"{ODD}:dictionary_outputs", "which returns a dict for 2 samples, and the loss needs logits of shape (2, 10)"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(training: Training, model: str, sentence: str) -> None:
    with pytest.raises(ModelError) as caught:
        training.train(train__model=model)
    assert sentence in caught.value.message
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


def test_job_without_a_train_section_is_refused(training: Training) -> None:
    with pytest.raises(TrainingError, match="the job has no train section, so that there is nothing to train"):
        training.train(train=None)
