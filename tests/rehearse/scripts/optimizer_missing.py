"""The state of the optimizer is not saved: https://github.com/NVlabs/stylegan2-ada-pytorch/issues/108."""

from __future__ import annotations

from typing import Any

from training import Training, main


class Spoiled(Training):
    def state(self) -> dict[str, Any]:
        state = super().state()
        del state["optimizer"]
        return state

    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "optimizer": self.optimizer.state_dict()})


if __name__ == "__main__":
    main(Spoiled)
