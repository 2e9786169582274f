"""Images of a folder: torchvision's, with keyed random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets, transforms

from hpcddp.jobfile.sections import Train
from hpcddp.train.data.builtin import to_inputs
from hpcddp.train.data.loader import Data, Keyed
from hpcddp.train.data.opening import open_data
from hpcddp.train.errors import DataError
from hpcddp.train.randomness import SampleKeys
from tests.messages import GoldenMessages

NORMALISED = transforms.Compose(
    [transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
)


def read(part: Any, *indices: int, epoch: int = 0) -> torch.Tensor:
    """Return training images as a model takes them, and as the training reads them."""
    keys = SampleKeys(seed=0, split="train", epoch=epoch, indices=list(indices))
    return to_inputs(torch.stack([image for image, _ in Keyed(part).__getitems__(keys)]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write an image folder whose images have a gradient, so that every part of them differs."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(2):
                rows, columns = np.mgrid[0:60, 0:80]
                image = np.stack([4 * rows, 3 * columns, np.full_like(rows, 90 * number)], axis=-1).astype(np.uint8)
                Image.fromarray(image).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


def open_folder(folder: Path, **arguments: Any) -> Data:
    arguments = {"image_size": 16, **arguments}
    return open_data(Train(model="resnet18", dataset="imagefolder", data_dir=str(folder), dataset_args=arguments))


def test_training_images_of_a_folder_are_those_of_torchvision(folder: Path) -> None:
    data, plain = open_folder(folder), open_folder(folder, augment=False)
    image, again = read(data.train, 3, 3)
    assert image.shape == (3, 16, 16)
    assert torch.equal(image, again)
    assert torch.equal(read(data.train, 0, 3)[1], image)
    assert not torch.equal(read(data.train, 3, epoch=1)[0], image)
    usual = transforms.Compose([transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), NORMALISED])
    theirs = datasets.ImageFolder(str(folder / "train"), usual)
    keys = SampleKeys(seed=0, split="train", epoch=0, indices=range(4))
    # Bit for bit: a run may have begun with torchvision's.
    expected = torch.stack([image for image, _ in Keyed(theirs).__getitems__(keys)])
    assert torch.equal(read(data.train, *range(4)), expected)
    assert (data.fingerprint, data.classes) == (plain.fingerprint, plain.classes)


def test_validation_images_of_a_folder_are_those_of_torchvision(folder: Path) -> None:
    data = open_folder(folder, resize=20)
    usual = transforms.Compose([transforms.Resize(20), transforms.CenterCrop(16), NORMALISED])
    expected = torch.stack([usual(Image.open(path)) for path, _ in data.val.samples])
    assert torch.equal(read(data.val, *range(4)), expected)
    assert torch.equal(read(open_folder(folder, resize=20, augment=False).train, *range(4)), expected)
    assert [label for _, label in data.val] == [0, 0, 1, 1]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_image_of_another_mode_becomes_one_of_three_colours(folder: Path, mode: str) -> None:
    path = folder / "val" / "cat" / "0.tif"
    with Image.open(folder / "val" / "cat" / "0.png") as image:
        image.convert(mode).save(path)
    val = open_folder(folder).val
    (index,) = (number for number, (name, _) in enumerate(val.samples) if name == str(path))
    with Image.open(path) as image:
        image.convert("RGB").save(folder / "val" / "cat" / "0.png")
    assert torch.equal(val[index][0], val[0][0])


@pytest.mark.parametrize("dataset", ["cifar10", "imagefolder"])
def test_augment_that_is_neither_true_nor_false_is_refused(golden: GoldenMessages, folder: Path, dataset: str) -> None:
    with pytest.raises(DataError) as caught:
        open_data(Train(model="resnet18", dataset=dataset, data_dir=str(folder), dataset_args={"augment": "yes"}))
    message = golden.message(caught.value)
    assert "train.dataset_args.augment is 'yes'" in message
    assert "neither true nor false; write one" in message
