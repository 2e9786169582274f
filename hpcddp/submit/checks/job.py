"""The checks of a job before it is submitted: what would make it fail, as far as the submitting machine can know."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec
from hpcddp.run.metrics import PACKAGES, is_installed
from hpcddp.submit.checks.command import command_obstacles
from hpcddp.submit.checks.environment import container_obstacles, environment_obstacles
from hpcddp.submit.checks.obstacle import Check, Obstacle, SubmissionError
from hpcddp.submit.request import SubmitRequest


def _too_many_nodes(spec: JobSpec, cluster: Cluster, _: Mapping[str, str]) -> Iterator[Obstacle]:
    if cluster == "local" and spec.resources.nodes > 1:
        yield Obstacle(
            sentence=f"resources.nodes is {spec.resources.nodes}, but this machine is one node; "
            "add --set resources.nodes=1"
        )


def _unset_variables(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    unset = [name for name in spec.environment.pass_env if name not in environment]
    if unset:
        yield Obstacle(
            sentence=f"environment.pass_env names {', '.join(unset)}, not set here; export it, or remove the name"
        )


def _missing_data(spec: JobSpec, _: Cluster, __: Mapping[str, str]) -> Iterator[Obstacle]:
    data_dir = spec.train.data_dir if spec.train else None
    if data_dir is None:
        return
    container = spec.environment.container
    mounts = container.mounted if container is not None else ()
    path = next((found for mount in mounts if (found := mount.host_path(data_dir)) is not None), data_dir)
    if not Path(path).is_dir():
        shown = "" if path == data_dir else f", which is {path!r} here"
        yield Obstacle(
            sentence=f"train.data_dir is {data_dir!r}{shown}, and there is no such directory; "
            "give the directory that holds the data"
        )


_SERVER = "MLFLOW_TRACKING_URI"


def _tracker_obstacles(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the trackers that are not installed, and MLflow without the address of its server.

    Only this interpreter is looked at: with another one, a missing tracker is a warning of the task.
    """
    names = spec.trackers.use or ()
    if _runs_in_this_python(spec):
        for name in names:
            if not is_installed(name):
                yield Obstacle(
                    sentence=f"trackers.use names {name}, which {sys.executable} does not have; run: "
                    f"{shlex.quote(sys.executable)} -m pip install {PACKAGES[name]}, or remove the name"
                )
    known = spec.trackers.tracking_uri or environment.get(_SERVER) or spec.environment.env.get(_SERVER)
    if "mlflow" in names and not known:
        yield Obstacle(
            sentence=f"trackers.use names mlflow, and nothing says where its server is; export {_SERVER}, or write it "
            "into trackers.tracking_uri"
        )


def _runs_in_this_python(spec: JobSpec) -> bool:
    environment = spec.environment
    others = (environment.conda, environment.venv, environment.uv, environment.container)
    return environment.python in {None, sys.executable} and not any(others)


CHECKS_OF_ELEMENT: tuple[Check, ...] = (command_obstacles, _missing_data)
"""The checks whose result may differ between the elements of a sweep, which share one environment."""
CHECKS: tuple[Check, ...] = (
    _too_many_nodes,
    _unset_variables,
    environment_obstacles,
    container_obstacles,
    command_obstacles,
    _tracker_obstacles,
    _missing_data,
)
"""All checks, in the order of their messages."""


def check_submittable(request: SubmitRequest, checks: Sequence[Check] = CHECKS) -> tuple[str, ...]:
    """Check a job that has no sweep.

    Args:
        request: the request.
        checks: the checks to run.

    Returns:
        What may keep the job from running, a sentence each.

    Raises:
        SubmissionError: the job cannot run; every reason is named.
        PlanError: its batch cannot be split as the job asks.
    """
    spec = request.job.spec
    found = [obstacle for check in checks for obstacle in check(spec, request.cluster, request.environment)]
    errors = [obstacle.sentence for obstacle in found if obstacle.certain]
    if errors:
        raise SubmissionError("\n".join(errors))
    # Computed here, so that a batch without a plan is refused; the run directory gets the same plan.
    _ = request.plan
    return tuple(obstacle.sentence for obstacle in found)
