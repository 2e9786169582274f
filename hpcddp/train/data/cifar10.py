"""CIFAR-10 from local files, read and augmented by torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcddp.packages import require
from hpcddp.train.errors import DataError

_FOLDER = "cifar-10-batches-py"
# Of the training part, per channel.
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2470, 0.2435, 0.2616)


def load(*, data_dir: Path, augment: bool) -> tuple[Any, Any]:
    """Return the training part (50,000 images) and the test part (10,000), as 3 x 32 x 32.

    Args:
        data_dir: ``cifar-10-batches-py``, or the folder that holds it.
        augment: whether training images are cropped and flipped at random, as He et al. 2015 (arXiv 1512.03385,
            section 4.2) do.

    Raises:
        DataError: a file is missing, cannot be read, or has another content than the published one.
    """
    require("train.dataset: cifar10", "torchvision")
    from torchvision import datasets, transforms

    usual = [transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)]
    random = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] if augment else []
    root = data_dir.parent if data_dir.name == _FOLDER else data_dir
    try:
        return (
            datasets.CIFAR10(str(root), train=True, transform=transforms.Compose([*random, *usual])),
            datasets.CIFAR10(str(root), train=False, transform=transforms.Compose(usual)),
        )
    # torchvision compares each file with its published digest before it reads it.
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"train.data_dir is {data_dir}, and the files of {_FOLDER} there are missing, unreadable or damaged "
            f"({error}); unpack cifar-10-python.tar.gz there"
        ) from error
