"""The averaged weights are not saved: https://github.com/ai2cm/ace/issues/349."""

from __future__ import annotations

from typing import Any

from training import Training, main


class Spoiled(Training):
    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "averaged": self.averaged.state_dict()})
        self.averaged.module.load_state_dict(self.network.state_dict())


if __name__ == "__main__":
    main(Spoiled)
