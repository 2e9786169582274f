"""What keeps a tracker from working, found before the job queues."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from hpcddp.errors import UserError
from hpcddp.run.trackers import PACKAGES, is_installed
from hpcddp.spec.job import JobSpec

_SERVER = "MLFLOW_TRACKING_URI"


class TrackerError(UserError):
    """A tracker that the job names cannot work."""

    kind = "tracker"


def refuse_unusable_trackers(spec: JobSpec, environment: Mapping[str, str]) -> None:
    """Refuse trackers that are not installed, and an MLflow that nobody knows the server of.

    Another interpreter than this one is not asked: there a missing tracker costs a warning in the task.

    Args:
        spec: the job.
        environment: the submitter's environment.

    Raises:
        TrackerError: a tracker cannot work.
    """
    names = spec.trackers.use or ()
    if spec.environment.python in {None, sys.executable}:
        for name in names:
            _refuse_missing(name)
    known = spec.trackers.tracking_uri or environment.get(_SERVER) or spec.environment.env.get(_SERVER)
    if "mlflow" in names and not known:
        raise TrackerError(
            f"trackers.use names mlflow, and nothing says where its server is; export {_SERVER}, or write it into "
            "trackers.tracking_uri"
        )


def _refuse_missing(name: str) -> None:
    if not is_installed(name):
        raise TrackerError(
            f"trackers.use names {name}, which {sys.executable} does not have; run: {shlex.quote(sys.executable)} -m "
            f"pip install {PACKAGES[name]}, or remove the name"
        )
