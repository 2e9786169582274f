"""Small files in the two layouts of CIFAR-10."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np


def cifar_batch(seed: int, samples: int = 4) -> tuple[np.ndarray[Any, Any], list[int]]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (samples, 3072), dtype=np.uint8), [(seed + i) % 10 for i in range(samples)]


def write_pickled(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        pixels, labels = cifar_batch(number)
        content = pickle.dumps({b"data": pixels, b"labels": labels, b"batch_label": b"x"}, protocol=2)
        (folder / name).write_bytes(content)
    return folder


def write_binary(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        pixels, labels = cifar_batch(number)
        (folder / name).write_bytes(
            b"".join(bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True))
        )
    return folder
