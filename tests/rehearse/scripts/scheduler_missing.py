"""The scheduler begins anew: https://github.com/victoresque/pytorch-template/issues/68."""

from __future__ import annotations

from typing import Any

from training import Training, main


class Spoiled(Training):
    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "scheduler": self.scheduler.state_dict()})


if __name__ == "__main__":
    main(Spoiled)
