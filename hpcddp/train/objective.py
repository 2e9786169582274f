"""The loss: cross entropy of the main output, and of auxiliary outputs where a model has them; or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcddp.spec.job import Train
from hpcddp.train.errors import ModelError, UserCodeError
from hpcddp.train.losses import DeclaredLoss, Reduction
from hpcddp.train.user_code import blame, load_function

# By the type that the model returns. Inception v3: torchvision's and TensorFlow's value; GoogLeNet: Szegedy et al. 2015
# (arXiv 1409.4842), section 5.
_AUXILIARY_WEIGHTS: Final = {"InceptionOutputs": 0.4, "GoogLeNetOutputs": 0.3}


def choose_loss(train: Train, device: torch.device) -> DeclaredLoss:
    """Return the job's loss with what it does with the samples.

    Args:
        train: the job's training.
        device: where outputs and labels are.

    Raises:
        UserCodeError: a loss of the user's own cannot be imported or made, or holds parameters.
    """
    if train.loss is None:
        return DeclaredLoss(function=partial(mean_loss, label_smoothing=train.label_smoothing))
    function = load_function("train.loss", train.loss)
    if isinstance(function, type):
        with blame(f"train.loss is {train.loss}, and making one failed"):
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
        # A failure of a collective is not the loss's.
        function = partial(_blamed, train.loss, function)
    return DeclaredLoss(function=function, reduction=reduction)


def _blamed(name: str, function: Callable[[Any, Tensor], Tensor], outputs: Any, labels: Tensor) -> Tensor:  # noqa: ANN401
    with blame(f"train.loss is {name}, which failed on a micro-batch of {len(labels)} samples"):
        return function(outputs, labels)


def mean_loss(outputs: Any, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:  # noqa: ANN401
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


def zero_loss(outputs: Any) -> Tensor:  # noqa: ANN401
    """Return 0 as a function of every output, so that an empty share goes through the same collectives."""
    return sum((logits.sum() * 0 for logits in all_logits(outputs)), start=next(all_logits(outputs)).new_zeros(()))


def no_rows(outputs: Any) -> Any:  # noqa: ANN401
    """Return the outputs for no samples, of the same type and with the same collectives behind them."""
    if isinstance(outputs, Tensor):
        return outputs[:0]
    return type(outputs)(*(None if logits is None else logits[:0] for logits in outputs))


def all_logits(outputs: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Yield the main logits, then auxiliary ones."""
    if isinstance(outputs, Tensor):
        yield outputs
    else:
        yield from (logits for logits in outputs if logits is not None)


def check_outputs(name: str, outputs: Any, samples: int, classes: int) -> None:  # noqa: ANN401
    """Refuse outputs that cross entropy cannot take.

    Args:
        name: ``train.model``.
        outputs: what the model returned.
        samples: n, samples that went in.
        classes: K.

    Raises:
        ModelError: the outputs are no logits ``[n, K]``.
    """
    known = isinstance(outputs, Tensor) or type(outputs).__name__ in _AUXILIARY_WEIGHTS
    if known and all(logits.shape == (samples, classes) for logits in all_logits(outputs)):
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
