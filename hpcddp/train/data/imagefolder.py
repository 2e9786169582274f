"""Data set of image files in ``data_dir/train`` and ``data_dir/val``, with one sub-folder per class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcddp.packages import require
from hpcddp.train.data.augmentation import BOX_DRAWS, FLIP_PROBABILITY, cut_resize_flip, random_box
from hpcddp.train.data.parts import KeyedPart, MicroBatch, Normalisation
from hpcddp.train.errors import DataError
from hpcddp.train.randomness import SampleKeys

if TYPE_CHECKING:
    from PIL.Image import Image

# Of ImageNet's training part, as torchvision's weights use them.
_MEAN: Final = (0.485, 0.456, 0.406)
_STD: Final = (0.229, 0.224, 0.225)
_LEVELS: Final = 255
_IMAGE_SIZE = 224
_RESIZE = 256


def load(*, data_dir: Path, augment: bool, image_size: int, resize: int | None) -> tuple[Any, Any]:
    """Return the training and the validation part; every image is resized, cropped and normalised.

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
    from torchvision import datasets

    if resize is None:
        resize = image_size * _RESIZE // _IMAGE_SIZE
    parts = []
    for split in ("train", "val"):
        try:
            parts.append(datasets.ImageFolder(str(data_dir / split)))
        except OSError as error:
            raise DataError(
                f"train.data_dir is {data_dir}, and its folder {split} cannot be used ({error}); "
                f"write a folder that holds {split}/CLASS/IMAGE files"
            ) from error
    _compare_classes(data_dir, parts[0].classes, parts[1].classes)
    return (
        ImageFiles(parts[0], image_size, resize, augment=augment),
        ImageFiles(parts[1], image_size, resize, augment=False),
    )


class _ImageFolder(Protocol):
    """What is used of ``torchvision.datasets.ImageFolder``, which has no types."""

    root: str
    classes: list[str]
    samples: list[tuple[str, int]]
    targets: list[int]


class ImageFiles(KeyedPart):
    """The image files of one part.

    Args:
        image_size: the side of the images after all.
        resize: the shorter side before a crop in the centre.
        augment: whether images are cropped, resized and flipped at random, instead of cropped in the centre.
    """

    def __init__(self, folder: _ImageFolder, image_size: int, resize: int, *, augment: bool) -> None:
        from torchvision import transforms

        self.root = folder.root
        self.classes = folder.classes
        self.samples = folder.samples
        self.targets = folder.targets
        self._size = image_size
        self._augment = augment
        self._crop_centre = transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(image_size)])
        self._normalise = Normalisation(torch.tensor(_MEAN), torch.tensor(_STD), unit=_LEVELS)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one sample without augmentation: a normalised image ``[3, image_size, image_size]`` and its label."""
        path, label = self.samples[index]
        return self.to_inputs(_as_images([_read(path, self._crop_centre)]))[0], label

    def take(self, keys: SampleKeys) -> MicroBatch:
        """Return images ``[n, 3, image_size, image_size]``, uint8, augmented if the part is, and labels ``[n]``."""
        files = [self.samples[index] for index in keys.indices]
        if self._augment:
            draws = keys.fractions(BOX_DRAWS + 1).tolist()
            pixels = [
                _read(path, partial(self._crop_at_random, fractions))
                for (path, _), fractions in zip(files, draws, strict=True)
            ]
        else:
            pixels = [_read(path, self._crop_centre) for path, _ in files]
        return _as_images(pixels), torch.tensor([label for _, label in files])

    def to_inputs(self, images: Tensor) -> Tensor:
        """Return normalised images, float32."""
        return self._normalise(images)

    def _crop_at_random(self, fractions: list[float], image: Image) -> Image:
        *for_box, for_flip = fractions
        box = random_box(image.height, image.width, for_box)
        return cut_resize_flip(image, box, size=self._size, flip=for_flip < FLIP_PROBABILITY)


def _read(path: str, crop: Callable[[Image], Image]) -> NDArray[np.uint8]:
    """Return the pixels of a part of an image, ``[H, W, 3]``.

    Raises:
        DataError: the file cannot be read, or is no image.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return np.asarray(crop(image if image.mode == "RGB" else image.convert("RGB")))
    # PIL raises the last two for some damaged files.
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"image {path} cannot be read ({error}); replace it or take it out of the folder") from error


def _as_images(pixels: list[NDArray[np.uint8]]) -> Tensor:
    """Return arrays ``[H, W, 3]`` as one tensor ``[n, 3, H, W]``, in channels-last memory format."""
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)


def _compare_classes(data_dir: Path, train: list[str], val: list[str]) -> None:
    if train != val:
        odd = sorted(set(train) ^ set(val))
        raise DataError(
            f"train.data_dir is {data_dir}, whose folders train and val have other classes ({', '.join(odd[:5])} "
            "in one of them only), so that labels would not mean the same; give both the same class folders"
        )
