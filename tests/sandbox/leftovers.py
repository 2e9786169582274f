"""What a sandbox could leave behind on the machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpcddp.sandbox.state import Sandbox


def leftovers(sandbox: Sandbox) -> list[str]:
    """Return what is still there of a sandbox, in words; a namespace lives as long as a process or a mount of it."""
    token = sandbox.token[:8]
    found = [f"process {pid}" for pid in _processes(str(sandbox.directory))]
    found += [f"mount {line}" for line in _mounts() if str(sandbox.directory) in line or token in line]
    found += [f"interface {path.name}" for path in Path("/sys/class/net").iterdir() if token in path.name]
    found += [f"namespace {path}" for path in Path("/run/netns").glob(f"*{token}*")]
    found += [f"control group {path}" for path in Path("/sys/fs/cgroup").glob(f"*/*{token}*")]
    if sandbox.directory.exists():
        found.append(f"directory {sandbox.directory}")
    return found


def _processes(text: str) -> list[str]:
    """Return the processes whose arguments or environment hold the text: more than those that the sandbox looks for."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            held = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if text.encode() in held:
                found.append(process.name)
    return found


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()
