"""The random generators are seeded anew, and not restored: https://github.com/ai2cm/ace/issues/690."""

from __future__ import annotations

from typing import Any

from training import Training, main


class Spoiled(Training):
    def load(self, state: dict[str, Any]) -> None:
        super().load({**state, "generators": []})


if __name__ == "__main__":
    main(Spoiled)
