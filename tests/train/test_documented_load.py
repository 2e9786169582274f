"""The line of docs/checkpoints.md that loads a checkpoint without hpcddp."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from hpcddp.run.checkpoints import list_checkpoints
from tests.train.conftest import Training

ROOT = Path(__file__).parents[2]
(LINE,) = re.findall(r"^```python\n(.*)\n```$", (ROOT / "docs" / "checkpoints.md").read_text(), re.MULTILINE)
PROGRAM = """\
import sys
sys.modules["hpcddp"] = None  # an import of it fails
import torch
from torch import nn
shapes = {{name: tensor.shape for name, tensor in torch.load({saved!r}, weights_only=True).items()}}
model = nn.Module()
for name, shape in shapes.items():
    place = model
    *folders, last = name.split(".")
    for folder in folders:
        if not hasattr(place, folder):
            place.add_module(folder, nn.Module())
        place = getattr(place, folder)
    place.register_parameter(last, nn.Parameter(torch.full(shape, torch.nan)))
{line}
print(all(parameter.isfinite().all() for parameter in model.parameters()), len(shapes))
"""


def test_the_line_loads_a_checkpoint_into_a_model_without_hpcddp(training: Training, tmp_path: Path) -> None:
    training.train()
    (saved, *_) = list_checkpoints(training.run.checkpoints)
    folder = tmp_path / "checkpoints" / "step-000123"
    folder.mkdir(parents=True)
    shutil.copy(saved / "model.pt", folder / "model.pt")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(saved=str(saved / "model.pt"), line=LINE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    loaded, tensors = done.stdout.split()
    assert loaded == "True"
    assert int(tensors) > 0
