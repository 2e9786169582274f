"""Build the model of a job, and check it with two samples."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpcddp.jobfile.fields import is_reference
from hpcddp.jobfile.sections import Train
from hpcddp.packages import require
from hpcddp.train.buffers import buffers_restored
from hpcddp.train.errors import ModelError, UserCodeError
from hpcddp.train.losses.declared import zero_of
from hpcddp.train.model.objective import check_outputs
from hpcddp.train.precision import Precision, kept_in
from hpcddp.train.user_code import call_function, describe

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
    if is_reference(name):
        return _checked(name, call_function("train.model", name, {"num_classes": classes, **arguments}))
    require(f"train.model: {name}", "torchvision")
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


def check_model_input(
    train: Train, model: nn.Module, inputs: Tensor, precision: Precision, *, classes: int
) -> tuple[str, ...]:
    """Run two samples through the model: forward in evaluation mode, forward and backward in training mode.

    Buffers are restored and gradients cleared; the model is left in training mode.

    Args:
        train: the job's training.
        model: the model on its device.
        inputs: two samples on the device.
        precision: the precision of the forward.
        classes: K.

    Returns:
        Names of the parameters that get no gradient.

    Raises:
        ModelError: a torchvision model does not take the input, or the outputs do not fit the loss.
        UserCodeError: the user's model raised.
    """
    try:
        with buffers_restored(model):
            model.eval()
            with torch.no_grad(), precision.autocast():
                check_outputs(train.model, model(inputs), len(inputs), classes)
            model.train()
            with precision.autocast():
                outputs = model(inputs)
                check_outputs(train.model, outputs, len(inputs), classes)
                loss = zero_of(outputs)
            torch.autograd.backward(loss)
    except (torch.OutOfMemoryError, ModelError):
        raise
    except Exception as error:
        if is_reference(train.model):
            raise UserCodeError(
                f"train.model is {train.model}, which failed on two samples of dataset {train.dataset}, a tensor of "
                f"shape {tuple(inputs.shape)}: {describe(error)}; make it take them, or give it other data",
                traceback=traceback.format_exc(),
            ) from error
        size = " x ".join(str(number) for number in inputs.shape[1:])
        raise ModelError(
            f"train.model is {train.model}, which does not take inputs of {size} of dataset {train.dataset} "
            f"({describe(error)}); give it images of another size, another model, or the argument in train.model_args "
            "that sets their size"
        ) from error
    unused = tuple(
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    )
    model.zero_grad(set_to_none=True)
    return unused
