"""The documentation site is built without a warning, and shows every page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcddp

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SECRET = "kept-out-of-every-page"
pytestmark = pytest.mark.depends_on("docs", "scripts/build-docs", "pyproject.toml", "tests/test_site.py")


def build(source: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as scripts/build-docs does."""
    script = (ROOT / "scripts" / "build-docs").read_text(encoding="utf-8")
    found = re.search(r"-m sphinx (.*) docs ", script)
    assert found is not None
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *found[1].split(), str(source), str(directory)],
        cwd=ROOT,
        env={**os.environ, "HPCDDP_TEST_SECRET": SECRET},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = build(DOCS, directory)
    assert (done.returncode, done.stderr) == (0, "")
    return directory


def test_every_page_is_built_and_can_be_reached_from_the_start_page(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md") if "_build" not in path.parts}
    start = (site / "index.html").read_text(encoding="utf-8")
    assert len(pages) > 40
    assert [str(page) for page in sorted(pages) if not (site / page).exists()] == []
    assert [str(page) for page in sorted(pages) if f'href="{page}"' not in start and page.name != "index.html"] == []


def test_a_link_to_a_file_of_the_repository_is_shown_as_its_path(site: Path) -> None:
    page = (site / "design" / "decisions.html").read_text(encoding="utf-8")
    assert "hpcddp/task/exchange.py</span></code>" in page
    assert not (site / "_downloads").exists()


def test_no_page_shows_the_environment_of_who_builds_the_site(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.is_file()]
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []


def test_the_reference_has_every_name_of_the_public_interface(site: Path) -> None:
    page = (site / "python-api.html").read_text(encoding="utf-8")
    public = [name for name in hpcddp.__all__ if not name.startswith("__")]
    assert len(public) > 20
    assert [name for name in public if f'id="hpcddp.{name}"' not in page] == []


def test_a_new_page_needs_no_list_and_a_wrong_link_fails_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "commands").mkdir(parents=True)
    (docs / "_static").mkdir()
    (docs / "conf.py").write_text((DOCS / "conf.py").read_text(encoding="utf-8"), encoding="utf-8")
    (docs / "_static" / "site.css").touch()
    (docs / "index.md").write_text("# Start\n", encoding="utf-8")
    (docs / "new.md").write_text("# New\n\n[commands](commands/README.md)\n", encoding="utf-8")
    (docs / "commands" / "README.md").write_text("# Commands\n", encoding="utf-8")
    (docs / "commands" / "one.md").write_text("# One\n", encoding="utf-8")
    done = build(docs, tmp_path / "right")
    assert (done.returncode, done.stderr) == (0, "")
    (docs / "new.md").write_text("# New\n\n[no page](absent.md), [no heading](commands/one.md#absent)\n")
    done = build(docs, tmp_path / "wrong")
    assert done.returncode == 1
    assert done.stderr.count("[myst.xref_missing]") == 2
