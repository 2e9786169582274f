"""The environment of the tests and of what they start, without the settings of the user or of a job around the tests.

Like tox, the tests keep the variables that are listed here, and no other. hpcddp, torch, Slurm and git read many, of
which a user, a cluster's modules or an outer job may have set any.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import pytest

_ROOT = Path(__file__).parents[1]

_KEPT: Final = (
    # The user and the machine. The caches stay where they are: they hold packages and fonts, and no settings.
    "HOME", "LOGNAME", "PATH", "TMPDIR", "USER", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR",
    # sudo: git trusts the checkout of the user who called it.
    "SUDO_UID",
    # Libraries, interpreters and devices.
    "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NIX_*", "NVIDIA_*", "OPENBLAS_*", "PYENV_*", "PYTHONHOME",
    # Where pip and uv find packages.
    "*_CA_BUNDLE", "*_PROXY", "*_proxy", "NETRC", "PIP_*", "SSL_CERT_*",
    "UV_CACHE_DIR", "UV_CONFIG_FILE", "UV_FIND_LINKS", "UV_*INDEX*",
    # The test run itself.
    "CI", "COVERAGE_*", "HPCDDP_REHEARSALS", "HPCDDP_TEST_CHECKOUTS", "HYPOTHESIS_*", "PYTEST_*",
)  # fmt: skip


def isolate_session(config: pytest.Config) -> None:
    """Clear the environment of this process for the whole session: the session's fixtures start programs too."""
    directory = Path(tempfile.mkdtemp(prefix="hpcddp-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    variables = _isolated(os.environ.copy(), directory)
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()


def isolate_test(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test a user's configuration and an index of runs of its own.

    Args:
        directory: a directory that does not exist.
        monkeypatch: the test's.
    """
    for name, value in _homes(directory).items():
        monkeypatch.setenv(name, value)


def _isolated(environment: dict[str, str], directory: Path) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if any(fnmatchcase(name, pattern) for pattern in _KEPT)}
    git_configuration = directory / "gitconfig"
    # A container or sudo may run the tests as another user than the owner of the checkout.
    git_configuration.write_text(f'[safe]\n\tdirectory = "{_ROOT}"\n', encoding="utf-8")
    return {
        **_package_sources(environment),
        **kept,
        **_homes(directory),
        "GIT_CONFIG_GLOBAL": str(git_configuration),
        "GIT_CONFIG_NOSYSTEM": "1",
        # accelerate reads its settings from there.
        "HF_HOME": str(directory / "huggingface"),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
    }


def _homes(directory: Path) -> dict[str, str]:
    return {f"XDG_{name}_HOME": str(directory / name.lower()) for name in ("CONFIG", "DATA", "STATE")}


def _package_sources(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that name the user's files for pip and uv: these say which package index can be reached."""
    home = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = {"PIP_CONFIG_FILE": home / "pip" / "pip.conf", "UV_CONFIG_FILE": home / "uv" / "uv.toml"}
    return {name: str(file) for name, file in files.items() if file.is_file()}
