"""Libraries that take long to import, and a Python in which libraries are not installed."""

from __future__ import annotations

import subprocess
import sys

SLOW = {"torch", "torchvision", "submitit", "asyncio", "numpy", "sklearn"}

# Makes every library of ``names`` unimportable, as where it is not installed.
UNINSTALL = """
import sys

class Uninstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Uninstalled())
"""


def run_python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
