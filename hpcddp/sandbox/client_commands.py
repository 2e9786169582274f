"""Slurm's client commands of a sandbox whose Slurm is in another root directory.

A directory of the sandbox, which its user puts first in ``PATH``, holds them: on this machine as scripts that enter the
sandbox's mount namespace, in the sandbox, whose jobs inherit ``PATH``, as links to the commands themselves.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from hpcddp.run.files import write_text
from hpcddp.sandbox import root as roots
from hpcddp.sandbox.programs import Command
from hpcddp.sandbox.state import Sandbox

_NAMES = (
    "sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "scrontab", "sdiag", "sinfo",
    "sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger",
)  # fmt: skip
# nsenter's own option for the working directory takes one that is outside of the namespace, before version 2.38.
_SCRIPT = """\
#!/bin/sh
# Runs {name} of the sandbox in {directory}.
if [ "$(readlink /proc/{manager}/ns/mnt)" != '{namespace}' ]; then
    echo "{name}: the sandbox in {directory} has stopped; hpcddp sandbox down removes what it left" >&2
    exit 1
fi
exec nsenter --target={manager} --mount -- env --chdir="$PWD" {program} "$@"
"""


def write(sandbox: Sandbox, slurm_root: Path, *, manager: int) -> Command:
    """Write the commands.

    Args:
        slurm_root: the root directory of its Slurm.
        manager: the daemon manager's process id.

    Returns:
        The command with which the daemon manager shows them to the sandbox.
    """
    links = sandbox.directory / "links"
    links.mkdir()
    sandbox.client_commands.mkdir()
    namespace = str(Path(f"/proc/{manager}/ns/mnt").readlink())
    for name in _NAMES:
        program = roots.find_program(slurm_root, name)
        if program is None:
            continue
        (links / name).symlink_to(program)
        script = sandbox.client_commands / name
        text = _SCRIPT.format(
            name=name,
            directory=sandbox.directory,
            manager=manager,
            namespace=namespace,
            program=shlex.quote(str(program)),
        )
        write_text(script, text)
        script.chmod(0o755)
    return Command(argv=("mount", "--bind", str(links), str(sandbox.client_commands)))
