"""The Slurm of two hosts on this machine, on which a rehearsal causes Slurm's own faults."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hpcddp.sandbox import sandbox as sandboxes
from hpcddp.sandbox.request import Request, default_hosts

_HOSTS: Final = 2


@contextmanager
def sandbox_of_two_hosts(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start a sandbox of two hosts, let this process use it in the block, and remove it at the end.

    Args:
        environment: this process's environment.

    Returns:
        The environment with the sandbox's Slurm.

    Raises:
        HpcddpError: the sandbox does not start; the message says what is missing.
    """
    with tempfile.TemporaryDirectory(prefix="hpcddp-") as directory:
        request = Request(
            directory=Path(directory).resolve(),
            hosts=default_hosts(),
            nodes=_HOSTS,
            cpus_per_node=max(2, os.cpu_count() or 1),
            gpus_per_node=0,
        )
        running = sandboxes.up(request, environment=environment)
        own_configuration = os.environ.get("SLURM_CONF")
        # Slurm's commands read it from this process's own environment.
        os.environ["SLURM_CONF"] = str(running.slurm_conf)
        try:
            yield sandboxes.slurm_environment(running, environment)
        finally:
            del os.environ["SLURM_CONF"]
            if own_configuration is not None:
                os.environ["SLURM_CONF"] = own_configuration
            sandboxes.down(running.directory)
