from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submission.script_runner import ScriptRunner


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[ScriptRunner]:
    made = ScriptRunner(tmp_path)
    made.set_up()
    yield made
    # A test that failed must not leave a task waiting.
    (made.record / "hold").unlink(missing_ok=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a directory beside ``bin``, the first place where programs are looked for."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path
