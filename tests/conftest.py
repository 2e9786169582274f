"""What all tests share."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.messages import GoldenMessages
from tests.slurm_version import expected_failure, slurm_version

# A busy machine makes an example slow, never wrong.
settings.register_profile("hpcddp", deadline=None)
settings.load_profile("hpcddp")

# Files that run jobs, shells by the hundred or long commands on this machine, build a wheel, or wait for processes.
SLOW = {
    "manage/test_report_of_a_real_run.py",
    "submission/test_commands_local.py",
    "submission/test_render_environment_properties.py",
    "submission/test_render_properties.py",
    "submission/test_render_sweep.py",
    "submission/test_render_wheel.py",
    "submission/test_resume.py",
    "submission/test_submit_environments.py",
    "submission/test_submit_local.py",
    "task/test_program_ends.py",
    "task/test_signals.py",
    "task/test_task_stops.py",
    "test_fuzz.py",
    "test_data_page.py",
    "test_oldest_versions.py",
    "test_questions.py",
    "test_site.py",
}


HAS_PASSED = pytest.StashKey[bool]()


def pytest_configure() -> None:
    # A shell starts its background jobs with SIGINT ignored, and so would every program of a test be.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str | None:
    version = slurm_version()
    return None if version is None else f"Slurm {version}"


@pytest.fixture(autouse=True, scope="session")
def state_home() -> Iterator[None]:
    """Keep the index of runs out of the home of who runs the tests; programs that tests start inherit this."""
    directory = tempfile.mkdtemp(prefix="hpcddp-state-")
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = directory
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def own_index(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an index of runs of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / f"state-{os.urandom(4).hex()}"))


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GoldenMessages]:
    """Compare messages with the golden file of the test's folder (tests/messages.py)."""
    messages = GoldenMessages(request, {str(tmp_path): "TMP"})
    yield messages
    if request.node.stash.get(HAS_PASSED, False):
        messages.finish()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[HAS_PASSED] = report.passed
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).as_posix() in SLOW:
            item.add_marker(pytest.mark.slow)
        failure = expected_failure(item.iter_markers("fails_on_slurm"), slurm_version() or "0")
        if failure is not None:
            item.add_marker(failure)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="Write the golden files anew; a person reads the difference."
    )
