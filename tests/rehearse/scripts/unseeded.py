"""The order of the samples is another one at each start: no generator is seeded."""

from __future__ import annotations

import random

from training import Training, main


class Spoiled(Training):
    def indices(self, epoch: int) -> list[int]:
        indices = super().indices(epoch)
        random.shuffle(indices)
        return indices


if __name__ == "__main__":
    main(Spoiled)
