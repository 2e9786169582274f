"""The built-in data sets, from local files alone."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpcddp.jobfile.datasets import DATASETS
from hpcddp.jobfile.sections import Train
from hpcddp.train.data.digits import load as load_digits
from hpcddp.train.data.identity import fingerprint, tensor_bytes
from hpcddp.train.data.opening import open_data
from hpcddp.train.data.parts import Data
from hpcddp.train.data.synthetic import SyntheticImages
from hpcddp.train.errors import DataError, TrainingError
from tests.messages import GoldenMessages
from tests.train.cifar10_files import cifar_batch, write_binary, write_pickled


def open_dataset(dataset: str, **changes: Any) -> Data:
    return open_data(Train(model="resnet18", dataset=dataset, **changes))


def test_digits_hold_out_every_fifth_image() -> None:
    data = open_dataset("digits")
    assert (len(data.train), len(data.val)) == DATASETS["digits"].samples == (1437, 360)
    assert data.classes == 10
    assert data.in_memory


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn import datasets

    bunch = datasets.load_digits()
    train, val = load_digits()
    pixels = torch.zeros(len(bunch.images), 8, 8, dtype=torch.uint8)
    labels = torch.zeros(len(bunch.images), dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    # One of the pixels that each became a square of 4 x 4.
    pixels[held_out], pixels[~held_out] = (part._pixels[:, 0, ::4, ::4] for part in (val, train))
    labels[held_out], labels[~held_out] = val.targets, train.targets
    assert torch.equal(pixels, torch.from_numpy(bunch.images).to(torch.uint8))
    assert torch.equal(labels, torch.from_numpy(bunch.target).long())


def test_the_digits_are_read_without_scikit_learn() -> None:
    code = "import sys; from hpcddp.train.data.digits import load; load(); print('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_digits_are_three_by_thirty_two_by_thirty_two_and_normalised() -> None:
    train, val = load_digits()
    images, labels = train.__getitems__(range(len(train)))
    assert images.shape == (1437, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert abs(float(images.mean())) < 1e-3
    assert abs(float(images.std()) - 1) < 1e-3
    # Every pixel of the 8 x 8 image is a block of 4 x 4.
    assert torch.equal(images[:, 0, ::4, ::4], images[:, 2, 3::4, 3::4])
    image, label = val[0]
    assert (image.shape, label) == ((3, 32, 32), 0)


def test_one_sample_equals_its_place_in_a_batch() -> None:
    train, _ = load_digits()
    images, labels = train.__getitems__([5, 900])
    assert torch.equal(images[1], train[900][0])
    assert labels.tolist() == [train[5][1], train[900][1]]


@pytest.mark.parametrize("write", [write_pickled, write_binary])
@pytest.mark.parametrize("parent", [False, True])
def test_cifar10_is_read_from_either_layout_and_from_the_folder_around_it(
    tmp_path: Path, write: Callable[[Path], Path], *, parent: bool
) -> None:
    folder = write(tmp_path / ("cifar-10-batches-py" if write is write_pickled else "cifar-10-batches-bin"))
    data = open_dataset("cifar10", data_dir=str(tmp_path if parent else folder))
    assert (len(data.train), len(data.val), data.classes) == (20, 4, 10)
    pixels, labels = cifar_batch(1)
    image, label = data.train[4]
    assert label == labels[0]
    red = torch.from_numpy(pixels[0, :1024].astype(np.float32)).view(32, 32)
    assert torch.allclose(image[0], (red / 255 - 0.4914) / 0.2470, atol=1e-5)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("convert", [list, np.asarray, lambda labels: list(np.asarray(labels))])
def test_cifar10_written_by_today_s_python_is_read(
    tmp_path: Path, protocol: int, convert: Callable[[Any], Any]
) -> None:
    folder = write_pickled(tmp_path)
    pixels, labels = cifar_batch(1)
    (folder / "data_batch_2").write_bytes(pickle.dumps({"data": pixels, "labels": convert(labels)}, protocol=protocol))
    assert [label for _, label in (open_dataset("cifar10", data_dir=str(folder)).train[4 + n] for n in range(4))] == (
        list(labels)
    )


def test_both_layouts_of_cifar10_give_the_same_fingerprint(tmp_path: Path) -> None:
    folders = write_pickled(tmp_path / "a"), write_binary(tmp_path / "b")
    prints = {open_dataset("cifar10", data_dir=str(folder)).fingerprint for folder in folders}
    assert len(prints) == 1


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_cifar10_file_that_would_run_code_is_refused_and_runs_none(golden: GoldenMessages, tmp_path: Path) -> None:
    folder, marker = write_pickled(tmp_path / "data"), tmp_path / "marker"
    (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": Payload(marker), b"labels": []}))
    with pytest.raises(DataError) as caught:
        open_dataset("cifar10", data_dir=str(folder))
    # The module of Path has another name from one Python to the next.
    message = golden.message(caught.value, {f"{Path.__module__}.Path": "PATH"})
    assert "data_batch_3 is no CIFAR-10 batch" in message
    assert "it asks for pathlib" in message
    assert "only arrays are admitted" in message
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"", ("is no CIFAR-10 batch",)),
        (pickle.dumps([1]), ("is no CIFAR-10 batch",)),
        (
            pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 1]}),
            ("uint8 data of shape (2, 5) with 2", "(n, 3072)"),
        ),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}), ("with n labels 0..9",)),
    ],
    ids=["empty", "no dictionary", "shape", "label"],
)
def test_damaged_cifar10_file_is_named(
    golden: GoldenMessages, tmp_path: Path, content: bytes, facts: tuple[str, ...]
) -> None:
    folder = write_pickled(tmp_path / "data")
    (folder / "data_batch_2").write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_dataset("cifar10", data_dir=str(folder))
    message = golden.message(caught.value, {str(caught.value.__cause__): "REASON OF PYTHON"})
    for fact in ("data_batch_2 ", *facts, "unpack it again"):
        assert fact in message


def test_torn_binary_cifar10_file_is_named(golden: GoldenMessages, tmp_path: Path) -> None:
    folder = write_binary(tmp_path / "data")
    (folder / "test_batch.bin").write_bytes(b"12345")
    with pytest.raises(DataError) as caught:
        open_dataset("cifar10", data_dir=str(folder))
    message = golden.message(caught.value)
    assert "test_batch.bin has 5 bytes" in message
    assert "no multiple of the 3073" in message


def test_missing_cifar10_file_is_named(tmp_path: Path) -> None:
    folder = write_pickled(tmp_path / "data")
    (folder / "data_batch_2").unlink()
    with pytest.raises(DataError, match=r"data_batch_2 cannot be read .No such file"):
        open_dataset("cifar10", data_dir=str(folder))


def test_folder_without_cifar10_is_refused(golden: GoldenMessages, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_dataset("cifar10", data_dir=str(tmp_path))
    message = golden.message(caught.value)
    assert f"train.data_dir is {tmp_path}, which holds no CIFAR-10" in message
    assert "cifar-10-batches-py nor cifar-10-batches-bin" in message
    assert "unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz there" in message


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
    assert not data.in_memory
    image, label = data.train[1]
    assert (tuple(image.shape), label) == ((3, 16, 16), 0)
    assert float(image[0, 0, 0]) == pytest.approx((40 / 255 - 0.485) / 0.229, abs=1e-5)


def test_image_folder_has_the_usual_sizes_by_default(tmp_path: Path) -> None:
    data = open_dataset("imagefolder", data_dir=str(write_folder(tmp_path)))
    assert data.val[0][0].shape == (3, 224, 224)


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
    images, labels = data.train.__getitems__([999_999_999, 3, 3])
    assert images.shape == (3, 3, 16, 16)
    assert torch.equal(images[1], images[2])
    assert not torch.equal(images[0], images[1])
    assert labels[1] == labels[2] == data.train[3][1]
    assert not torch.equal(data.train[0][0], data.val[0][0])


def test_synthetic_labels_cover_all_classes_evenly() -> None:
    _, labels = SyntheticImages(10_000, image_size=1, classes=10).__getitems__(range(10_000))
    counts = torch.bincount(labels, minlength=10)
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
def test_the_module_of_a_data_set_takes_the_arguments_of_its_row(name: str) -> None:
    dataset = DATASETS[name]
    parameters = inspect.signature(import_module(f"hpcddp.train.data.{name}").load).parameters
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
    changed._pixels[0, 0, 0, 0] += 1
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
