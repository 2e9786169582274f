"""Models and data sets that do what users' code does on a bad day."""

# ruff: noqa: ARG001  the arguments are what hpcddp passes

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.own_code import FewDigits, linear_model

NOT_A_FUNCTION = 3


class _Idle(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.used = linear_model(num_classes)
        self.idle = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.used(inputs)
        return outputs


class _Fatal(FewDigits):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index > 1:
            os._exit(3)
        return super().__getitem__(index)


class Samples:
    """A data set of given samples."""

    targets: list[int] | None = None

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def idle_parameters(num_classes: int) -> nn.Module:
    return _Idle(num_classes)


def fatal(split: str) -> FewDigits:
    kind = _Fatal if split == "train" else FewDigits
    return kind(split, 40, first=0, poison=None)


def fails(**arguments: Any) -> None:
    raise KeyError("my own mistake")


def gives_a_number(**arguments: Any) -> int:
    return 3


def no_parameters(num_classes: int) -> nn.Module:
    return nn.Flatten()


def wrong_outputs(num_classes: int) -> nn.Module:
    return linear_model(num_classes + 1)


def dictionary_outputs(num_classes: int) -> nn.Module:
    class Dictionary(nn.Linear):
        def forward(self, input: Tensor) -> Any:  # noqa: A002
            return {"logits": input}

    return Dictionary(2, 2)


def fails_on_digits(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(5, num_classes))


def no_pairs(split: str) -> Samples:
    return Samples([torch.zeros(3, 32, 32)] * 40)


def float_labels(split: str) -> Samples:
    return Samples([(torch.zeros(3, 32, 32), 0.5)] * 40)


def float_labels_of_val(split: str) -> Samples:
    return Samples([(torch.zeros(3, 32, 32), 0 if split == "train" else 0.5)] * 40)


def label_beyond(split: str) -> Samples:
    return Samples([(torch.zeros(3, 32, 32), 7)] * 40)


def late_label(split: str, label: int) -> Samples:
    return Samples([(torch.zeros(3, 32, 32), 0)] * 39 + [(torch.zeros(3, 32, 32), label)])


def unpicklable_state(num_classes: int) -> nn.Module:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> Any:
            return Samples([])

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input.flatten(1))

    return Stateful(3 * 32 * 32, num_classes)


def other_on_every_rank(split: str, samples: int) -> FewDigits:
    """Return data as a host might hold it whose files are not those of the other hosts."""
    rank = torch.distributed.get_rank() if split == "train" else 0
    return FewDigits(split, samples + rank, first=0, poison=None)


def labels_of_val_beyond(split: str) -> Samples:
    part = Samples([(torch.zeros(3, 32, 32), 0)] * 40)
    part.targets = [0 if split == "train" else 3] * 40
    return part


def two_shapes(split: str) -> Samples:
    return Samples([(torch.zeros(3, 32, 32), 0), (torch.zeros(3, 31, 32), 0)] * 20)


def failing_sample(split: str) -> Samples:
    class Failing(Samples):
        def __getitem__(self, index: int) -> Any:
            if index > 1:
                raise ValueError("sample is broken")
            return super().__getitem__(index)

    return Failing([(torch.zeros(3, 32, 32), 0)] * 40)


def empty(split: str) -> Samples:
    return Samples([])


def whole_numbers(split: str) -> Samples:
    """Return samples whose inputs are no floating numbers."""
    return Samples([(torch.full((4,), index % 3), index % 3) for index in range(20)])


def embedding(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(32, num_classes))
