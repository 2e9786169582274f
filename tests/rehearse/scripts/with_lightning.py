"""A right script for Lightning: it saves at the end of each epoch, and goes on from the newest file that loads."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hpcddp


class Classifier(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        loss = functional.cross_entropy(self.layers(inputs), targets)
        hpcddp.log({"loss": loss}, step=self.global_step + 1)
        time.sleep(0.15)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]


def newest_that_loads(directory: Path) -> str | None:
    """Return the newest checkpoint that can be loaded; None if there is none."""
    for path in sorted(directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(Exception):
            torch.load(path, weights_only=True)
            return str(path)
    return None


def main() -> None:
    """Train for a few epochs."""
    lightning.seed_everything(0)
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    directory = Path(os.environ["HPCDDP_RUN_DIR"], "lightning")
    trainer = lightning.Trainer(
        devices=int(os.environ["WORLD_SIZE"]),
        accelerator="cpu",
        strategy="ddp",
        max_epochs=6,
        logger=False,
        callbacks=[ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=8, shuffle=True), ckpt_path=newest_that_loads(directory))


if __name__ == "__main__":
    main()
