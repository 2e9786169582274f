"""The sampler has the epoch of another start: https://github.com/huggingface/accelerate/issues/2823."""

from __future__ import annotations

from training import Training, main


class Spoiled(Training):
    def resume(self) -> None:
        super().resume()
        self.first_epoch = self.epochs().start

    def indices(self, epoch: int) -> list[int]:
        return super().indices(epoch - self.first_epoch)


if __name__ == "__main__":
    main(Spoiled)
