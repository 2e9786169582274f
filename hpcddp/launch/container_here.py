"""Whether a container can start and show what its tasks need, as far as this machine can know."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcddp.launch.submission import Cluster
from hpcddp.launch.submittable import Obstacle
from hpcddp.slurm import commands
from hpcddp.spec.environment import Container, unmountable
from hpcddp.spec.job import JobSpec

_PYXIS_OPTION = "--container-image"


def container_obstacles(spec: JobSpec, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield what is in the way of the job's container.

    Args:
        spec: the job.
        cluster: where it goes.
        environment: the submitter's environment.
    """
    container = spec.environment.container
    if container is None:
        return
    if container.runtime == "pyxis":
        yield from _pyxis(cluster, environment)
    elif not (spec.environment.modules or spec.environment.setup):
        yield from _apptainer(cluster, environment)
    yield from _files(container, cluster)


def _pyxis(cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    if cluster == "local":
        yield Obstacle(
            sentence="environment.container.runtime is pyxis, which is a part of srun, and this machine is no cluster; "
            "write runtime: apptainer, or submit to Slurm"
        )
    elif not commands.srun_knows(_PYXIS_OPTION, environment):
        yield Obstacle(
            sentence="environment.container.runtime is pyxis, and srun has no --container-image here; the job ends at "
            "its start unless its nodes have pyxis (runtime: apptainer is the other choice)",
            certain=False,
        )


def _apptainer(cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    if shutil.which("apptainer", path=environment.get("PATH")) is not None:
        return
    here = cluster == "local"
    yield Obstacle(
        sentence="environment.container.runtime is apptainer, which was not found here; "
        + ("install it" if here else "the job ends at its start unless its nodes have it")
        + ", or load its module in environment.modules",
        certain=here,
    )


def _files(container: Container, cluster: Cluster) -> Iterator[Obstacle]:
    here = Path.cwd()
    if (held := unmountable(str(here), container.runtime)) is not None:
        yield Obstacle(
            sentence=f"the directory of submission is {str(here)!r}, which holds {held}, and {container.runtime} "
            "cannot mount such a path; submit from another directory"
        )
    if container.image_file is not None and not Path(container.image_file).exists():
        yield Obstacle(
            sentence=f"environment.container.image is {container.image!r}, and there is no such file; correct it, or "
            "name an image in a registry (docker://...)"
        )
    for mount in container.mounted:
        if not Path(mount.source).exists():
            yield Obstacle(
                sentence=f"environment.container.mounts names {mount.source!r}, which is not here; correct it, unless "
                "the nodes have it",
                certain=cluster == "local",
            )
