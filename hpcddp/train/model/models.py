"""Build the model of a job, and check it with two samples."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from hpcddp.jobfile.fields import is_reference
from hpcddp.packages import require
from hpcddp.train.buffers import buffers_restored
from hpcddp.train.data.parts import IMAGE_DIMENSIONS
from hpcddp.train.errors import ModelError, UserCodeError
from hpcddp.train.model.objective import check_outputs, zero_loss
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


# Side lengths that published models are made for, and a few between.
_SIDES: Final = (8, 16, 28, 32, 48, 64, 96, 128, 160, 192, 224, 240, 256, 299, 320, 384, 480, 512, 518)
# Arguments that make a model smaller, so that it takes smaller images.
_LESS: Final = {"aux_logits": False}
_FAILURES: Final = (RuntimeError, ValueError, AssertionError, TypeError, IndexError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The settings of a model and its data set, from the section ``train`` of the job."""

    model_name: str
    model_args: Mapping[str, Any]
    dataset: str
    classes: int


def check_model_input(fit: Fit, model: nn.Module, inputs: Tensor, precision: Precision) -> tuple[str, ...]:
    """Run two samples through the model: forward in evaluation mode, forward and backward in training mode.

    Buffers are restored and gradients cleared; the model is left in training mode.

    Args:
        fit: the settings, for the error messages.
        model: the model on its device.
        inputs: two samples on the device.
        precision: the precision of the forward.

    Returns:
        Names of the parameters that get no gradient.

    Raises:
        ModelError: a torchvision model does not take the input, or the outputs do not fit the loss.
        UserCodeError: the user's model raised.
    """
    try:
        with buffers_restored(model):
            _try(fit, model, inputs, precision)
    except torch.OutOfMemoryError:
        raise
    except ModelError:
        raise
    except Exception as error:
        if is_reference(fit.model_name):
            raise UserCodeError(
                f"train.model is {fit.model_name}, which failed on two samples of dataset {fit.dataset}, a tensor of "
                f"shape {tuple(inputs.shape)}: {describe(error)}; make it take them, or give it other data",
                traceback=traceback.format_exc(),
            ) from error
        raise ModelError(
            f"train.model is {fit.model_name}, which does not take the {_shape(inputs)} images of dataset "
            f"{fit.dataset} ({describe(error)}); {_advice(fit, inputs)}"
        ) from error
    unused = tuple(name for name, parameter in model.named_parameters() if _is_unused(parameter))
    model.zero_grad(set_to_none=True)
    return unused


def _is_unused(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.grad is None


def _try(fit: Fit, model: nn.Module, inputs: Tensor, precision: Precision) -> None:
    model.eval()
    with torch.no_grad(), precision.autocast():
        check_outputs(fit.model_name, model(inputs), len(inputs), fit.classes)
    model.train()
    with precision.autocast():
        outputs = model(inputs)
        check_outputs(fit.model_name, outputs, len(inputs), fit.classes)
        loss = zero_loss(outputs)
    torch.autograd.backward(loss)


def _shape(inputs: Tensor) -> str:
    return " x ".join(str(size) for size in inputs.shape[1:])


def _advice(fit: Fit, inputs: Tensor) -> str:
    """Return what would work; every advice has been tried on meta tensors."""
    if inputs.ndim != IMAGE_DIMENSIONS:
        return "torchvision's models take images of shape channels x height x width; give it those"
    channels = inputs.shape[1]
    side = int(inputs.shape[-1])
    for name, value in (("image_size", side), ("input_size", [side, side]), *_LESS.items()):
        if _works(fit, {**fit.model_args, name: value}, channels=channels, side=side):
            return f"set train.model_args.{name} to {_yaml(value)}"
    sizes = []
    smallest = _smallest_side(fit, fit.model_args, channels=channels)
    if smallest is not None:
        sizes.append(f"{smallest} x {smallest}")
    for name, value in _LESS.items():
        less = _smallest_side(fit, {**fit.model_args, name: value}, channels=channels)
        if less is not None and (smallest is None or less < smallest):
            sizes.append(f"{less} x {less} with train.model_args.{name} {_yaml(value)}")
    if not sizes:
        return "use another model, or other images"
    return f"the smallest images that it takes are {', or '.join(sizes)}: use another model, or larger images"


def _yaml(value: object) -> str:
    return json.dumps(value)


def _smallest_side(fit: Fit, arguments: Mapping[str, Any], *, channels: int) -> int | None:
    """Return the smallest side that works: the first in ``_SIDES``, then bisection down to the one before it."""
    too_small = 0
    for side in _SIDES:
        if _works(fit, arguments, channels=channels, side=side):
            break
        too_small = side
    else:
        return None
    while side - too_small > 1:
        middle = (too_small + side) // 2
        if _works(fit, arguments, channels=channels, side=middle):
            side = middle
        else:
            too_small = middle
    return side


def _works(fit: Fit, arguments: Mapping[str, Any], *, channels: int, side: int) -> bool:
    """Return whether a model with these arguments takes images of this side; tried on the meta device."""
    try:
        with torch.device("meta"), torch.no_grad():
            model = build_model(fit.model_name, arguments, fit.classes)
            inputs = torch.empty(2, channels, side, side)
            model.eval()(inputs)
            model.train()(inputs)
    except (ModelError, *_FAILURES):
        return False
    return True
