"""Measure how many images of a folder one core reads, beside torchvision's usual pipeline.

    python -m benchmarks.data [--rounds 9] [--output FILE]

JPEG files of 500 x 375 pixels, cut from the two photographs of scikit-learn, become training batches of 224 x 224:
a random resized crop, a random flip, normalisation. ``decode`` only reads and decodes the files. Times are CPU seconds
per image, on one thread.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks.turns import Case, in_turn, main
from hpcddp.jobfile.sections import Train
from hpcddp.train.data.loader import Batches, Placement
from hpcddp.train.data.opening import open_data
from hpcddp.train.randomness import SampleKeys

IMAGES: Final = 64
BATCH: Final = 32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def write_images(directory: Path, images: int = IMAGES) -> None:
    """Write so many files of the training part, and two to validate."""
    photographs = load_sample_images().images
    generator = np.random.default_rng(0)
    for split, count in (("train", images), ("val", 2)):
        for number in range(count):
            photograph = photographs[number % 2]
            left, top = int(generator.integers(140)), int(generator.integers(52))
            folder = directory / split / f"class-{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(photograph).crop((left, top, left + 500, top + 375))
            image.save(folder / f"{number:03}.jpg", quality=90)


def per_image(read: Callable[[], object]) -> float:
    """Return the CPU milliseconds per image."""
    began = time.process_time()
    read()
    return (time.process_time() - began) / IMAGES * 1e3


def cases(rounds: int) -> Iterator[Case]:
    """Yield the comparison."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        write_images(Path(directory))
        data = open_data(Train(model="resnet18", dataset="imagefolder", data_dir=directory))
        placement = Placement(torch.device("cpu"), torch.float32, channels_last=False)
        epochs = itertools.count()

        def ours() -> None:
            epoch = next(epochs)
            keys = [
                SampleKeys(seed=0, split="train", epoch=epoch, indices=range(first, first + BATCH))
                for first in range(0, IMAGES, BATCH)
            ]
            for _ in Batches(data, data.train, keys, placement, workers=0):
                pass

        usual = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )
        loader = DataLoader(ImageFolder(f"{directory}/train", usual), batch_size=BATCH)

        def theirs() -> None:
            for _ in loader:
                pass

        def decode() -> None:
            for path, _ in data.train.samples:
                with Image.open(path) as image:
                    image.load()

        ways = {"hpcddp": ours, "torchvision": theirs, "decode": decode}
        yield in_turn(
            "image of 500 x 375 pixels to 224 x 224",
            {name: lambda way=way: per_image(way) for name, way in ways.items()},  # type: ignore[misc]
            base="torchvision",
            unit="ms of CPU",
            rounds=rounds,
        )


if __name__ == "__main__":
    main("benchmarks.data", __doc__, cases, rounds=9)
