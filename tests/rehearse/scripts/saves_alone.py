"""At the signal rank 0 waits for the other ranks, which have left, and saves nothing."""

from __future__ import annotations

import os

import torch.distributed as dist
from training import Training, main


class Spoiled(Training):
    def tell_to_stop(self, *_: object) -> None:
        if self.rank > 0:
            os._exit(0)
        dist.barrier()
        super().tell_to_stop()

    def save(self) -> None:
        if self.is_told_to_stop:
            super().save()


if __name__ == "__main__":
    main(Spoiled)
