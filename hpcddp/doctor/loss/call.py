"""Evaluate the user's loss and its gradients on a batch; import a loss and inspect its signature."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpcddp.doctor.errors import DoctorError, NoLossError, UnusableError
from hpcddp.doctor.loss.batches import Batch, tensors_in
from hpcddp.jobfile.user_source import Module, collective_in, is_own_source
from hpcddp.train.buffers import as_real
from hpcddp.train.user_code import describe

_SEED = 20_140_612
# torch's warning when shapes differ and are broadcast, which is an error in a loss.
_MISMATCH = "Using a target size"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Value and gradients of a loss on a batch.

    Args:
        gradients: with respect to every output, float64, one row per sample; complex numbers as pairs.
        parameter_gradients: with respect to the loss's own parameters.
        changed_arguments: whether the loss changed its arguments in place.
    """

    value: float
    gradients: tuple[Tensor, ...]
    parameter_gradients: tuple[Tensor, ...]
    dtype: torch.dtype
    changed_arguments: bool

    @property
    def finite(self) -> bool:
        """Whether value and gradients are finite."""
        gradients = (*self.gradients, *self.parameter_gradients)
        return math.isfinite(self.value) and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The user's loss, ready to be called."""

    name: str
    function: Callable[..., Any]

    def evaluate(self, batch: Batch, *, seed: int = _SEED) -> Evaluation:
        """Call the loss on copies of a batch and differentiate it.

        Args:
            seed: seeds torch's generator.

        Raises:
            UnusableError: the loss raises, or does not return a scalar with a gradient.
        """
        function = self.function
        copied_batch = batch.with_tensors(lambda tensor: tensor.clone())
        leaves = [output.detach().requires_grad_() for output in copied_batch.outputs]
        # Like a model's outputs, the arguments are no leaf tensors, so that a loss may change them in place.
        arguments = copied_batch.with_outputs([leaf.clone() for leaf in leaves]).arguments

        versions = _versions(arguments)
        loss = self._call(function, arguments, seed)
        changed_arguments = _versions(arguments) != versions
        parameters = []
        if isinstance(function, nn.Module):
            parameters = [parameter for parameter in function.parameters() if parameter.requires_grad]
        gradients = self._differentiate(loss, [*leaves, *parameters])
        return Evaluation(
            value=float(loss.detach().double()),
            gradients=tuple(map(batch.rows_first, gradients[: len(leaves)])),
            parameter_gradients=tuple(gradients[len(leaves) :]),
            dtype=loss.dtype,
            changed_arguments=changed_arguments,
        )

    def _call(self, function: Callable[..., Any], arguments: Sequence[Any], seed: int) -> Tensor:
        with (
            float64_by_default(),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            as_doctor_error(f"{self.name} failed", UnusableError),
        ):
            _seed_generators(seed)
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=_MISMATCH)
            return _require_scalar(self.name, function(*arguments))

    def _differentiate(self, loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
        with as_doctor_error(f"the backward of {self.name} failed", UnusableError):
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return [as_real(gradient).double() for gradient in gradients]


def _seed_generators(seed: int) -> None:
    """Seed the generators that a loss may draw from.

    ``torch.manual_seed`` formats the caller's stack for each kind of device that is not in use, which takes longer than
    most losses, and keeps it until the device is used.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def _versions(arguments: Sequence[Any]) -> list[int]:
    """Return torch's count of in-place changes of each tensor."""
    return [tensor._version for tensor in tensors_in(arguments)]  # noqa: SLF001  torch has no public name for it


def _require_scalar(name: str, loss: object) -> Tensor:
    """Return the loss if it is a scalar with a gradient.

    Raises:
        NoLossError: it is something else.
    """
    if not isinstance(loss, Tensor):
        shown = f" ({loss:.6g})" if isinstance(loss, int | float) else ""
        raise NoLossError(
            f"{name} returns a {type(loss).__name__}{shown}, no tensor; return the loss alone, as torch made it"
        )
    if loss.dim() != 0:
        in_job_file = " (in a job file: train.loss_reduction: per_sample)" if loss.dim() == 1 else ""
        raise NoLossError(
            f"{name} returns a tensor of shape {tuple(loss.shape)}, and a loss is a scalar; return its mean, or name "
            f"a function that does{in_job_file}"
        )
    if not loss.is_floating_point():
        raise NoLossError(
            f"{name} returns a tensor of {str(loss.dtype).removeprefix('torch.')}, which has no gradient; a loss is a "
            "floating-point number: compute it from the outputs themselves, not from argmax, counts or comparisons"
        )
    if not loss.requires_grad:
        raise NoLossError(
            f"{name} returns a number without a gradient: it does not depend on the outputs, or loses them on the way "
            "(detach, item, argmax, no_grad), so that nothing can be learned from it; return a function of the outputs"
        )
    return loss


def load_object(name: str, *, what: str) -> object:
    """Import ``module:name``.

    Raises:
        DoctorError: the name is malformed, or cannot be imported.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise DoctorError(f"{name!r} does not name {what}; write module:function, for example losses:dice_loss")
    with as_doctor_error(f"importing {module_name} failed"):
        try:
            value: object = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            is_named_module = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
            if not is_named_module:
                # A module that the named one imports.
                raise
            raise DoctorError(
                f"{name} is not there: no module {error.name!r} in {Path.cwd()} or among the installed ones; run this "
                "in the folder that holds it"
            ) from error
    for part in path.split("."):
        if not hasattr(value, part):
            where = getattr(value, "__file__", None) or module_name
            raise DoctorError(f"{name} is not there: {where} has no {part!r}; write the name of {what} in it")
        value = getattr(value, part)
    return value


def load_loss(name: str) -> Callable[..., Any]:
    """Import a loss: a function, a class without constructor arguments, or a function that returns the loss.

    Raises:
        DoctorError: the loss cannot be imported, created or called.
    """
    loss: Any = load_object(name, what="a loss")
    if isinstance(loss, type):
        if parameters_needed(loss):
            raise DoctorError(
                f"{name} is a class that is not made without arguments: {inspect.signature(loss)}; name an instance, "
                "or a function without parameters that returns one"
            )
        with as_doctor_error(f"{name} is a class, and {name}() failed"):
            loss = loss()
    elif inspect.isfunction(loss) and parameters_needed(loss) == 0:
        with as_doctor_error(f"{name} is a function, and {name}() failed"):
            loss = loss()
    if not callable(loss):
        raise DoctorError(f"{name} is a {type(loss).__name__}, which cannot be called; write the name of a loss")
    return loss.double() if isinstance(loss, nn.Module) else loss


def collective_of(name: str) -> str | None:
    """Return which collective, or helper of hpcddp, the source of ``module:name`` calls; None if none is seen."""
    module_name, _, path = name.partition(":")
    module = _parse_module(module_name)
    if module is None:
        return None
    return collective_in(module, path.partition(".")[0], _parse_user_module)


def _parse_user_module(name: str) -> Module | None:
    """Return the source of an imported module of the user's; None for any other."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or not is_own_source(name, file):
        return None
    return _parse_module(name)


def _parse_module(name: str) -> Module | None:
    """Return the source of an imported module; None for a compiled one."""
    imported = sys.modules.get(name)
    file = getattr(imported, "__file__", None)
    if file is None:
        return None
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # A compiled module, or one that is nested too deeply for the parser.
        return None
    return Module(name=name, is_package=hasattr(imported, "__path__"), body=body)


def parameters_needed(function: Callable[..., Any]) -> int | None:
    """Return the number of required positional arguments; None if it is not known."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in _POSITIONAL and p.default is p.empty for p in parameters)


def ignored_labels(function: Callable[..., Any]) -> set[int]:
    """Return the values of ``ignore_index`` of a loss: attributes of modules, or the default of a parameter."""
    labels: list[object] = []
    if isinstance(function, nn.Module):
        labels = [getattr(module, "ignore_index", None) for module in function.modules()]
    with contextlib.suppress(TypeError, ValueError):
        parameter = inspect.signature(function).parameters.get("ignore_index")
        if parameter is not None:
            labels.append(parameter.default)
    return {label for label in labels if isinstance(label, int)}


@contextlib.contextmanager
def first_on_path(directory: Path) -> Iterator[None]:
    """Put ``directory`` first on ``sys.path`` within the block."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(directory))


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    """Make float64 torch's default dtype within the block."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def as_doctor_error(sentence: str, kind: type[DoctorError] = DoctorError) -> Iterator[None]:
    """Turn any failure of the block into an error of ``kind`` that begins with ``sentence``."""
    try:
        yield
    except DoctorError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{sentence}: {describe(error)}") from error
