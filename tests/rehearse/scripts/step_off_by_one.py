"""The step of the checkpoint is counted once more: https://github.com/verl-project/verl/issues/7933."""

from __future__ import annotations

from typing import Any

from training import Training, main


class Spoiled(Training):
    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "step": state["step"] + 1})


if __name__ == "__main__":
    main(Spoiled)
