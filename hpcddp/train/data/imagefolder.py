"""A folder of images, one sub-folder per class: ``data_dir/train`` and ``data_dir/val``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from hpcddp.train.data.arguments import refuse_unknown, take_size
from hpcddp.train.errors import DataError

# Of ImageNet's training part, as torchvision's weights use them.
_MEAN: Final = (0.485, 0.456, 0.406)
_STD: Final = (0.229, 0.224, 0.225)
_IMAGE_SIZE, _RESIZE = 224, 256


def load_imagefolder(data_dir: Path, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Return the training and the validation part; every image is resized, cropped in the centre and normalised.

    Args:
        data_dir: the folder that holds ``train`` and ``val``.
        arguments: ``image_size``, the crop's side (default 224), and ``resize``, the shorter side before (default
            image_size * 256 / 224).

    Raises:
        DataError: a folder is missing or holds no images, the parts have other classes, or an argument is wrong.
    """
    from torchvision import datasets, transforms

    refuse_unknown("imagefolder", arguments, ("image_size", "resize"))
    image_size = take_size(arguments, "image_size", _IMAGE_SIZE)
    resize = take_size(arguments, "resize", image_size * _RESIZE // _IMAGE_SIZE)
    transform = transforms.Compose(
        [
            transforms.Resize(resize),
            transforms.CenterCrop(image_size),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float32),
            transforms.Normalize(_MEAN, _STD),
        ]
    )
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
    return parts[0], parts[1]


def _compare_classes(data_dir: Path, train: list[str], val: list[str]) -> None:
    if train != val:
        odd = sorted(set(train) ^ set(val))
        raise DataError(
            f"train.data_dir is {data_dir}, whose folders train and val have other classes ({', '.join(odd[:5])} "
            "in one of them only), so that labels would not mean the same; give both the same class folders"
        )
