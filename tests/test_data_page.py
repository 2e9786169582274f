"""The job files of docs/data-on-nodes.md are valid, and the one with data on a node trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.command_line import hpcddp

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "data-on-nodes.md").read_text()
SECTIONS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TRAIN = "batch: {global_batch_size: 4}\n"


def called(directory: Path, *words: str) -> str:
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(directory)}
    done = hpcddp(directory, *words, environment={**os.environ, **more})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_of_the_page_is_accepted(section: str, tmp_path: Path) -> None:
    rest = f"  model: resnet18\n{TRAIN}" if "train:" in section else "command: [python, train.py]\n"
    (tmp_path / "job.yaml").write_text(f"name: a\n{section}{rest}")
    script = called(tmp_path, "render", "job.yaml")
    assert ("hpcddp.supervise stage" in script) == ("stage:" in section)


@pytest.mark.depends_on("docs/data-on-nodes.md", "hpcddp/supervise/stage.py", "hpcddp/train", "tests/test_data_page.py")
def test_the_built_in_training_reads_the_copy(tmp_path: Path) -> None:
    (section,) = (section for section in SECTIONS if "imagefolder" in section)
    for split in ("train", "val"):
        for label, colour in (("black", 0), ("white", 255)):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40, 40), (colour,) * 3).save(folder / f"{number}.png")
    archive, target = tmp_path / "images.tar", tmp_path / "node" / "images"
    subprocess.run(["tar", "-cf", str(archive), "-C", str(tmp_path / "images"), "."], check=True, timeout=60)
    section = section.replace("/data/imagenet.tar", str(archive)).replace("/scratch/ada/imagenet", str(target))
    more = "  dataset_args: {image_size: 32, resize: 32}\n  model: resnet18\n  epochs: 1\n"
    (tmp_path / "job.yaml").write_text(f"name: a\n{section}{more}{TRAIN}")
    called(tmp_path, "submit", "job.yaml", "--cluster", "local", "--follow")
    (result,) = tmp_path.glob("runs/a/*/result.json")
    assert json.loads(result.read_text())["status"] == "finished"
    assert (target / "train" / "white" / "0.png").is_file()
