"""What keeps a tracker from working, as far as the machine that submits can know."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hpcddp.launch.submittable import Obstacle
from hpcddp.run.trackers import PACKAGES, is_installed

if TYPE_CHECKING:
    from hpcddp.launch.submission import Cluster
    from hpcddp.spec.job import JobSpec

_SERVER = "MLFLOW_TRACKING_URI"


def tracker_obstacles(spec: JobSpec, _: Cluster, environment: Mapping[str, str]) -> Iterator[Obstacle]:
    """Yield the trackers that are not installed, and an MLflow that nobody knows the server of.

    Another interpreter than this one is not asked: there a missing tracker costs a warning in the task.

    Args:
        spec: the job.
        environment: the submitter's environment.
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
    elsewhere = (environment.conda, environment.venv, environment.uv, environment.container)
    return environment.python in {None, sys.executable} and not any(elsewhere)
