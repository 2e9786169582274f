"""Compare the values of two runs by name: of N ranks and one process, of a run with a fault and one without."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Values = Mapping[str, "torch.Tensor | float"]
    """Tensors and numbers by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A value that two runs do not share.

    Args:
        largest: the largest absolute difference, computed in float64; infinite if the shapes differ or one is not
            finite.
        size: the largest absolute value of the first run; 1 where that is 0.
    """

    name: str
    largest: float
    size: float

    @property
    def relative(self) -> float:
        """The largest difference over the largest value."""
        return self.largest / self.size


def differences(reference: Values, other: Values) -> Iterator[TensorDifference]:
    """Yield each value of the first run that the other one does not share."""
    for name, value in reference.items():
        largest = _largest_difference(value, other[name]) if name in other else math.inf
        if largest > 0:
            yield TensorDifference(name=name, largest=largest, size=_size_of(value))


def _size_of(value: torch.Tensor | float) -> float:
    """Return the largest absolute value; 1 where that is 0, or there is none."""
    import torch

    tensor = torch.as_tensor(value)
    size = float(tensor.abs().max()) if tensor.numel() else 0.0
    return size or 1.0


def _largest_difference(one: torch.Tensor | float, other: torch.Tensor | float) -> float:
    import torch

    tensors = [torch.as_tensor(value) for value in (one, other)]
    if tensors[0].shape != tensors[1].shape:
        return math.inf
    if torch.equal(*tensors):
        return 0.0
    kind = torch.complex128 if any(tensor.is_complex() for tensor in tensors) else torch.float64
    first, second = (tensor.to(kind) for tensor in tensors)
    # Equal infinities have no difference that is a number.
    apart = (first - second).abs()[first != second]
    largest = 0.0 if apart.numel() == 0 else float(apart.max())
    return largest if math.isfinite(largest) else math.inf
