"""The handler of the signal ends the program with exit code 0, and only the end of the training is saved."""

from __future__ import annotations

import os

from training import EPOCHS, Training, main


class Spoiled(Training):
    def tell_to_stop(self, *_: object) -> None:
        os._exit(0)

    def save(self) -> None:
        if self.step == self.steps_per_epoch * EPOCHS:
            super().save()


if __name__ == "__main__":
    main(Spoiled)
