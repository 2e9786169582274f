"""What all tests share."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from tests.environment import isolate_session, isolate_test
from tests.messages import COLLECTED, GoldenMessages
from tests.slurm_version import expected_failure, slurm_version

# A busy machine makes an example slow, never wrong. scripts/test --long asks for the profile "long".
# The same examples each time: who changes one thing is not told about another. New ones are looked for with --long.
settings.register_profile("once", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("once")

# Files that run jobs, shells by the hundred or long commands on this machine, build a wheel, or wait for processes.
SLOW = {
    "manage/test_report_of_a_real_run.py",
    "rehearse/test_rehearse.py",
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


def pytest_configure(config: pytest.Config) -> None:
    isolate_session(config)
    # A shell starts its background jobs with SIGINT ignored, and so would every program of a test be.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str | None:
    version = slurm_version()
    return None if version is None else f"Slurm {version}"


@pytest.fixture(autouse=True)
def isolation(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a user's configuration and an index of runs of its own."""
    isolate_test(tmp_path_factory.getbasetemp() / f"user-{os.urandom(4).hex()}", monkeypatch)


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    # Before -k and -m leave some out.
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).as_posix() in SLOW:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("depends_on_speed"):
            item.add_marker(pytest.mark.flaky(reruns=1))
        subject = item.get_closest_marker("depends_on")
        if subject and config.getoption("--skip-unchanged") and not _has_changed(subject.args):
            reason = f"{', '.join(subject.args)} did not change since the parent commit; scripts/test --long runs it"
            item.add_marker(pytest.mark.skip(reason))
        failure = expected_failure(item.iter_markers("fails_on_slurm"), slurm_version() or "0")
        if failure is not None:
            item.add_marker(failure)


@cache
def _has_changed(paths: tuple[str, ...]) -> bool:
    """Return whether the files differ from those of the parent commit, or no parent commit is known."""
    command = ["git", "diff", "--quiet", "HEAD^", "--", *paths]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, check=False)
    return done.returncode != 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("depends_on_speed")
    # pytest-rerunfailures counts the runs.
    if mark and getattr(item, "execution_count", 1) > 1:
        item.user_properties.append(("second_run", mark.args[0]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skip-unchanged", action="store_true", help="Skip tests whose subject did not change since the parent commit."
    )
    parser.addoption(
        "--update-golden", action="store_true", help="Write the golden files anew; a person reads the difference."
    )
