"""Tracker for MLflow, with one MLflow run for all attempts."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from hpcddp.train.tracking.protocol import AttemptEnding, Point, TrackerInputs

# Limits of one request (mlflow/utils/validation.py).
_MOST_METRICS: Final = 1000
_MOST_PARAMS: Final = 100
_LONGEST_VALUE: Final = 500
# Of names that code of the user's own logs (mlflow/utils/validation.py): no path that goes up, no other characters.
_NOT_ACCEPTED: Final = re.compile(r"[^A-Za-z0-9_. /-]|\.\.")
_STATUS: Final[Mapping[AttemptEnding, str]] = MappingProxyType(
    {AttemptEnding.FINISHED: "FINISHED", AttemptEnding.FAILED: "FAILED", AttemptEnding.CANCELLED: "KILLED"}
)


class Mlflow:
    """A run of MLflow.

    Args:
        run_id: MLflow's id of the run.
    """

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def write(self, points: Sequence[Point]) -> None:
        """Send the points to the server."""
        metrics = iter([metric for point in points for metric in _metrics(point)])
        while block := list(islice(metrics, _MOST_METRICS)):
            self._client.log_batch(self._run_id, metrics=block)

    def close(self, ending: AttemptEnding) -> None:
        """Set the status of the MLflow run; an attempt that may be continued is SCHEDULED."""
        if ending is AttemptEnding.STOPPED:
            self._client.update_run(self._run_id, status="SCHEDULED")
        else:
            self._client.set_terminated(self._run_id, status=_STATUS[ending])


def connect(inputs: TrackerInputs) -> Mlflow:
    """Create the MLflow run, or continue the one of an earlier attempt."""
    uri = inputs.settings.tracking_uri
    if (uri or os.environ.get("MLFLOW_TRACKING_URI", "")).startswith("file:"):
        # MLflow accepts a local folder only with this variable; clusters without network access need it.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=uri)
    run_id = inputs.state.run_id
    if run_id is None:
        run_id = _create_run(client, inputs)
        inputs.state.set_run_id(run_id)
    else:
        client.update_run(run_id, status="RUNNING")
    return Mlflow(client, run_id)


def _create_run(client: MlflowClient, inputs: TrackerInputs) -> str:
    tags = {"hpcddp.run_id": inputs.run.run_id, "hpcddp.run_directory": str(inputs.run.path)}
    experiment = _experiment(client, inputs.project)
    run_id: str = client.create_run(experiment, run_name=inputs.run.run_id, tags=tags).info.run_id
    params = iter([Param(key, str(value)[:_LONGEST_VALUE]) for key, value in _flat(inputs.config, "")])
    while block := list(islice(params, _MOST_PARAMS)):
        client.log_batch(run_id, params=block)
    return run_id


def _experiment(client: MlflowClient, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            # Another run has created it at the same time.
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return str(experiment.experiment_id)


def _flat(values: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _metrics(point: Point) -> Iterator[Metric]:
    milliseconds = round(1000 * (point.time or time.time()))
    for name, value in point.values.items():
        if (accepted := _NOT_ACCEPTED.sub("_", name)) == posixpath.normpath(accepted):
            yield Metric(accepted, value, milliseconds, point.step)
