"""Places for the sandboxes of a test, which end with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.sandbox.places import ORDINARY_USER, Place


@pytest.fixture
def new_place() -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(*, prefix: Sequence[str] = ()) -> Place:
        parent = Path(tempfile.mkdtemp(prefix="hpcddp-"))
        if prefix:
            os.chown(parent, ORDINARY_USER, ORDINARY_USER)
        places.append(Place(directory=parent / "sandbox", prefix=prefix))
        return places[-1]

    yield make
    for place in places:
        place.call("down")
        shutil.rmtree(place.directory.parent)
