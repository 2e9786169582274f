"""Evaluate the user's loss and its gradients on batches: plain ones, or the user's own, and their splits over ranks."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not marked so
from torch.utils._python_dispatch import TorchDispatchMode

from hpcddp.batch.split import divide
from hpcddp.doctor.errors import CannotJudgeError, DoctorError, NoLossError, UnusableError
from hpcddp.train.buffers import as_real
from hpcddp.train.user_code import describe

_PAIR: Final = 2  # (outputs, targets)
# A loss of one sample may be undefined (a variance, a comparison of samples), and few trainings have such a share.
_SMALLEST_SHARE: Final = 2
_SEEDS: Final = (0, 1)
_CLASSES: Final = 10
_VALUES: Final = 12
_SIDE: Final = 6  # height and width of a map


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The arguments of a loss.

    Args:
        data: what they are, for the report.
        arguments: outputs first, then targets; trees of tensors in tuples, lists and mappings.
        samples: n.
        dimension: the dimension of the outputs that counts samples; 1 for outputs ``[T, n, C]``.
    """

    data: str
    arguments: tuple[Any, ...]
    samples: int
    dimension: int = 0

    def part(self, rows: Tensor) -> Batch:
        """Return the batch of some samples: those rows of every tensor and list with one entry per sample.

        Args:
            rows: indices of the samples in their new order, int64.
        """
        # If both dimensions have n entries, the first one of these counts samples.
        of_outputs = partial(self._select_rows, rows=rows, dimensions=(self.dimension, 0))
        of_targets = partial(self._select_rows, rows=rows, dimensions=(0, self.dimension))
        outputs, *targets = self.arguments
        arguments = (map_tree(outputs, of_outputs), *(map_tree(target, of_targets) for target in targets))
        return replace(self, arguments=arguments, samples=len(rows))

    def _select_rows(self, leaf: object, *, rows: Tensor, dimensions: tuple[int, int]) -> object:
        if isinstance(leaf, Tensor):
            for dimension in dimensions:
                if self._counts_samples(leaf, dimension):
                    return leaf.index_select(dimension, rows)
        if isinstance(leaf, list) and len(leaf) == self.samples:
            return [leaf[row] for row in rows.tolist()]
        return leaf

    def _counts_samples(self, tensor: Tensor, dimension: int) -> bool:
        return tensor.dim() > dimension and tensor.shape[dimension] == self.samples

    def to(self, dtype: torch.dtype) -> Batch:
        """Return the batch with its floating-point tensors in ``dtype``."""

        def convert(leaf: object) -> object:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return replace(self, arguments=tuple(map_tree(argument, convert) for argument in self.arguments))

    def rows_first(self, output: Tensor) -> Tensor:
        """Return an output, or its gradient, with the samples in dimension 0."""
        if self._counts_samples(output, self.dimension):
            return output.movedim(self.dimension, 0)
        return output

    def describe(self) -> str:
        """Return the shapes, such as ``outputs [32, 10], targets [32]``."""
        shapes = [", ".join(str(list(tensor.shape)) for tensor in tensors_in(tree)) for tree in self.arguments]
        outputs, *targets = shapes
        if targets:
            return f"outputs {outputs}, targets {', '.join(targets)}"
        return f"outputs {outputs}"


def map_tree(tree: object, function: Callable[[object], object]) -> object:
    """Return the tree with ``function`` applied to its leaves and lists.

    If ``function`` returns a list unchanged, its entries are mapped too.
    """
    if isinstance(tree, Mapping):
        return {key: map_tree(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple):
        values = [map_tree(value, function) for value in tree]
        if hasattr(tree, "_fields"):
            # A named tuple takes its values one by one.
            return cast("Callable[..., object]", type(tree))(*values)
        return tuple(values)
    result = function(tree)
    if isinstance(tree, list) and result is tree:
        return [map_tree(value, function) for value in tree]
    return result


def tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    tensors: list[Tensor] = []

    def collect(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        return leaf

    map_tree(tree, collect)
    return tensors


def plain_batches(samples: int) -> Iterator[Batch]:
    """Yield a random batch of each plain kind: classification, maps, regression."""
    g = Generator().manual_seed(0)
    labels = torch.randint(0, _CLASSES, (samples,), generator=g)
    yield Batch(
        data="logits and class indices",
        arguments=(torch.randn(samples, _CLASSES, generator=g), labels),
        samples=samples,
    )
    shape = (samples, 1, _SIDE, _SIDE)
    yield Batch(
        data="logits and 0/1 masks",
        arguments=(
            torch.randn(shape, generator=g),
            torch.randint(0, 2, shape, generator=g).to(torch.get_default_dtype()),
        ),
        samples=samples,
    )
    values = torch.randn(samples, _VALUES, generator=g)
    yield Batch(
        data="values and values",
        arguments=(values, values + 0.5 * torch.randn(samples, _VALUES, generator=g)),
        samples=samples,
    )


def make_batch(given: object, *, name: str, arguments: int | None, dimension: int) -> Batch:
    """Return the user's ``(outputs, targets)``, or all arguments of a loss of more, as a batch.

    Args:
        given: what the user gives.
        name: where it comes from, for messages.
        arguments: how many the loss takes; None = unknown, taken for two.
        dimension: the dimension of the outputs that counts samples.

    Raises:
        DoctorError: there are fewer or more, or the outputs have no floating-point tensor with that dimension.
    """
    needed = max(_PAIR, arguments or _PAIR)
    if not isinstance(given, tuple | list) or len(given) != needed:
        refusal = f"{name} gives a {type(given).__name__} and not"
        if needed == _PAIR:
            raise DoctorError(f"{refusal} a pair; return (outputs, targets)")
        raise DoctorError(f"{refusal} the {needed} arguments of the loss; return them in a tuple, outputs first")
    outputs = [tensor for tensor in tensors_in(given[0]) if tensor.is_floating_point() and tensor.dim()]
    if not outputs:
        raise DoctorError(
            f"{name} gives outputs without a floating-point tensor of at least one dimension; return what the model "
            "returns, with one row per sample"
        )
    if outputs[0].dim() <= dimension:
        raise DoctorError(
            f"--batch-dim is {dimension}, and {name} gives outputs of shape {tuple(outputs[0].shape)}, which have "
            f"{outputs[0].dim()} dimensions; write the one, counted from 0, that counts samples"
        )
    # A loss of one argument takes the outputs alone.
    taken = given[:1] if arguments == 1 else given
    samples = outputs[0].shape[dimension]
    return Batch(data=f"your own, {name}", arguments=tuple(taken), samples=samples, dimension=dimension)


Split: TypeAlias = Sequence[Tensor]
"""A split of a batch over ranks: the samples of each rank, int64."""


def judged_splits(samples: int, world_size: int) -> Iterator[Split]:
    """Yield the splits on which a loss is judged, the one of the batch contract (shares of equal size) first.

    Some splits have one share: all samples in another order.
    """
    in_order = torch.arange(samples)
    yield torch.split(in_order, list(divide(samples, world_size)))
    for seed in _SEEDS:
        g = Generator().manual_seed(seed)
        sizes = _uneven_sizes(samples, world_size, g)
        permuted = torch.randperm(samples, generator=g)
        yield (permuted,)
        yield torch.split(in_order, sizes)
        yield torch.split(permuted, sizes)


def _uneven_sizes(samples: int, ranks: int, g: Generator) -> list[int]:
    """Return random sizes that add up to ``samples``, each at least 2 where there are enough samples."""
    smallest = min(_SMALLEST_SHARE, samples // ranks)
    remaining = samples - smallest * ranks
    owners = torch.randint(0, ranks, (remaining,), generator=g)
    # The first rank takes half of the remaining samples, so that the sizes are never even.
    owners[: remaining // 2] = 0
    return [smallest + int((owners == rank).sum()) for rank in range(ranks)]


_SEED: Final = 20_140_612
# torch's warning when shapes differ and are broadcast, which is an error in a loss.
_MISMATCH: Final = "Using a target size"
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Value and gradients of a loss on a batch.

    Args:
        gradients: with respect to every output, float64, one row per sample; complex numbers as pairs.
        parameter_gradients: with respect to the loss's own parameters.
        dtype: of the value as the loss returns it.
    """

    value: float
    gradients: tuple[Tensor, ...]
    parameter_gradients: tuple[Tensor, ...]
    dtype: torch.dtype

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
        """Call the loss on a copy of a batch and differentiate it.

        Args:
            seed: seeds torch's generator.

        Raises:
            UnusableError: the loss raises, or does not return a scalar with a gradient.
        """
        leaves: list[Tensor] = []

        def copy_output(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                return leaf
            leaves.append(leaf.detach().clone().requires_grad_())
            # Like a model's output it is no leaf, so that a loss may change it in place.
            return leaves[-1].clone()

        outputs, *targets = batch.arguments
        arguments = [map_tree(outputs, copy_output), *(map_tree(target, _copy_tensor) for target in targets)]
        parameters = []
        if isinstance(self.function, nn.Module):
            parameters = [parameter for parameter in self.function.parameters() if parameter.requires_grad]
        with (
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            as_doctor_error(f"{self.name} failed", UnusableError),
        ):
            torch.manual_seed(seed)
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=_MISMATCH)
            loss = _require_scalar(self.name, self.function(*arguments))
            found = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True, materialize_grads=True)
        gradients = [as_real(gradient).double() for gradient in found]
        return Evaluation(
            value=float(loss.detach().double()),
            gradients=tuple(map(batch.rows_first, gradients[: len(leaves)])),
            parameter_gradients=tuple(gradients[len(leaves) :]),
            dtype=loss.dtype,
        )

    def refuse_collectives(self, batch: Batch) -> None:
        """Refuse a loss that calls a collective, in which all ranks take part.

        Raises:
            CannotJudgeError: it does.
        """
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            with _CollectivesRefused():  # type: ignore[no-untyped-call]  # torch leaves its base class without types
                self.evaluate(batch)
        except UnusableError as error:
            if isinstance(error.__cause__, _CollectiveError):
                raise CannotJudgeError(
                    f"{self.name} calls a collective, in which all ranks take part, so one process cannot judge it; "
                    "write train.loss_reduction: global, and check it with hpcddp doctor ddp JOB"
                ) from None
        finally:
            dist.destroy_process_group()


class _CollectiveError(Exception):
    """A collective was called."""


class _CollectivesRefused(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as above
    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  of any operation
        if function.namespace == "c10d":
            raise _CollectiveError
        return function(*args, **(kwargs or {}))


def _copy_tensor(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _require_scalar(name: str, loss: object) -> Tensor:
    """Return the loss if it is a scalar with a gradient.

    Raises:
        NoLossError: it is something else.
    """
    if not isinstance(loss, Tensor):
        raise NoLossError(f"{name} returns a {type(loss).__name__}, no tensor; return the loss alone, as torch made it")
    if loss.dim() != 0:
        in_job_file = " (in a job file: train.loss_reduction: per_sample)" if loss.dim() == 1 else ""
        raise NoLossError(
            f"{name} returns a tensor of shape {tuple(loss.shape)}, and a loss is a scalar; return its mean, or name "
            f"a function that does{in_job_file}"
        )
    if not loss.requires_grad:
        raise NoLossError(
            f"{name} returns a number without a gradient: it does not depend on the outputs, or loses them on the way "
            "(detach, item, argmax, counts, no_grad), so that nothing can be learned from it; return a function of the "
            "outputs"
        )
    return loss


def load_object(name: str, *, what: str) -> object:
    """Import ``module:name``.

    Raises:
        DoctorError: the name is malformed, or cannot be imported.
    """
    module_name, _, path = name.partition(":")
    if not (module_name and path):
        raise DoctorError(f"{name!r} does not name {what}; write module:function, for example losses:dice_loss")
    way_out = f"run this in the folder that holds the module, and write the name of {what} in it"
    with as_doctor_error(f"importing {name} failed ({way_out})"):
        value: object = importlib.import_module(module_name)
        for part in path.split("."):
            value = getattr(value, part)
    return value


def load_loss(name: str) -> Callable[..., Any]:
    """Import a loss: a function, a class without constructor arguments, or a function that returns the loss.

    Raises:
        DoctorError: the loss cannot be imported, created or called.
    """
    loss: Any = load_object(name, what="a loss")
    if isinstance(loss, type) or (inspect.isfunction(loss) and arguments_needed(loss) == 0):
        with as_doctor_error(f"{name}() failed, which should return the loss"):
            loss = loss()
    if not callable(loss):
        raise DoctorError(f"{name} is a {type(loss).__name__}, which cannot be called; write the name of a loss")
    return loss.double() if isinstance(loss, nn.Module) else loss


def arguments_needed(function: Callable[..., Any]) -> int | None:
    """Return the number of required positional arguments; None if it is not known."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in _POSITIONAL and p.default is p.empty for p in parameters)


@contextlib.contextmanager
def as_doctor_error(sentence: str, kind: type[DoctorError] = DoctorError) -> Iterator[None]:
    """Turn any failure of the block into an error of ``kind`` that begins with ``sentence``."""
    try:
        yield
    except DoctorError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{sentence}: {describe(error)}") from error
