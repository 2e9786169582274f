"""A small file system that a test can fill: a tmpfs of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *, size: str = "1m", inodes: int = 128) -> Iterator[Path]:
    """Mount a small file system on a folder, which is made if it is missing; skip the test where that is impossible."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a file system")
    folder.mkdir(exist_ok=True)
    options = f"size={size},nr_inodes={inodes},mode=0700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=False)
    if done.returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_blocks(disk: Path) -> None:
    """Use up all bytes of a file system."""
    with (disk / "ballast-bytes").open("ab", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(4096))


def fill_inodes(disk: Path) -> None:
    """Use up all inodes of a file system; bytes are left."""
    with suppress(OSError):
        for number in range(1_000_000):
            (disk / f"ballast-{number}").touch(exist_ok=False)


def make_room(disk: Path) -> None:
    """Remove what has filled a file system."""
    for ballast in disk.glob("ballast-*"):
        ballast.unlink()


FILLS: dict[str, Callable[[Path], None]] = {"bytes": fill_blocks, "inodes": fill_inodes}
"""The two ways in which a file system is full."""
