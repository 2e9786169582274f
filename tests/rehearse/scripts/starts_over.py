"""The second attempt looks for its checkpoint in another directory than the first one."""

from __future__ import annotations

import os
from pathlib import Path

from training import Training, main


class Spoiled(Training):
    @property
    def directory(self) -> Path:
        """Where this attempt saves."""
        directory = super().directory / os.environ["HPCDDP_ATTEMPT"]
        directory.mkdir(exist_ok=True)
        return directory


if __name__ == "__main__":
    main(Spoiled)
