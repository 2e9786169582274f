"""Random crops and flips of images, as functions of given random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

CROP_AND_FLIP_DRAWS: Final = 3
"""Random numbers that ``crop_and_flip`` needs for each image."""

BOX_DRAWS: Final = 22
"""Random numbers that ``random_box`` needs."""

FLIP_PROBABILITY: Final = 0.5

# Szegedy et al. 2015 (arXiv 1409.4842), section 6, as torchvision's RandomResizedCrop has them.
_AREA: Final = (0.08, 1.0)
_RATIO: Final = (3 / 4, 4 / 3)
_ATTEMPTS: Final = 10


def crop_and_flip(pixels: Tensor, fractions: NDArray[np.float64], *, padding: int) -> Tensor:
    """Return images that are padded with zeros, cropped to their size at random, and flipped with probability 1/2.

    The usual augmentation of CIFAR (He et al. 2015, arXiv 1512.03385, section 4.2, with padding 4).

    Args:
        pixels: ``[n, C, H, W]``, uint8.
        fractions: ``[n, CROP_AND_FLIP_DRAWS]``, in [0, 1): row and column of the crop, flip.
        padding: pixels on each side.

    Returns:
        ``[n, C, H, W]``, uint8.
    """
    images = pixels.numpy()
    height, width = images.shape[2:]
    margins = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    padded = np.pad(images, margins)
    corners = (fractions[:, :2] * (2 * padding + 1)).astype(int).tolist()
    flips = (fractions[:, 2] < FLIP_PROBABILITY).tolist()
    out = np.empty_like(images)
    # Copying one window per image takes half the time of indexing all pixels of the batch.
    for target, source, (top, left), flip in zip(out, padded, corners, flips, strict=True):
        window = source[:, top : top + height, left : left + width]
        target[...] = window[:, :, ::-1] if flip else window
    return torch.from_numpy(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_box(height: int, width: int, fractions: Sequence[float]) -> Box:
    """Return a random part of an image, as torchvision's RandomResizedCrop chooses it.

    Its area is uniform in 8 % .. 100 % of the image's, the logarithm of its aspect ratio uniform between those of 3:4
    and 4:3. After ten attempts that do not fit into the image it is the largest part in the centre whose ratio is
    within the bounds.

    Args:
        height: of the image.
        width: of the image.
        fractions: ``BOX_DRAWS`` numbers in [0, 1): area and ratio of each attempt, then row and column.
    """
    attempts = zip(fractions[0 : 2 * _ATTEMPTS : 2], fractions[1 : 2 * _ATTEMPTS : 2], strict=True)
    for for_area, for_ratio in attempts:
        area = height * width * _between(_AREA, for_area)
        ratio = math.exp(_between((math.log(_RATIO[0]), math.log(_RATIO[1])), for_ratio))
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = (int(f * (room + 1)) for f, room in zip(fractions[20:], (height - h, width - w), strict=True))
            return Box(top=top, left=left, height=h, width=w)
    ratio = min(max(width / height, _RATIO[0]), _RATIO[1])
    w = min(width, round(height * ratio))
    h = min(height, round(width / ratio))
    return Box(top=(height - h) // 2, left=(width - w) // 2, height=h, width=w)


def _between(bounds: tuple[float, float], fraction: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * fraction


def cut_resize_flip(image: Image, box: Box, *, size: int, flip: bool) -> Image:
    """Return the part of a PIL image in ``box``, resized to ``size`` x ``size``, flipped from left to right or not."""
    from PIL.Image import Resampling, Transpose

    part = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    resized = part.resize((size, size), Resampling.BILINEAR)
    return resized.transpose(Transpose.FLIP_LEFT_RIGHT) if flip else resized
