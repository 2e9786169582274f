"""The only checkpoint is written in place: https://github.com/Lightning-AI/pytorch-lightning/issues/688."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from training import Training, main


class Spoiled(Training):
    def write(self, state: dict[str, Any], path: Path) -> None:
        torch.save(state, path.with_name("checkpoint.pt") if path != self.final else path)

    def resume(self) -> None:
        path = self.directory / "checkpoint.pt"
        if path.exists():
            self.load(torch.load(path, weights_only=True))


if __name__ == "__main__":
    main(Spoiled)
