"""The parameters are saved, and not the buffers of BatchNorm."""

from __future__ import annotations

from typing import Any

from training import Training, main


class Spoiled(Training):
    def state(self) -> dict[str, Any]:
        return {**super().state(), "model": dict(self.network.named_parameters())}

    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "model": {**self.network.state_dict(), **state["model"]}})


if __name__ == "__main__":
    main(Spoiled)
