"""How many examples a property test tries: the profile's number, or a share of it where one example is expensive."""

from __future__ import annotations

from hypothesis import settings


def examples(share: float) -> settings:
    """Return settings with a share of the examples of the profile (tests/conftest.py), at least one."""
    return settings(max_examples=max(1, round(share * settings().max_examples)))
