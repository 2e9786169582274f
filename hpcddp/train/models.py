"""Build the model: a torchvision model by name, or the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpcddp.train.errors import ModelError, UserCodeError
from hpcddp.train.precision import kept_in
from hpcddp.train.user_code import call_function, describe, is_own

# These models warn if init_weights is not given; True is their default.
_WANT_INIT_WEIGHTS = ("googlenet", "inception_v3")


def build_model(name: str, arguments: Mapping[str, Any], classes: int) -> nn.Module:
    """Return a new model with freshly drawn parameters.

    Args:
        name: a torchvision model, or ``pkg.module:function``.
        arguments: ``train.model_args``, passed to the model.
        classes: K, passed as ``num_classes``.

    Raises:
        ModelError: torchvision has no such model, or does not take the arguments.
        UserCodeError: the user's function failed, or returned something that cannot be trained.
    """
    if is_own(name):
        return _checked(name, call_function("train.model", name, {"num_classes": classes, **arguments}))
    from torchvision import models

    defaults = {"init_weights": True} if name in _WANT_INIT_WEIGHTS else {}
    try:
        return _checked(name, models.get_model(name, **{"num_classes": classes, **defaults, **arguments}))
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise ModelError(
            f"train.model is {name} with model_args {dict(arguments)}, and torchvision does not build it "
            f"({describe(error)}); write a model and arguments that torchvision knows"
        ) from error


def _checked(name: str, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UserCodeError(
            f"train.model is {name}, which returned a {type(model).__name__}, and only a torch.nn.Module can be "
            "trained; return one"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserCodeError(
            f"train.model is {name}, which returned a {type(model).__name__} without a parameter that requires a "
            "gradient, so that there is nothing to train; return one that has some"
        )
    return model


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def place_model(model: nn.Module, device: torch.device, dtype: torch.dtype, *, channels_last: bool) -> None:
    """Move a model to the device, in the precision and layout of the training."""
    for tensor in (*model.parameters(), *model.buffers()):
        # Module.to(dtype) would make complex tensors real.
        tensor.data = tensor.data.to(kept_in(tensor, dtype))
    model.to(device)
    if channels_last:
        # Module.to changes the layout of four-dimensional parameters only.
        model.to(memory_format=torch.channels_last)
