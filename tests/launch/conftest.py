from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    made.set_up()
    yield made
    # A test that failed must not leave a task waiting.
    (made.record / "hold").unlink(missing_ok=True)
