"""The training loss: cross entropy of the main and any auxiliary outputs of a model, or the user's own loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcddp.jobfile.sections import Train
from hpcddp.train.errors import ModelError, UserCodeError
from hpcddp.train.losses import DeclaredLoss, Reduction
from hpcddp.train.losses.state import refuse_state
from hpcddp.train.user_code import as_user_error, load_function

ModelOutputs: TypeAlias = Tensor | Sequence[Tensor | None]
"""Logits ``[n, K]``, or a named tuple of the main and the auxiliary ones, None where the model has left one out."""

# By the type that the model returns. Inception v3: torchvision's and TensorFlow's value; GoogLeNet: Szegedy et al. 2015
# (arXiv 1409.4842), section 5.
_AUXILIARY_WEIGHTS: Final = {"InceptionOutputs": 0.4, "GoogLeNetOutputs": 0.3}


def choose_loss(train: Train, device: torch.device) -> DeclaredLoss:
    """Return the job's loss with its declared reduction, on ``device``.

    Raises:
        UserCodeError: the user's loss cannot be imported or created, or has parameters.
    """
    if train.loss is None:
        return DeclaredLoss(function=partial(mean_loss, label_smoothing=train.label_smoothing))
    function = load_function("train.loss", train.loss)
    if isinstance(function, type):
        with as_user_error(f"train.loss is {train.loss}, and making one failed"):
            function = function()
    if isinstance(function, nn.Module) and any(parameter.requires_grad for parameter in function.parameters()):
        raise UserCodeError(
            f"train.loss is {train.loss}, which holds parameters, and no optimizer would train them; make them part of "
            "the model"
        )
    if isinstance(function, nn.Module):
        function.to(device)
    reduction = Reduction(train.loss_reduction)
    if reduction is not Reduction.GLOBAL:
        # A global loss calls collectives, whose failures are not those of the loss.
        function = _OwnLoss(train.loss, function)
    return DeclaredLoss(function=function, reduction=reduction)


class _OwnLoss:
    """The user's loss: its errors are named, and its first call shows whether it depends on the calls before."""

    def __init__(self, name: str, function: Callable[[Any, Tensor], Tensor]) -> None:
        self._name = name
        self._function = function
        self._is_tried = False

    def __call__(self, outputs: object, labels: Tensor) -> Tensor:
        with as_user_error(f"train.loss is {self._name}, which failed on a micro-batch of {len(labels)} samples"):
            note = None
            if not self._is_tried:
                self._is_tried = True
                note = refuse_state(self._name, self._function, outputs, labels)
            loss = self._function(outputs, labels)
        if note is not None:
            warnings.warn(note, stacklevel=2)
        return loss


def mean_loss(outputs: ModelOutputs, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean loss over the samples of a micro-batch.

    Args:
        outputs: what the model returned: logits ``[n, K]``, or a named tuple of them.
        labels: ``[n]``.
        label_smoothing: 0..1.
    """
    main, *auxiliary = all_logits(outputs)
    loss = functional.cross_entropy(main, labels, label_smoothing=label_smoothing)
    for logits in auxiliary:
        term = functional.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        loss = loss + _AUXILIARY_WEIGHTS[type(outputs).__name__] * term
    return loss


def all_logits(outputs: ModelOutputs) -> Iterator[Tensor]:
    """Yield the main logits, then the auxiliary ones."""
    if isinstance(outputs, Tensor):
        yield outputs
    else:
        yield from (logits for logits in outputs if logits is not None)


def check_outputs(name: str, outputs: object, samples: int, classes: int) -> None:
    """Check that the outputs of a model are logits ``[samples, classes]``.

    Raises:
        ModelError: they are not.
    """
    is_known = isinstance(outputs, Tensor) or type(outputs).__name__ in _AUXILIARY_WEIGHTS
    shape = (samples, classes)
    if is_known and all(logits.shape == shape for logits in all_logits(cast("ModelOutputs", outputs))):
        return
    raise ModelError(
        f"train.model is {name}, which returns {_describe(outputs)} for {samples} samples, and the loss needs "
        f"logits of shape ({samples}, {classes}): one number per sample and class; return those"
    )


def _describe(outputs: object) -> str:
    if isinstance(outputs, Tensor):
        return f"a tensor of shape {tuple(outputs.shape)}"
    if isinstance(outputs, Sequence):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return f"a {type(outputs).__name__}"
