from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Build the wheel, offline, and return the directory that it was unpacked into."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=PROJECT,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    unpacked = tmp_path / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return unpacked


def test_a_wheel_renders_what_a_checkout_renders(installed: Path, tmp_path: Path) -> None:
    def render(where: Path) -> bytes:
        # -P: the working directory must not be where the package comes from.
        command = [sys.executable, "-P", "-m", "hpcddp", "render", str(PROJECT / "jobs" / "resnet50_imagenet.yaml")]
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(where)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True).stdout

    with (installed / "hpcddp" / "_templates" / "sbatch.sh.j2").open("a") as template:
        template.write("# from the wheel\n")
    assert render(installed) == render(PROJECT) + b"# from the wheel\n"
