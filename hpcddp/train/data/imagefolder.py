"""Data set of image files in ``data_dir/train`` and ``data_dir/val``, with one sub-folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from hpcddp.packages import require
from hpcddp.train.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

# Of ImageNet's training part, as torchvision's weights use them.
_MEAN: Final = torch.tensor((0.485, 0.456, 0.406)).view(-1, 1, 1)
_STD: Final = torch.tensor((0.229, 0.224, 0.225)).view(-1, 1, 1)
# A tensor: a GPU would multiply by the rounded inverse of a number.
_LEVELS: Final = torch.tensor(255.0)
_IMAGE_SIZE = 224
_RESIZE = 256


def load(*, data_dir: Path, augment: bool, image_size: int, resize: int | None) -> tuple[Any, Any]:
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
    constants = [constant.to(images.device) for constant in (_LEVELS, _MEAN, _STD)]
    if images.device.type != "cpu":
        return _normalise(pixels.float(), *constants)
    inputs = torch.empty(pixels.shape)
    for target, source in zip(inputs, pixels, strict=True):
        # An image at a time stays in the cache of the CPU: that takes a third of the time.
        _normalise(target.copy_(source), *constants)
    return inputs


def _normalise(numbers: Tensor, levels: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return numbers.div_(levels).sub_(mean).div_(std)
