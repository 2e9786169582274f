from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcddp.batch.samples import OwnDatasetError, count_own_samples, count_samples
from hpcddp.jobfile.sections import Batch, Train
from tests.messages import GoldenMessages
from tests.waiting import wait_until


def measure(directory: Path, source: str, arguments: dict[str, Any] | None = None, timeout_s: float = 60.0) -> int:
    (directory / "mine.py").write_text(source)
    samples, _ = count_own_samples(
        "mine:make", arguments or {}, directory=directory, python=sys.executable, timeout_s=timeout_s
    )
    return samples


def test_what_the_users_code_prints_does_not_disturb_the_answer(tmp_path: Path) -> None:
    source = (
        "import os\nprint('hello')\ndef make(split):\n    os.system('echo 99')\n    print(7)\n    return [1, 2, 3]\n"
    )
    assert measure(tmp_path, source) == 3


def test_arguments_arrive_as_they_were_written(tmp_path: Path) -> None:
    arguments = {"text": "a 'b' \"c\" $HOME \\ \u00e9\n", "numbers": [1, 2.5, None, True]}
    source = f"def make(split, **given): return range(5 if given == {arguments!r} else 6)\n"
    assert measure(tmp_path, source, arguments) == 5


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def make(split): raise RuntimeError('no data today')", "RuntimeError: no data today"),
        ("def make(split): return iter([])", "TypeError: object of type 'list_iterator' has no len()"),
        ("def other(split): return []", "AttributeError: module 'mine' has no attribute 'make'"),
        ("import os\ndef make(split): os._exit(3)", "exit code 3"),
        ("import os\ndef make(split): os._exit(0)", "exit code 0"),
    ],
)
def test_a_dataset_that_cannot_be_made_says_why(tmp_path: Path, source: str, reason: str) -> None:
    with pytest.raises(OwnDatasetError) as caught:
        measure(tmp_path, source)
    assert caught.value.message == f"train.dataset mine:make could not be made ({reason})"


def test_a_missing_interpreter_says_so(tmp_path: Path, golden: GoldenMessages) -> None:
    with pytest.raises(OwnDatasetError, match=r"^train.dataset mine:make ") as caught:
        count_own_samples("mine:make", {}, directory=tmp_path, python="/no/python", timeout_s=60.0)
    assert "No such file or directory: '/no/python'" in golden.message(caught.value)


def test_a_dataset_that_never_ends_is_ended_with_its_children(tmp_path: Path) -> None:
    source = (
        "import os, subprocess, time\n"
        "def make(split):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    open('new', 'w').write(str(child.pid))\n"
        "    os.rename('new', 'pid')\n"
        "    time.sleep(600)\n"
    )
    # A busy machine may need longer until the child has a child of its own.
    for timeout_s in (2, 8, 32, 128):
        with pytest.raises(OwnDatasetError) as caught:
            measure(tmp_path, source, timeout_s=timeout_s)
        assert caught.value.message == f"train.dataset mine:make took longer than {timeout_s} s to make"
        if (tmp_path / "pid").exists():
            break
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not _runs(child), f"the end of process {child}")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def train_section(**changes: Any) -> Train:
    return Train.model_validate({"model": "resnet18", "dataset": "mine:make", **changes})


@pytest.mark.parametrize(
    ("body", "changes", "fails"),
    [
        ("pass", {}, True),
        ("pass", {"num_classes": 3}, False),
        ("classes = ['a', 'b']", {}, False),
        ("targets = [0, 1]", {}, False),
        ("def labels(self): ...", {}, True),
    ],
)
def test_a_plan_says_that_the_number_of_classes_is_missing(
    tmp_path: Path, body: str, changes: dict[str, Any], *, fails: bool, golden: GoldenMessages
) -> None:
    (tmp_path / "mine.py").write_text(
        f"class make(list):\n    def __init__(self, split): super().__init__('ab')\n    {body}\n"
    )
    count = count_samples(
        train_section(**changes), Batch(global_batch_size=8), directory=tmp_path, python=sys.executable
    )
    assert count.samples == 2
    assert (count.note is not None) == fails
    if count.note is not None:
        assert "will fail: train.num_classes is null" in golden.message(count.note)


def test_a_plan_says_that_an_argument_is_unknown_to_the_data_set(tmp_path: Path, golden: GoldenMessages) -> None:
    (tmp_path / "mine.py").write_text("def make(split, size=3): return [0] * size\n")
    count = count_samples(
        train_section(dataset_args={"sise": 4}), Batch(global_batch_size=8), directory=tmp_path, python=sys.executable
    )
    assert count.samples is None
    # Python 3.13 adds a suggestion.
    suggestion = ". Did you mean 'size'?"
    assert "unexpected keyword argument 'sise'" in golden.message(count.note or "", {suggestion: ""})
    assert "would end the job too" in (count.note or "")
