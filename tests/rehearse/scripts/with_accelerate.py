"""A right script for accelerate: it saves the state at the end of each epoch, and loads the newest one that it can."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hpcddp

EPOCHS = 6


def main() -> None:
    """Train a small network."""
    # Without it the order of an epoch follows from what was drawn before, and is another one after a resumption.
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=seedable)
    set_seed(0)
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    schedule = optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    data = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=8, shuffle=True)
    model, optimizer, data, schedule = accelerator.prepare(network, optimizer, data, schedule)
    directory = Path(os.environ["HPCDDP_RUN_DIR"], "states")
    first_epoch = 0
    for path in sorted(directory.glob("epoch-*"), reverse=True):
        with suppress(Exception):
            accelerator.load_state(str(path))
            first_epoch = int(path.name.removeprefix("epoch-")) + 1
            break
    for epoch in range(first_epoch, EPOCHS):
        data.set_epoch(epoch)
        for batch, (samples, targets) in enumerate(data):
            loss = functional.cross_entropy(model(samples), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            hpcddp.log({"loss": loss}, step=epoch * len(data) + batch + 1)
            time.sleep(0.15)
        temporary = directory / f".epoch-{epoch}"
        accelerator.save_state(str(temporary))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            # The state of this epoch may be there, damaged.
            shutil.rmtree(directory / f"epoch-{epoch}", ignore_errors=True)
            temporary.rename(directory / f"epoch-{epoch}")
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
