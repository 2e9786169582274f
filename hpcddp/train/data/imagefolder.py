"""Data set of image files in ``data_dir/train`` and ``data_dir/val``, with one sub-folder per class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from hpcddp.train.data.augmentation import BOX_DRAWS, FLIP_PROBABILITY, cut_resize_flip, random_box
from hpcddp.train.data.parts import KeyedPart, refuse_unknown, take_flag, take_size
from hpcddp.train.errors import DataError
from hpcddp.train.randomness import SampleKeys

if TYPE_CHECKING:
    from PIL.Image import Image

# Of ImageNet's training part, as torchvision's weights use them.
_MEAN: Final = (0.485, 0.456, 0.406)
_STD: Final = (0.229, 0.224, 0.225)
_IMAGE_SIZE, _RESIZE = 224, 256


def load_imagefolder(data_dir: Path, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Return the training and the validation part; every image is resized, cropped and normalised.

    Validation images are cropped in the centre. So are training images without augmentation; with it, random parts of
    random size are cropped and flipped at random.

    Args:
        data_dir: the folder that holds ``train`` and ``val``.
        arguments: ``image_size``, the crop's side (default 224); ``resize``, the shorter side before a crop in the
            centre (default image_size * 256 / 224); ``augment``, whether training images are augmented (default true).

    Raises:
        DataError: a folder is missing or has no images, the classes of the parts differ, or an argument is wrong.
    """
    from torchvision import datasets, transforms

    refuse_unknown("imagefolder", arguments, ("image_size", "resize", "augment"))
    image_size = take_size(arguments, "image_size", _IMAGE_SIZE)
    resize = take_size(arguments, "resize", image_size * _RESIZE // _IMAGE_SIZE)
    augment = take_flag(arguments, "augment", default=True)
    normalise = transforms.Compose(
        [
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float32),
            transforms.Normalize(_MEAN, _STD),
        ]
    )
    transform = transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(image_size), normalise])
    parts = []
    for split in ("train", "val"):
        try:
            parts.append(datasets.ImageFolder(str(data_dir / split), transform=transform))
        except OSError as error:
            raise DataError(
                f"train.data_dir is {data_dir}, and its folder {split} cannot be used ({error}); "
                f"write a folder that holds {split}/CLASS/IMAGE files"
            ) from error
    _compare_classes(data_dir, parts[0].classes, parts[1].classes)
    return AugmentedFolder(parts[0], image_size, normalise) if augment else parts[0], parts[1]


class _ImageFolder(Protocol):
    """What is used of ``torchvision.datasets.ImageFolder``, which has no types."""

    root: str
    classes: list[str]
    samples: list[tuple[str, int]]
    targets: list[int]
    loader: Callable[[str], Image]

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]: ...


class AugmentedFolder(KeyedPart):
    """An image folder whose images are cropped, resized and flipped at random, by the keys of the samples.

    Args:
        folder: the image folder, without augmentation.
        image_size: the side of the crops after resizing.
        normalise: from a PIL image to a tensor.
    """

    def __init__(self, folder: _ImageFolder, image_size: int, normalise: Callable[[Image], Tensor]) -> None:
        self.root, self.classes = folder.root, folder.classes
        self.samples, self.targets = folder.samples, folder.targets
        self._folder, self._size, self._normalise = folder, image_size, normalise

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one sample without augmentation."""
        image, label = self._folder[index]
        return image, label

    def take(self, keys: SampleKeys) -> list[tuple[Tensor, int]]:
        """Return the samples of ``keys``, augmented: images ``[3, image_size, image_size]``, and labels."""
        draws = keys.fractions(BOX_DRAWS + 1).tolist()
        return [self._augmented(index, fractions) for index, fractions in zip(keys.indices, draws, strict=True)]

    def _augmented(self, index: int, fractions: list[float]) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        image = self._folder.loader(path)
        *for_box, for_flip = fractions
        box = random_box(image.height, image.width, for_box)
        flip = for_flip < FLIP_PROBABILITY
        return self._normalise(cut_resize_flip(image, box, size=self._size, flip=flip)), label


def _compare_classes(data_dir: Path, train: list[str], val: list[str]) -> None:
    if train != val:
        odd = sorted(set(train) ^ set(val))
        raise DataError(
            f"train.data_dir is {data_dir}, whose folders train and val have other classes ({', '.join(odd[:5])} "
            "in one of them only), so that labels would not mean the same; give both the same class folders"
        )
