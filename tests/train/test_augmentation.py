"""Random crops and flips: the usual ones, from keyed numbers."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms.v2 import functional

from hpcddp.jobfile.sections import Train
from hpcddp.train.data.augmentation import BOX_DRAWS, Box, crop_and_flip, random_box
from hpcddp.train.data.opening import open_data
from hpcddp.train.data.parts import Data
from hpcddp.train.errors import DataError
from hpcddp.train.randomness import SampleKeys
from tests.messages import GoldenMessages
from tests.train.cifar10_files import write_binary

LARGEST = 1 - 2**-53
NORMALISED = transforms.Compose(
    [transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
)


def keys(*indices: int, epoch: int = 0, seed: int = 0) -> SampleKeys:
    return SampleKeys(seed=seed, split="train", epoch=epoch, indices=list(indices))


def inputs(data: Data, *indices: int, **changes: int) -> torch.Tensor:
    """Return the training images of indices as a model takes them, on the CPU."""
    images: torch.Tensor = data.train.to_inputs(data.train.take(keys(*indices, **changes))[0])
    return images


def pixels(samples: int, height: int = 32, width: int = 32) -> torch.Tensor:
    words = np.arange(samples * 3 * height * width, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy((words >> np.uint64(56)).astype(np.uint8)).view(samples, 3, height, width)


def test_crop_and_flip_are_those_of_torchvision() -> None:
    images = pixels(40, height=6, width=9)
    fractions = keys(*range(40)).fractions(3)
    fractions[0], fractions[1] = 0.0, LARGEST
    found = crop_and_flip(images, fractions, padding=4)
    for image, result, (row, column, flip) in zip(images, found, fractions.tolist(), strict=True):
        padded = functional.pad(image, [4])
        expected = functional.crop(padded, int(row * 9), int(column * 9), 6, 9)
        assert torch.equal(result, functional.horizontal_flip(expected) if flip < 0.5 else expected)


def test_crops_reach_every_place_equally_often() -> None:
    marked = torch.zeros(16_200, 1, 9, 9, dtype=torch.uint8)
    marked[:, :, 4, 4] = 1
    found = crop_and_flip(marked, keys(*range(len(marked))).fractions(3), padding=4)
    counts = found.sum(dim=(0, 1)).double()
    # 200 for each of 81 places; chi-square with 80 degrees of freedom: 124.8 is the 99.9 % point.
    assert float(((counts - 200) ** 2 / 200).sum()) < 124.8


def test_crops_of_a_key_stay_what_they_are_in_every_version() -> None:
    found = crop_and_flip(pixels(8), keys(*range(8), seed=3, epoch=2).fractions(3), padding=4)
    assert (
        hashlib.sha256(found.numpy().tobytes()).hexdigest()
        == "5500e003320492adc8c7f3098f03ee8eeaaf338b3f089874387bf77de9276b48"
    )


def boxes(height: int, width: int, samples: int) -> list[Box]:
    return [random_box(height, width, row) for row in keys(*range(samples)).fractions(BOX_DRAWS).tolist()]


def test_boxes_of_a_key_stay_what_they_are_in_every_version() -> None:
    assert [(box.top, box.left, box.height, box.width) for box in boxes(375, 500, 4)] == [
        (84, 149, 281, 219),
        (16, 108, 185, 211),
        (4, 187, 312, 309),
        (62, 3, 213, 183),
    ]


@pytest.mark.parametrize(("height", "width"), [(375, 500), (40, 30), (1, 1), (2, 300), (300, 7)])
def test_boxes_lie_within_the_image(height: int, width: int) -> None:
    extremes = [list(row) for row in itertools.product([0.0, 0.5, LARGEST], repeat=2)]
    found = boxes(height, width, 300)
    found += [random_box(height, width, [a, b] * (BOX_DRAWS // 2)) for a, b in extremes]
    for box in found:
        assert box.height >= 1
        assert box.width >= 1
        assert 0 <= box.top <= height - box.height
        assert 0 <= box.left <= width - box.width


def test_boxes_are_distributed_like_those_of_torchvision() -> None:
    torch.manual_seed(0)
    image = torch.empty(3, 375, 500)
    draws = [transforms.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
    theirs = np.array(draws, dtype=float)
    ours = np.array([(box.top, box.left, box.height, box.width) for box in boxes(375, 500, 4000)], dtype=float)
    for one, other in ((theirs, ours), (np.log(theirs[:, 2:]), np.log(ours[:, 2:]))):
        # Five standard deviations of the difference of two means.
        spread = 5 * np.sqrt((one.var(axis=0) + other.var(axis=0)) / 4000)
        assert (np.abs(one.mean(axis=0) - other.mean(axis=0)) < spread).all()
        assert np.allclose(one.std(axis=0), other.std(axis=0), rtol=0.1)


@pytest.mark.parametrize(("height", "width"), [(1, 400), (400, 1), (3, 1000)])
def test_image_that_no_random_part_fits_gives_the_part_in_its_centre(height: int, width: int) -> None:
    expected = transforms.RandomResizedCrop.get_params(torch.empty(3, height, width), [0.9, 1.0], [3 / 4, 4 / 3])
    box = random_box(height, width, [LARGEST, 0.5] * (BOX_DRAWS // 2))
    assert (box.top, box.left, box.height, box.width) == tuple(expected)


def cifar(folder: Path, **arguments: Any) -> Data:
    if not folder.exists():
        write_binary(folder)
    return open_data(Train(model="resnet18", dataset="cifar10", data_dir=str(folder), dataset_args=arguments))


def test_training_images_of_cifar10_are_augmented_and_validation_images_never(tmp_path: Path) -> None:
    data = cifar(tmp_path / "cifar")
    plain = cifar(tmp_path / "cifar", augment=False)
    wanted = keys(*range(4))
    images, labels = inputs(data, *range(4)), data.train.take(wanted)[1]
    expected, expected_labels = inputs(plain, *range(4)), plain.train.take(wanted)[1]
    assert images.shape == expected.shape == (4, 3, 32, 32)
    assert not torch.equal(images, expected)
    assert torch.equal(labels, expected_labels)
    assert torch.equal(data.val.to_inputs(data.val.take(wanted)[0]), plain.val.__getitems__(range(4))[0])
    # Indexing never augments: the fingerprint of the data rests on it.
    assert torch.equal(data.train.__getitems__(range(4))[0], expected)
    assert data.fingerprint == plain.fingerprint


def test_augmented_image_depends_on_seed_epoch_and_index_alone(tmp_path: Path) -> None:
    train = cifar(tmp_path / "cifar").train
    together = train.take(keys(7, 2, 9))[0]
    assert torch.equal(train.take(keys(2))[0][0], together[1])
    assert not torch.equal(train.take(keys(2, epoch=1))[0][0], together[1])
    assert not torch.equal(train.take(keys(2, seed=1))[0][0], together[1])


def test_augmented_image_is_the_normalised_crop(tmp_path: Path) -> None:
    data, plain = cifar(tmp_path / "cifar"), cifar(tmp_path / "cifar", augment=False)
    image = inputs(data, 5)[0]
    (row, column, flip), *_ = keys(5).fractions(3).tolist()
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    black = (-mean / std).tolist()
    original = plain.train[5][0]
    padded = torch.stack(
        [functional.pad(channel[None], [4], fill=fill)[0] for channel, fill in zip(original, black, strict=True)]
    )
    expected = functional.crop(padded, int(row * 9), int(column * 9), 32, 32)
    assert torch.allclose(image, functional.horizontal_flip(expected) if flip < 0.5 else expected, atol=1e-5)


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


def test_training_images_of_a_folder_are_random_parts_of_the_image(folder: Path) -> None:
    data, plain = open_folder(folder), open_folder(folder, augment=False)
    stored, labels = data.train.take(keys(3, 3))
    assert (stored.dtype, labels.tolist()) == (torch.uint8, [1, 1])
    image, again = inputs(data, 3, 3)
    assert image.shape == (3, 16, 16)
    assert torch.equal(image, again)
    assert torch.equal(inputs(data, 0, 3)[1], image)
    assert not torch.equal(inputs(data, 3, epoch=1)[0], image)
    *for_box, for_flip = keys(3).fractions(BOX_DRAWS + 1).tolist()[0]
    box = random_box(60, 80, for_box)
    with Image.open(folder / "train" / "dog" / "1.png") as whole:
        part = functional.resized_crop(whole, box.top, box.left, box.height, box.width, [16, 16])
    part = functional.horizontal_flip(part) if for_flip < 0.5 else part
    expected = NORMALISED(part)
    # Bit for bit: a run may have begun with torchvision's.
    assert torch.equal(image, expected)
    assert torch.equal(data.train[3][0], plain.train[3][0])
    assert torch.equal(data.val[3][0], plain.val[3][0])
    assert (data.fingerprint, data.classes) == (plain.fingerprint, plain.classes)


def test_validation_images_of_a_folder_are_those_of_torchvision(folder: Path) -> None:
    val = open_folder(folder, resize=20).val
    usual = transforms.Compose([transforms.Resize(20), transforms.CenterCrop(16), NORMALISED])
    expected = [usual(Image.open(path)) for path, _ in val.samples]
    images, labels = val.take(keys(*range(4)))
    assert torch.equal(val.to_inputs(images), torch.stack(expected))
    assert labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(val[2][0], expected[2])


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
