"""What would make a job fail although its file is right, as far as the machine that submits can know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcddp.errors import UserError
from hpcddp.launch.first_plan import first_plan
from hpcddp.launch.submission import Cluster

if TYPE_CHECKING:
    from hpcddp.spec.job import JobSpec


class SubmissionError(UserError):
    """The job cannot be submitted as it stands."""

    kind = "submission"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Something that is in the job's way.

    Args:
        sentence: what it is, and the way out.
        certain: whether the job cannot run; False where only the nodes that it gets can know.
    """

    sentence: str
    certain: bool = True


Check = Callable[["JobSpec", Cluster, Mapping[str, str]], Iterator[Obstacle]]
"""Looks for obstacles, given the job, where it goes and the submitter's environment."""


def check_submittable(spec: JobSpec, cluster: Cluster, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Find everything that is in the job's way.

    Returns:
        What the user should know although the job may run, a sentence each.

    Raises:
        SubmissionError: the job cannot run; every reason is named.
        PlanError: its batch cannot be split as asked.
    """
    return _check(_checks(), spec, cluster, environment)


def check_again(spec: JobSpec, cluster: Cluster, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Find what is in the way of an element of a sweep, where ``check_submittable`` was asked about another element.

    Raises:
        SubmissionError: the job cannot run; every reason is named.
        PlanError: its batch cannot be split as asked.
    """
    from hpcddp.launch.command_here import command_obstacles

    return _check((command_obstacles, _data), spec, cluster, environment)


def _check(checks: Iterable[Check], spec: JobSpec, cluster: Cluster, environment: Mapping[str, str]) -> tuple[str, ...]:
    found = [obstacle for check in checks for obstacle in check(spec, cluster, environment)]
    errors = [obstacle.sentence for obstacle in found if obstacle.certain]
    if errors:
        raise SubmissionError("\n".join(errors))
    if spec.batch.global_batch_size is not None:
        first_plan(spec)
    return tuple(obstacle.sentence for obstacle in found)


def _checks() -> tuple[Check, ...]:
    from hpcddp.launch.command_here import command_obstacles
    from hpcddp.launch.container_here import container_obstacles
    from hpcddp.launch.environment_here import environment_obstacles
    from hpcddp.launch.trackers_here import tracker_obstacles

    here = (command_obstacles, tracker_obstacles, _data)
    return (_one_host, _secrets, environment_obstacles, container_obstacles, *here)


def _one_host(spec: JobSpec, cluster: Cluster, _: Mapping[str, str]) -> Iterator[Obstacle]:
    if cluster == "local" and spec.resources.nodes > 1:
        yield Obstacle(
            sentence=f"resources.nodes is {spec.resources.nodes}, but this machine is one node; "
            "add --set resources.nodes=1"
        )


def _secrets(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    unset = [name for name in spec.environment.pass_env if name not in environment]
    if unset:
        yield Obstacle(
            sentence=f"environment.pass_env names {', '.join(unset)}, not set here; export it, or remove the name"
        )


def _data(spec: JobSpec, _: Cluster, __: Mapping[str, str]) -> Iterator[Obstacle]:
    data_dir = spec.train.data_dir if spec.train else None
    if data_dir is None:
        return
    container = spec.environment.container
    mounts = container.mounted if container is not None else ()
    here = next((path for mount in mounts if (path := mount.host_path(data_dir)) is not None), data_dir)
    if not Path(here).is_dir():
        shown = "" if here == data_dir else f", which is {here!r} here"
        yield Obstacle(
            sentence=f"train.data_dir is {data_dir!r}{shown}, and there is no such directory; "
            "give the directory that holds the data"
        )
