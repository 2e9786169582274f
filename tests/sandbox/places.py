"""Places for sandboxes, and the user who starts them."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcddp.sandbox import state
from hpcddp.sandbox.state import Sandbox

HPCDDP = (sys.executable, "-P", "-m", "hpcddp", "sandbox")
# Another user id; the right to read stays, since the environment of the tests may be root's alone.
# Since 25.11 Slurm refuses the user nobody.
ORDINARY_USER = pwd.getpwnam("news").pw_uid
AS_ORDINARY_USER = (
    "setpriv",
    f"--reuid={ORDINARY_USER}",
    f"--regid={ORDINARY_USER}",
    "--clear-groups",
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search",
    "--",
)


@dataclass(kw_only=True)
class Place:
    """A directory for one sandbox, and the command that starts and ends it."""

    directory: Path
    prefix: Sequence[str] = ()

    def command(self, verb: str, *options: str) -> tuple[str, ...]:
        return (*self.prefix, *HPCDDP, verb, "--dir", str(self.directory), *options)

    def call(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run(*self.command(verb, *options))

    def up(self, *options: str) -> Sandbox:
        done = self.call("up", "--nodes", "2", *options)
        assert done.returncode == 0, done.stderr
        return self.known()

    def down(self) -> None:
        done = self.call("down")
        assert done.returncode == 0, done.stderr

    def known(self) -> Sandbox:
        sandbox = state.read(self.directory)
        assert sandbox is not None
        return sandbox

    def state(self) -> str:
        return str(json.loads(self.call("status", "--json").stdout)["state"])

    def slurm(self, *argv: str) -> str:
        done = self.run(*self.prefix, *argv)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf")}
        return subprocess.run(argv, cwd="/", env=environment, capture_output=True, text=True, timeout=180, check=False)
