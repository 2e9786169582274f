"""A script for Lightning. It runs under hpcddp without changes: Lightning uses the ranks that Slurm and hpcddp set.

    hpcddp submit --nodes 2 --tasks-per-node 2 --time 10min -- python examples/lightning_script.py --nodes 2 --devices 2

hpcddp sends Lightning SIGUSR1 before the job ends. Lightning then saves, requeues the job, and resumes by itself.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from sklearn import datasets
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    """A small network for handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the loss of a batch ``[B, 64]`` with labels ``[B]``."""
        images, labels = batch
        scores = self.layers(images)
        self.log("accuracy", (scores.argmax(1) == labels).float().mean(), on_epoch=True, sync_dist=True)
        return functional.cross_entropy(scores, labels)

    def configure_optimizers(self) -> optim.Optimizer:
        """Return the optimizer."""
        return optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def main() -> None:
    """Train for a few epochs."""
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits with Lightning.")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    lightning.seed_everything(0)
    digits = datasets.load_digits()
    data = TensorDataset(torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target))
    trainer = lightning.Trainer(
        num_nodes=options.nodes,
        devices=options.devices,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(data, batch_size=16, shuffle=True))
    accuracy = trainer.callback_metrics["accuracy"].item()
    print(f"rank {trainer.global_rank} of {trainer.world_size}: accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
