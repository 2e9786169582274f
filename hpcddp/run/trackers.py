"""Which tracker can be used: what a Python installation has."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

from hpcddp.spec.job import Trackers

PACKAGES: Mapping[str, str] = MappingProxyType(
    {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
)
"""The smallest package that a tracker needs."""


def is_installed(name: str) -> bool:
    """Return whether this Python has a tracker's package; imports nothing.

    A folder of that name, such as the ``wandb/`` that W&B leaves behind, is no package.
    """
    found = find_spec(name)
    return found is not None and found.origin is not None


def chosen(trackers: Trackers) -> tuple[str, ...]:
    """Return the trackers of a job: the named ones, or TensorBoard where this Python has it."""
    if trackers.use is not None:
        return trackers.use
    return ("tensorboard",) if is_installed("tensorboard") else ()
