"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A busy machine makes an example slow, never wrong.
settings.register_profile("hpcddp", deadline=None)
settings.load_profile("hpcddp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="Write the golden scripts anew; a person reads the difference."
    )
