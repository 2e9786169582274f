from __future__ import annotations

from pathlib import Path

import pytest

from hpcddp.jobfile.fields import TORCHVISION_MODELS
from hpcddp.jobfile.problems import MOST_PROBLEMS, JobFileError
from hpcddp.jobfile.read import load_job


def test_the_table_of_models_is_torchvisions() -> None:
    from torchvision import models

    assert list(TORCHVISION_MODELS) == sorted(models.list_models(module=models))


ENDLESS = {
    "duplicates": "name: a\n" * 60_000,
    "unknown keys": "".join(f"k{number}: 1\n" for number in range(5_000)),
    "unknown keys of a section": "resources:\n" + "".join(f"  k{number}: 1\n" for number in range(5_000)),
    "anchors": "modules: [" + "&a b, " * 60_000 + "]\n",
    "too many items": "environment: {modules: [" + "1, " * 100_000 + "]}\n",
    "an anchor before a key": "&a name: x\n",
    "wrong variables": "environment:\n  env:\n" + "".join(f"    {number}: 1\n" for number in range(5_000)),
    "nested": "a: [" + "[" * 300_000,
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_file_of_many_problems_is_told_the_first_of_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(JobFileError) as caught:
        load_job(path)
    assert len(caught.value.problems) <= MOST_PROBLEMS
    assert len(str(caught.value).splitlines()) <= MOST_PROBLEMS + 1
