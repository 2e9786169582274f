"""A script for Hugging Face's accelerate. It runs under hpcddp without changes.

hpcddp submit --nodes 2 --tasks-per-node 2 --time 10min -- python examples/accelerate_script.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sklearn import datasets
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def main() -> None:
    """Train a small network on handwritten digits."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    digits = datasets.load_digits()
    data = TensorDataset(torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(data, batch_size=16, shuffle=True))
    for epoch in range(EPOCHS):
        correct = torch.zeros((), device=accelerator.device)
        for images, labels in loader:
            scores = model(images)
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(scores, labels))
            optimizer.step()
            correct += (scores.argmax(1) == labels).sum()
        accuracy = accelerator.reduce(correct).item() / len(data)
        rank, ranks = accelerator.process_index, accelerator.num_processes
        print(f"rank {rank} of {ranks}: epoch {epoch}, accuracy {accuracy:.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
