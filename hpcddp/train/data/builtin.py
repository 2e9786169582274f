"""The built-in data sets: handwritten digits, noise images, CIFAR-10 and a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpcddp.packages import require, require_folder
from hpcddp.train.errors import DataError
from hpcddp.train.randomness import GOLDEN, mix

if TYPE_CHECKING:
    from PIL.Image import Image

_EDGE = 8
_SCALE = 4  # 8 x 8 pixels become 32 x 32
_DIGITS_LEVELS = 16
# Of the training part.
_DIGITS_MEAN = 0.3052
_DIGITS_STD = 0.3763
_VALIDATION_STRIDE = 5


class Digits(Dataset[tuple[Tensor, int]]):
    """A part of the digits, in memory.

    Args:
        images: ``[N, 3, 32, 32]``, normalised.
        labels: ``[N]``.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.targets = labels
        self.classes = range(10)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image and its label."""
        return self.images[index], int(self.targets[index])


def load_digits() -> tuple[Digits, Digits]:
    """Return the training part (1,437 images) and the validation part (every fifth image, 360), as 3 x 32 x 32."""
    folder = require_folder("train.dataset: digits", "sklearn")
    # The import of scikit-learn, whose load_digits reads the same file, takes half as long as that of torch.
    table = torch.from_numpy(np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=","))
    labels = table[:, -1].long()
    small = table[:, :-1].reshape(-1, 1, _EDGE, _EDGE).float()
    small.sub_(torch.tensor(_DIGITS_MEAN).mul_(_DIGITS_LEVELS)).div_(torch.tensor(_DIGITS_STD).mul_(_DIGITS_LEVELS))
    # Repeating pixels is exact, so every host has the same bytes.
    large = small.repeat_interleave(_SCALE, dim=2).repeat_interleave(_SCALE, dim=3)
    images = large.expand(-1, 3, -1, -1).contiguous()
    held_out = torch.arange(len(labels)) % _VALIDATION_STRIDE == 0
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])


# Images are windows into one strip of noise, with this many different offsets.
_OFFSETS = 1 << 16
_SEED = 20_240_229


def load_synthetic(
    *, samples: int, val_samples: int, image_size: int, num_classes: int
) -> tuple[SyntheticImages, SyntheticImages]:
    """Return the training part and the validation part, which have other images."""
    train = SyntheticImages(samples, image_size=image_size, classes=num_classes)
    return train, SyntheticImages(val_samples, image_size=image_size, classes=num_classes, first=samples)


class SyntheticImages(Dataset[tuple[Tensor, int]]):
    """Noise images whose content and label are functions of the index; memory does not grow with their number.

    Args:
        samples: N >= 1.
        image_size: height and width.
        classes: K >= 1.
        first: the index of the first sample, which makes parts differ.
    """

    def __init__(self, samples: int, *, image_size: int, classes: int, first: int = 0) -> None:
        self.classes = range(classes)
        self._samples = samples
        self._size = image_size
        self._first = first
        generator = torch.Generator().manual_seed(_SEED)
        self._strip = torch.randn(3 * image_size * image_size + _OFFSETS, generator=generator)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image ``[3, image_size, image_size]``, float32, and its label."""
        word = int(mix(np.array([index + self._first], dtype=np.uint64) * GOLDEN)[0])
        start = word % _OFFSETS
        image = self._strip[start : start + 3 * self._size * self._size]
        return image.view(3, self._size, self._size), (word >> 32) % len(self.classes)


_CIFAR10 = "cifar-10-batches-py"
# Of the training part, per channel.
_CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
_CIFAR10_STD = (0.2470, 0.2435, 0.2616)


def load_cifar10(*, data_dir: Path, augment: bool) -> tuple[Any, Any]:
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

    usual = [transforms.ToTensor(), transforms.Normalize(_CIFAR10_MEAN, _CIFAR10_STD)]
    random = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] if augment else []
    root = data_dir.parent if data_dir.name == _CIFAR10 else data_dir
    try:
        return (
            datasets.CIFAR10(str(root), train=True, transform=transforms.Compose([*random, *usual])),
            datasets.CIFAR10(str(root), train=False, transform=transforms.Compose(usual)),
        )
    # torchvision compares each file with its published digest before it reads it.
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"train.data_dir is {data_dir}, and the files of {_CIFAR10} there are missing, unreadable or damaged "
            f"({error}); unpack cifar-10-python.tar.gz there"
        ) from error


# Of ImageNet's training part, as torchvision's weights use them.
_IMAGENET_MEAN: Final = torch.tensor((0.485, 0.456, 0.406)).view(-1, 1, 1)
_IMAGENET_STD: Final = torch.tensor((0.229, 0.224, 0.225)).view(-1, 1, 1)
# A tensor: a GPU would multiply by the rounded inverse of a number.
_BYTE_LEVELS: Final = torch.tensor(255.0)
_IMAGE_SIZE = 224
_RESIZE = 256


def load_imagefolder(*, data_dir: Path, augment: bool, image_size: int, resize: int | None) -> tuple[Any, Any]:
    """Return the training and the validation part, whose images are bytes ``[image_size, image_size, 3]``.

    Validation images are cropped in the centre. So are training images without augmentation; with it, random parts of
    random size are cropped and flipped at random.

    Args:
        data_dir: the folder that holds ``train`` and ``val``.
        augment: whether training images are augmented.
        image_size: the side of the crop, in pixels.
        resize: the shorter side before a crop in the centre, in pixels; None is image_size * 256 / 224.

    Raises:
        DataError: a folder is missing or has no images, or the classes of the parts differ.
    """
    require("train.dataset: imagefolder", "torchvision")
    from torchvision import datasets, transforms

    if resize is None:
        resize = image_size * _RESIZE // _IMAGE_SIZE
    centre = transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(image_size), _as_bytes])
    random = transforms.Compose(
        [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip(), _as_bytes]
    )
    parts = []
    for split in ("train", "val"):
        transform = random if augment and split == "train" else centre
        try:
            parts.append(datasets.ImageFolder(str(data_dir / split), transform, loader=_read))
        except OSError as error:
            raise DataError(
                f"train.data_dir is {data_dir}, and its folder {split} cannot be used ({error}); "
                f"write a folder that holds {split}/CLASS/IMAGE files"
            ) from error
    train, val = parts
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise DataError(
            f"train.data_dir is {data_dir}, whose folders train and val have other classes ({', '.join(odd[:5])} "
            "in one of them only), so that labels would not mean the same; give both the same class folders"
        )
    return train, val


def _read(path: str) -> Image:
    """Return the pixels of a file, in three colours."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode != "RGB":
                return image.convert("RGB")
            image.load()
            return image
    # PIL raises the last two for some damaged files.
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"image {path} cannot be read ({error}); replace it or take it out of the folder") from error


def _as_bytes(image: Image) -> Tensor:
    return torch.from_numpy(np.array(image))


def to_inputs(images: Tensor) -> Tensor:
    """Return images as a model takes them: normalised, on the device they are on.

    Args:
        images: ``[n, H, W, 3]``, uint8.

    Returns:
        ``[n, 3, H, W]``, float32.
    """
    pixels = images.permute(0, 3, 1, 2)
    constants = [constant.to(images.device) for constant in (_BYTE_LEVELS, _IMAGENET_MEAN, _IMAGENET_STD)]
    if images.device.type != "cpu":
        return _normalise(pixels.float(), *constants)
    inputs = torch.empty(pixels.shape)
    for target, source in zip(inputs, pixels, strict=True):
        # An image at a time stays in the cache of the CPU: that takes a third of the time.
        _normalise(target.copy_(source), *constants)
    return inputs


def _normalise(numbers: Tensor, levels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return numbers.div_(levels).sub_(mean).div_(std)
