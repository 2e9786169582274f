"""The state of the gradient scaler is not saved: https://github.com/allenai/tango/issues/154."""

from __future__ import annotations

from typing import Any

from training import Training, main


class Spoiled(Training):
    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "scaler": self.scaler.state_dict()})


if __name__ == "__main__":
    main(Spoiled)
