"""The built-in data sets, from local files alone."""

from __future__ import annotations

import hashlib
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpcddp.jobfile.datasets import DATASETS
from hpcddp.jobfile.sections import Train
from hpcddp.train.data import builtin
from hpcddp.train.data.builtin import SyntheticImages, load_digits
from hpcddp.train.data.loader import Data
from hpcddp.train.data.opening import fingerprint, open_data, tensor_bytes
from hpcddp.train.errors import DataError, TrainingError
from tests.forked_python import run_python
from tests.messages import GoldenMessages


def open_dataset(dataset: str, **changes: Any) -> Data:
    return open_data(Train(model="resnet18", dataset=dataset, **changes))


def test_digits_hold_out_every_fifth_image() -> None:
    data = open_dataset("digits")
    assert (len(data.train), len(data.val)) == DATASETS["digits"].samples == (1437, 360)
    assert data.classes == 10


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn import datasets

    bunch = datasets.load_digits()
    train, val = load_digits()
    pixels = torch.zeros(len(bunch.images), 8, 8)
    labels = torch.zeros(len(bunch.images), dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    # One of the pixels that each became a square of 4 x 4.
    pixels[held_out], pixels[~held_out] = (part.images[:, 0, ::4, ::4] for part in (val, train))
    labels[held_out], labels[~held_out] = val.targets, train.targets
    assert torch.equal((pixels * 0.3763 * 16 + 0.3052 * 16).round(), torch.from_numpy(bunch.images).float())
    assert torch.equal(labels, torch.from_numpy(bunch.target).long())


def test_the_digits_are_read_without_scikit_learn() -> None:
    code = (
        "import sys; from hpcddp.train.data.builtin import load_digits; load_digits(); print('sklearn' in sys.modules)"
    )
    assert run_python(code).stdout == "False\n"


def test_digits_are_three_by_thirty_two_by_thirty_two_and_normalised() -> None:
    train, val = load_digits()
    images, labels = train.images, train.targets
    assert images.shape == (1437, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert abs(float(images.mean())) < 1e-3
    assert abs(float(images.std()) - 1) < 1e-3
    # Every pixel of the 8 x 8 image is a block of 4 x 4.
    assert torch.equal(images[:, 0, ::4, ::4], images[:, 2, 3::4, 3::4])
    image, label = val[0]
    assert (image.shape, label) == ((3, 32, 32), 0)


def write_cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch, *, samples: int = 4) -> Path:
    """Write a small CIFAR-10, whose digests torchvision takes for the published ones."""
    datasets = pytest.importorskip("torchvision.datasets")
    files = folder / "cifar-10-batches-py"
    files.mkdir(parents=True)

    def written(name: str, content: object) -> list[str]:
        (files / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((files / name).read_bytes()).hexdigest()]

    batches = []
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        pixels = np.random.default_rng(number).integers(0, 256, (samples, 3072), dtype=np.uint8)
        batches.append(written(name, {"data": pixels, "labels": [(number + i) % 10 for i in range(samples)]}))
    monkeypatch.setattr(datasets.CIFAR10, "train_list", batches[:5])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", batches[5:])
    _, digest = written("batches.meta", {"label_names": [str(number) for number in range(10)]})
    monkeypatch.setattr(datasets.CIFAR10, "meta", {**datasets.CIFAR10.meta, "md5": digest})
    return files


@pytest.mark.parametrize("parent", [False, True])
def test_cifar10_is_read_from_its_folder_and_from_the_folder_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, parent: bool
) -> None:
    files = write_cifar10(tmp_path, monkeypatch)
    data = open_dataset("cifar10", data_dir=str(tmp_path if parent else files), dataset_args={"augment": False})
    assert (len(data.train), len(data.val), data.classes) == (20, 4, 10)
    pixels = np.random.default_rng(1).integers(0, 256, (4, 3072), dtype=np.uint8)
    image, label = data.train[4]
    assert (image.shape, label) == ((3, 32, 32), 1)
    red = torch.from_numpy(pixels[0, :1024].astype(np.float32)).view(32, 32)
    assert torch.allclose(image[0], (red / 255 - 0.4914) / 0.2470, atol=1e-5)


def test_training_images_of_cifar10_are_cropped_and_flipped_and_validation_images_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write_cifar10(tmp_path, monkeypatch))
    data, plain = (
        open_dataset("cifar10", data_dir=folder, dataset_args={"augment": augment}) for augment in (True, False)
    )
    black = (-torch.tensor([0.4914, 0.4822, 0.4465]) / torch.tensor([0.2470, 0.2435, 0.2616])).view(3, 1, 1)
    padded = black.expand(3, 40, 40).clone()
    padded[:, 4:36, 4:36] = plain.train[5][0]
    crops = [padded[:, top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
    places = set()
    for _ in range(8):
        image = data.train[5][0]
        found = [
            (place, flip)
            for place, crop in enumerate(crops)
            for flip in (False, True)
            if torch.allclose(image, crop.flip(2) if flip else crop, atol=1e-5)
        ]
        assert len(found) == 1
        places.update(found)
    assert len(places) > 1
    assert torch.equal(data.val[2][0], plain.val[2][0])
    # The content that is read at random is no part of it.
    assert data.fingerprint == plain.fingerprint


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_cifar10_file_that_would_run_code_is_refused_and_runs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, marker = write_cifar10(tmp_path, monkeypatch), tmp_path / "marker"
    (files / "data_batch_3").write_bytes(pickle.dumps({"data": Payload(marker), "labels": []}))
    with pytest.raises(DataError, match="damaged"):
        open_dataset("cifar10", data_dir=str(files))
    assert not marker.exists()


def test_folder_without_cifar10_is_refused(golden: GoldenMessages, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_dataset("cifar10", data_dir=str(tmp_path))
    message = golden.message(caught.value, {str(caught.value.__cause__): "REASON OF TORCHVISION"})
    assert f"train.data_dir is {tmp_path}, and the files of cifar-10-batches-py there are missing" in message
    assert "unpack cifar-10-python.tar.gz there" in message


@pytest.mark.parametrize("dataset", ["cifar10", "imagefolder"])
def test_data_dir_that_is_not_there_is_refused(golden: GoldenMessages, tmp_path: Path, dataset: str) -> None:
    with pytest.raises(DataError) as caught:
        open_dataset(dataset, data_dir=str(tmp_path / "nowhere"))
    message = golden.message(caught.value)
    assert f"train.data_dir is {tmp_path}/nowhere" in message
    assert "does not exist on this host" in message
    assert "write a folder" in message
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file, which is not a folder"):
        open_dataset(dataset, data_dir=str(tmp_path / "file"))
    with pytest.raises(DataError) as caught:
        open_dataset(dataset)
    message = golden.message(caught.value)
    assert "train.data_dir is null" in message
    assert f"dataset {dataset} is read from files; write their folder" in message


def write_folder(root: Path, *, val_classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    for split, classes in (("train", ("cat", "dog")), ("val", val_classes)):
        for number, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for index in range(3):
                colour = (40 * index, 90 * number, 200)
                Image.new("RGB", (40, 30), colour).save(root / split / name / f"{index}.png")
    return root


def test_image_folder_gives_cropped_and_normalised_images(tmp_path: Path) -> None:
    data = open_dataset(
        "imagefolder", data_dir=str(write_folder(tmp_path)), dataset_args={"image_size": 16, "resize": 20}
    )
    assert (len(data.train), len(data.val), data.classes) == (6, 6, 2)
    image, label = data.val[1]
    assert (tuple(image.shape), image.dtype, label) == ((16, 16, 3), torch.uint8, 0)
    assert float(data.to_inputs(image[None])[0, 0, 0, 0]) == pytest.approx((40 / 255 - 0.485) / 0.229, abs=1e-5)


def test_image_folder_has_the_usual_sizes_by_default(tmp_path: Path) -> None:
    data = open_dataset("imagefolder", data_dir=str(write_folder(tmp_path)))
    assert data.to_inputs(data.val[0][0][None]).shape == (1, 3, 224, 224)


def test_fingerprint_of_an_image_folder_moves_with_it_and_sees_its_files(tmp_path: Path) -> None:
    first = open_dataset("imagefolder", data_dir=str(write_folder(tmp_path / "a"))).fingerprint
    (tmp_path / "a").rename(tmp_path / "b")
    assert open_dataset("imagefolder", data_dir=str(tmp_path / "b")).fingerprint == first
    (tmp_path / "b" / "train" / "cat" / "0.png").rename(tmp_path / "b" / "train" / "cat" / "9.png")
    assert open_dataset("imagefolder", data_dir=str(tmp_path / "b")).fingerprint != first


def test_image_folder_without_its_parts_is_refused(golden: GoldenMessages, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError) as caught:
        open_dataset("imagefolder", data_dir=str(tmp_path))
    message = golden.message(caught.value, {str(caught.value.__cause__): "REASON OF TORCHVISION"})
    assert f"train.data_dir is {tmp_path}, and its folder train" in message
    assert "write a folder that holds train/CLASS/IMAGE" in message


def test_image_folder_whose_parts_have_other_classes_is_refused(golden: GoldenMessages, tmp_path: Path) -> None:
    write_folder(tmp_path, val_classes=("cat", "cow"))
    with pytest.raises(DataError) as caught:
        open_dataset("imagefolder", data_dir=str(tmp_path))
    message = golden.message(caught.value)
    assert "other classes (cow, dog in one" in message
    assert "give both the same class folders" in message


@pytest.mark.parametrize("content", ["no image", "a part of one"])
def test_broken_image_is_named(golden: GoldenMessages, training: Any, tmp_path: Path, content: str) -> None:
    folder = write_folder(tmp_path / "data")
    path = folder / "train" / "dog" / "2.png"
    path.write_bytes(b"no image" if content == "no image" else path.read_bytes()[:-30])
    with pytest.raises(TrainingError) as caught:
        training.train(
            train__dataset="imagefolder",
            train__data_dir=str(folder),
            train__dataset_args={"image_size": 32},
            batch__global_batch_size=6,
        )
    message = golden.message(re.sub(r" \(.*\);", " (REASON OF PILLOW);", str(caught.value)))
    assert "loading samples of dataset imagefolder failed" in message
    assert f"{path} cannot be read" in message
    assert "replace it or take it out" in message


def test_synthetic_images_are_functions_of_their_index() -> None:
    data = open_dataset("synthetic", dataset_args={"samples": 1_000_000_000, "image_size": 16, "num_classes": 5})
    assert (len(data.train), len(data.val), data.classes) == (1_000_000_000, 256, 5)
    image, label = data.train[999_999_999]
    assert image.shape == (3, 16, 16)
    assert torch.equal(data.train[3][0], data.train[3][0])
    assert not torch.equal(image, data.train[3][0])
    assert label < 5
    assert not torch.equal(data.train[0][0], data.val[0][0])


def test_synthetic_labels_cover_all_classes_evenly() -> None:
    part = SyntheticImages(10_000, image_size=1, classes=10)
    counts = torch.bincount(torch.tensor([part[index][1] for index in range(10_000)]), minlength=10)
    assert counts.min() > 850
    assert counts.max() < 1150


@pytest.mark.parametrize(
    ("dataset", "arguments", "facts"),
    [
        (
            "synthetic",
            {"sample": 3},
            ("train.dataset_args.sample is given", "dataset synthetic", "did you mean samples"),
        ),
        ("synthetic", {"samples": 0}, ("train.dataset_args.samples is 0", "no whole number from 1")),
        ("synthetic", {"samples": "3"}, ("train.dataset_args.samples is '3'", "no whole number from 1")),
        ("digits", {"size": 3}, ("train.dataset_args.size is given", "dataset digits", "leave it out")),
        (
            "synthetic",
            {"qqq": 3},
            ("train.dataset_args.qqq is given", "one of samples, val_samples, image_size, num_classes"),
        ),
    ],
)
def test_wrong_argument_of_a_data_set_is_refused(
    golden: GoldenMessages, dataset: str, arguments: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with pytest.raises(DataError) as caught:
        open_dataset(dataset, dataset_args=arguments)
    message = golden.message(caught.value)
    for fact in facts:
        assert fact in message


@pytest.mark.parametrize("name", DATASETS)
def test_the_loader_of_a_data_set_takes_the_arguments_of_its_row(name: str) -> None:
    dataset = DATASETS[name]
    parameters = inspect.signature(getattr(builtin, f"load_{name}")).parameters
    assert parameters.keys() == dataset.arguments.keys() | ({"data_dir"} if dataset.is_in_files else set())


def test_unknown_data_set_is_refused(golden: GoldenMessages) -> None:
    train = Train(model="resnet18", dataset="digits").model_copy(update={"dataset": "mnist"})
    with pytest.raises(DataError) as caught:
        open_data(train)
    message = golden.message(caught.value)
    assert "train.dataset is mnist" in message
    assert f"write {', '.join(DATASETS)} or" in message


def test_more_classes_than_the_data_has_are_fine() -> None:
    assert open_dataset("digits", num_classes=12).classes == 12


def test_fingerprint_sees_content_labels_and_size() -> None:
    train, val = load_digits()
    changed, _ = load_digits()
    changed.images[0, 0, 0, 0] += 1
    relabelled, _ = load_digits()
    relabelled.targets[700] = (relabelled.targets[700] + 1) % 10
    prints = {fingerprint("digits", part, 10) for part in (train, val, changed, relabelled)}
    assert len(prints) == 4
    assert fingerprint("digits", load_digits()[0], 10) == fingerprint("digits", train, 10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_bytes_of_a_tensor_are_its_elements_in_order(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).view(2, 3).t().to(dtype)
    assert len(tensor_bytes(tensor)) == 6 * tensor.element_size()
    assert tensor_bytes(tensor) == tensor_bytes(tensor.contiguous())
    assert len(tensor_bytes(torch.tensor(1, dtype=dtype))) == tensor.element_size()
