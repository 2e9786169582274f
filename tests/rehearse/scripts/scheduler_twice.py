"""The scheduler is a step ahead after a resumption: https://github.com/Lightning-AI/pytorch-lightning/issues/1772."""

from __future__ import annotations

from typing import Any

from training import Training, main


class Spoiled(Training):
    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.scheduler.step()


if __name__ == "__main__":
    main(Spoiled)
