"""scikit-learn's handwritten digits."""

from __future__ import annotations

import numpy as np
import torch

from hpcddp.packages import require_folder
from hpcddp.train.data.parts import MemoryImages

_EDGE = 8
_SCALE = 4  # 8 x 8 pixels become 32 x 32
_LEVELS = 16
# Of the training part.
_MEAN = 0.3052
_STD = 0.3763
_VALIDATION_STRIDE = 5


def load() -> tuple[MemoryImages, MemoryImages]:
    """Return the training part (1,437 images) and the validation part (every fifth image, 360), as 3 x 32 x 32."""
    folder = require_folder("train.dataset: digits", "sklearn")
    # The import of scikit-learn, whose load_digits reads the same file, takes half as long as that of torch.
    table = torch.from_numpy(np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=","))
    small = table[:, :-1].reshape(-1, _EDGE, _EDGE).to(torch.uint8)
    labels = table[:, -1].long()
    # Repeating pixels is exact, so every host has the same bytes.
    large = small.repeat_interleave(_SCALE, dim=1).repeat_interleave(_SCALE, dim=2)
    pixels = large.unsqueeze(1).expand(-1, 3, -1, -1).contiguous()
    held_out = torch.arange(len(labels)) % _VALIDATION_STRIDE == 0
    return _part(pixels[~held_out], labels[~held_out]), _part(pixels[held_out], labels[held_out])


def _part(pixels: torch.Tensor, labels: torch.Tensor) -> MemoryImages:
    return MemoryImages(
        pixels, labels, classes=[str(digit) for digit in range(10)], levels=_LEVELS, mean=[_MEAN] * 3, std=[_STD] * 3
    )
