"""The job of a rehearsal: the user's own, made small, on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from hpcddp.errors import UserError
from hpcddp.jobfile.datasets import DATASETS
from hpcddp.jobfile.field_facts import facts_of
from hpcddp.jobfile.job import JobSpec
from hpcddp.jobfile.read import ResolvedJob, change_job
from hpcddp.jobfile.resources import Resources
from hpcddp.vendors import VENDORS

_MOST_RANKS: Final = 2
_STEPS: Final = 24
"""About how many optimizer steps a rehearsed training makes: enough for a save before and after each fault."""
_STEPS_BETWEEN_SAVES: Final = 4
_LARGEST_BATCH: Final = 64
_SYNTHETIC: Final = {"image_size": 32, "val_samples": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallJob:
    """A job that is made small.

    Args:
        changes: what was changed, a phrase each.
    """

    job: ResolvedJob
    changes: tuple[str, ...]

    @property
    def spec(self) -> JobSpec:
        """The job as a value."""
        return self.job.spec

    def other_world_size(self) -> list[str]:
        """Return the changes that give the job another number of ranks: half of them, or two in place of one."""
        field = "gpus_per_node" if self.spec.uses_gpus else "tasks_per_node"
        ranks = self.spec.ranks_per_node
        other_ranks = ranks // 2 if ranks > 1 else 2
        return [f"resources.{field}={other_ranks}"]


def gpus_here() -> int:
    """Return the number of GPUs of this machine, that this process may open."""
    return sum(len(vendor.gpu_addresses()) for vendor in VENDORS)


Place = Literal["here", "sandbox", "cluster"]
"""Where a job is rehearsed: on this machine alone, on a Slurm of this machine, or on the cluster."""


def make_small(
    job: ResolvedJob, *, place: Place, run_root: Path, gpus: int, environment: Mapping[str, str]
) -> SmallJob:
    """Return a job with few ranks, few steps and many saves.

    Fields that the command line sets keep their values, but not the resources of two nodes.

    Args:
        place: where it will run.
        run_root: the directory of the runs of the rehearsal.
        gpus: the GPUs of this machine; the cluster has those that the job asks for.
        environment: the submitter's environment.

    Raises:
        UserError: the job is a sweep, or cannot be made small.
    """
    if job.spec.sweep is not None:
        raise UserError("the job has a sweep, and one run is rehearsed; leave the sweep out: --set sweep=null")
    place_has_gpus = place == "cluster" or (place == "here" and gpus > 0)
    has_gpus = job.spec.uses_gpus and place_has_gpus
    # Fields that the command line may set otherwise, and fields that always get these values.
    optional_fields = _training(job.spec, has_gpus=has_gpus)
    fixed_fields: dict[str, Any] = {"run_root": str(run_root), "trackers.use": []}
    if place == "here":
        optional_fields |= _resources_here(job.spec, gpus)
    else:
        fixed_fields |= _resources_on_two_nodes(has_gpus, place)
    new_values = {key: value for key, value in optional_fields.items() if not _is_named(job, key)}
    new_values |= fixed_fields
    texts = [f"{key}={json.dumps(value)}" for key, value in new_values.items()]
    small = change_job(job.spec, file="the rehearsed job", overrides=texts, environment=environment)
    return SmallJob(job=small, changes=tuple(_changes(job.spec, small.spec, new_values)))


def _changes(spec: JobSpec, small_spec: JobSpec, keys: Iterable[str]) -> Iterator[str]:
    """Yield a phrase for each key whose value is another one in the small job."""
    values_before = spec.model_dump(mode="json")
    values_after = small_spec.model_dump(mode="json")
    for key in keys:
        if key in _NOT_TOLD:
            continue
        before = _value(values_before, key)
        after = _value(values_after, key)
        if before != after:
            yield f"{key}: {_shown(before)} -> {_shown(after)}"


def _is_named(job: ResolvedJob, key: str) -> bool:
    """Return whether the command line sets a field, a section of it or a field of it."""
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in job.named)


def _resources_here(spec: JobSpec, gpus: int) -> dict[str, Any]:
    ranks = min(spec.world_size, _MOST_RANKS)
    if spec.uses_gpus and gpus > 0:
        ranks = min(ranks, gpus)
        return {
            "resources.nodes": 1,
            "resources.gpus_per_node": ranks,
            "resources.tasks_per_node": None,
            "resources.time_limit": None,
        }
    return {
        "resources.nodes": 1,
        "resources.gpus_per_node": 0,
        "resources.gpu_type": None,
        "resources.tasks_per_node": ranks,
        "resources.cpus_per_task": max(1, len(os.sched_getaffinity(0)) // ranks),
        "resources.mem_per_gpu": None,
        "resources.time_limit": None,
    }


_NOT_TOLD: Final = frozenset({"run_root", "trackers.use"})


def _resources_on_two_nodes(has_gpus: bool, place: Place) -> dict[str, Any]:  # noqa: FBT001
    """Return the fields of a job of two nodes with a rank each; the sandbox has nothing that is of a site."""
    fields: dict[str, Any] = {
        "resources.nodes": 2,
        "resources.tasks_per_node": None if has_gpus else 1,
        "resources.gpus_per_node": 1 if has_gpus else 0,
        "resources.time_limit": "10min",
    }
    if place == "sandbox":
        for name, field in Resources.model_fields.items():
            if facts_of(field).is_of_a_site:
                fields[f"resources.{name}"] = field.get_default(call_default_factory=True)
        fields["resources.cpus_per_task"] = 1
    return fields


def _small_batch(spec: JobSpec) -> dict[str, int]:
    """Return the fields of a small batch; a fixed micro-batch divides it with one rank and with two."""
    per_device = spec.batch.per_device_batch_size
    if per_device is None:
        return {"batch.global_batch_size": min(spec.global_batch_size, _LARGEST_BATCH)}
    per_device = min(per_device, _LARGEST_BATCH // _MOST_RANKS)
    return {"batch.per_device_batch_size": per_device, "batch.global_batch_size": per_device * _MOST_RANKS}


def _training(spec: JobSpec, *, has_gpus: bool) -> dict[str, Any]:
    """Return the fields that make a built-in training short; the arguments of other jobs say how long they are."""
    train = spec.train
    if train is None:
        return {}
    batch_fields = _small_batch(spec)
    fields: dict[str, Any] = {
        **batch_fields,
        "train.epochs": 1,
        "train.num_workers": 0,
        "checkpoint.every": {"steps": _STEPS_BETWEEN_SAVES},
    }
    dataset = DATASETS.get(train.dataset)
    if train.dataset == "synthetic" or (dataset is not None and dataset.is_in_files):
        # Real images take hours on CPUs, and nothing about a restart depends on them.
        dataset_args = dict(_SYNTHETIC)
        if train.num_classes is not None:
            dataset_args["num_classes"] = train.num_classes
        dataset_args["samples"] = _STEPS * batch_fields["batch.global_batch_size"]
        fields["train.dataset"] = "synthetic"
        fields["train.data_dir"] = None
        fields["train.dataset_args"] = dataset_args
    if not has_gpus:
        fields["train.device"] = None
        if train.precision != "fp64":
            fields["train.precision"] = "fp32"
    return fields


def _value(document: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401  of any field
    value: Any = document
    for part in key.split("."):
        value = value[part]
    return value


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
