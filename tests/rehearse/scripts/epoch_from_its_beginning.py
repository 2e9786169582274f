"""The samples of an epoch begin anew: https://github.com/mozilla/DeepSpeech/issues/611."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from training import BATCH, Training, main


class Spoiled(Training):
    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in self.epochs():
            indices = self.indices(epoch)
            for step in range(self.steps_per_epoch - self.first_step_of(epoch)):
                chosen = indices[step * BATCH : (step + 1) * BATCH]
                yield self.inputs[chosen], self.targets[chosen]


if __name__ == "__main__":
    main(Spoiled)
