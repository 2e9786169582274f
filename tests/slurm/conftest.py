"""Every test in this folder runs on one real Slurm of four hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.live import Sandbox
from tests.slurm.play import Plays, billings_of
from tests.slurm.sandboxes import QUICK, sandbox_with


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
    # Plays go on beside each other.
    if "sandbox" in request.fixturenames and "plays" not in request.fixturenames:
        request.getfixturevalue("sandbox").cancel_all()


@pytest.fixture(scope="session")
def plays(
    request: pytest.FixtureRequest, sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Plays]:
    plays = Plays(billings_of(request.session.items), sandbox, tmp_path_factory.mktemp("plays"))
    yield plays
    plays.close()


@pytest.fixture
def played(request: pytest.FixtureRequest, plays: Plays) -> Any:
    """What the play of this test returned."""
    (billing,) = billings_of([request.node])
    return plays.outcome(billing.play)
