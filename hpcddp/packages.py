"""What is installed: packages that hpcddp does not install by itself, and the files that it ships."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from hpcddp.errors import UserError

# The names under which packages of the extra are installed, where they differ from those under which they are imported.
_DISTRIBUTIONS: Final[Mapping[str, str]] = MappingProxyType({"sklearn": "scikit-learn"})


class MissingPackageError(UserError):
    """This Python does not have a package that a training needs."""

    kind = "missing_package"


def is_installed(name: str) -> bool:
    """Return whether this Python has a package; imports nothing.

    A folder of that name, such as the ``wandb/`` that W&B leaves behind, is no package.
    """
    return _folder_of(name) is not None


def _folder_of(package: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def missing_packages(purpose: str, names: Iterable[str], python: str) -> str:
    """Return the sentence about packages that an interpreter does not have.

    Args:
        purpose: what needs them, such as ``train.dataset: digits``.
        names: the packages of the extra ``train``, as they are imported.
        python: the interpreter.
    """
    listed = ", ".join(_DISTRIBUTIONS.get(name, name) for name in names)
    return (
        f"{purpose} needs {listed}, which {python} does not have; run: {shlex.quote(python)} -m pip install "
        "'hpcddp[train]'"
    )


def require(purpose: str, *names: str) -> None:
    """Check that this Python has packages of the extra ``train``.

    Args:
        purpose: what needs them.
        names: the packages, as they are imported.

    Raises:
        MissingPackageError: one is missing; the message has the command that installs it.
    """
    missing = [name for name in names if not is_installed(name)]
    if missing:
        raise MissingPackageError(missing_packages(purpose, missing, sys.executable))


def require_folder(purpose: str, package: str) -> Path:
    """Return the folder of a package of the extra ``train``; imports nothing.

    Args:
        purpose: what needs it.
        package: its name, as it is imported.

    Raises:
        MissingPackageError: it is missing; the message has the command that installs it.
    """
    folder = _folder_of(package)
    if folder is None:
        raise MissingPackageError(missing_packages(purpose, [package], sys.executable))
    return folder


def pip_requirement() -> str:
    """Return what ``pip install`` takes to install this hpcddp into another Python.

    Returns:
        The directory or the file that it was installed from; its name if it came from a package index.
    """
    # These take some milliseconds, and every command imports this file.
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    with suppress(PackageNotFoundError, ValueError, KeyError, TypeError):
        # PEP 610
        url = urlsplit(json.loads(distribution("hpcddp").read_text("direct_url.json") or "{}")["url"])
        if url.scheme == "file":
            return unquote(url.path)
    return "hpcddp"


def shipped_directory(name: str) -> Path:
    """Return a directory of files that hpcddp ships, ``jobs`` or ``templates``: in the package, or in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / f"_{name}"
    return installed if installed.is_dir() else package.parent / name
