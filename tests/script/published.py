"""Scripts with the structures that computing centres and projects publish, written for these tests."""

from __future__ import annotations

from pathlib import Path

SCRIPTS = tuple(sorted((Path(__file__).parent / "scripts").glob("*.sbatch")))
