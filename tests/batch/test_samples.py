from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.batch.samples import IMAGE_EXTENSIONS, SampleCount, count_samples
from hpcddp.jobfile.sections import Batch, Train
from tests.messages import GoldenMessages


def count(directory: Path, **fields: Any) -> SampleCount:
    train = Train(**{"model": "resnet18", **fields})
    return count_samples(train, Batch(global_batch_size=8), directory=directory, python=sys.executable)


@pytest.mark.parametrize(("dataset", "samples"), [("digits", 1437), ("cifar10", 50_000), ("synthetic", 1024)])
def test_built_in_datasets_are_looked_up(tmp_path: Path, dataset: str, samples: int) -> None:
    assert count(tmp_path, dataset=dataset, data_dir="nowhere") == SampleCount(samples)


def test_the_table_counts_the_digits_that_scikit_learn_ships() -> None:
    from sklearn.datasets import load_digits

    images = len(load_digits().images)
    assert (images - len(range(0, images, 5)), len(range(0, images, 5))) == (1437, 360)


def test_synthetic_data_have_as_many_samples_as_asked_for(tmp_path: Path) -> None:
    assert count(tmp_path, dataset="synthetic", dataset_args={"samples": 77}) == SampleCount(77)


@pytest.mark.parametrize("samples", ["many", 0, True, None, 1.5])
def test_a_synthetic_size_that_is_no_size_is_unknown(tmp_path: Path, samples: object, golden: GoldenMessages) -> None:
    found = count(tmp_path, dataset="synthetic", dataset_args={"samples": samples})
    assert found.samples is None
    note = golden.message(found.note)
    assert f"samples is unknown: train.dataset_args.samples is {samples!r}," in note
    assert note.endswith(" 1 or more; give it with --samples.")


def test_an_image_folder_is_counted_as_torchvision_does(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import IMG_EXTENSIONS

    assert set(IMAGE_EXTENSIONS) == set(IMG_EXTENSIONS)
    names = ["train/cat/a.jpg", "train/cat/b.JPEG", "train/cat/deep/c.png", "train/dog/d.webp", "train/dog/.e.bmp"]
    for name in [*names, "train/cat/notes.txt", "train/stray.jpg", "val/cat/f.jpg"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "train" / "bird").symlink_to(tmp_path / "train" / "dog")
    assert count(tmp_path.parent, dataset="imagefolder", data_dir=tmp_path.name) == SampleCount(7, classes=3)
    assert len(ImageFolder(tmp_path / "train")) == 7


def test_a_missing_image_folder_is_unknown_with_a_note(tmp_path: Path, golden: GoldenMessages) -> None:
    found = count(tmp_path, dataset="imagefolder", data_dir="/nowhere/images")
    assert found.samples is None
    note = golden.message(found.note)
    assert "samples is unknown: /nowhere/images/train cannot be read" in note
    assert note.endswith("; give it with --samples.")


def test_a_folder_without_images_is_unknown_with_a_note(tmp_path: Path, golden: GoldenMessages) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    found = count(tmp_path, dataset="imagefolder", data_dir=str(tmp_path))
    assert found.samples is None
    note = golden.message(found.note)
    assert f"samples is unknown: no image lies under {tmp_path}/train/<class>/;" in note
    assert note.endswith("; give it with --samples.")


def test_an_own_dataset_is_made_and_measured(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make(split, size): return range(size if split == 'train' else 1)\n")
    assert count(tmp_path, dataset="mine:make", dataset_args={"size": 321}, num_classes=2) == SampleCount(321)


def test_an_own_dataset_that_fails_is_unknown_with_its_reason(tmp_path: Path, golden: GoldenMessages) -> None:
    found = count(tmp_path, dataset="missing_module_of_mine:make")
    assert found.samples is None
    note = golden.message(found.note)
    assert "samples is unknown: train.dataset missing_module_of_mine:make " in note
    assert "(ModuleNotFoundError: No module named 'missing_module_of_mine')" in note
    assert note.endswith("; give it with --samples.")
