"""Every test in this folder runs on one real Slurm of four hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.sandbox import Sandbox
from tests.cluster.sandboxes import QUICK, sandbox_with
from tests.cluster.scenarios import Scenarios, scenarios_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    with sandbox_with(*QUICK) as started:
        yield started


@pytest.fixture(autouse=True)
def _no_job_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """One test's jobs, left by a failure too, do not hold up the next test."""
    yield
    # Scenarios run concurrently, and cancel their jobs at the end of the session.
    if "sandbox" in request.fixturenames and "scenarios" not in request.fixturenames:
        request.getfixturevalue("sandbox").cancel_all()


@pytest.fixture(scope="session")
def scenarios(
    request: pytest.FixtureRequest, sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scenarios]:
    scenarios = Scenarios(scenarios_of(request.session.items), sandbox, tmp_path_factory.mktemp("scenarios"))
    yield scenarios
    scenarios.close()


@pytest.fixture
def scenario_result(request: pytest.FixtureRequest, scenarios: Scenarios) -> Any:
    """What the scenario of this test returned."""
    (scheduled,) = scenarios_of([request.node])
    return scenarios.result_of(scheduled.scenario)
