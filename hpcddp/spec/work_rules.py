"""Rules on what a job runs: the built-in training, a function or a program of the user's own."""

from __future__ import annotations

from collections.abc import Iterator

from hpcddp.spec.job import JobSpec

_KINDS = ("train", "entrypoint", "command")
# What says how a global batch is cut says nothing without one.
_CUTS = ("max_per_device_batch_size", "grad_accum_steps", "per_device_batch_size")


def one_kind_of_work(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Refuse a job that runs nothing, or more than one thing."""
    given = [kind for kind in _KINDS if getattr(spec, kind) is not None]
    if not given:
        yield "train", "is missing; write for example train: {model: resnet18, dataset: digits}"
    for extra in given[1:]:
        yield extra, f"is given, and {given[0]} is given too, but a job runs one thing; keep one of them"
    if spec.command is not None and not (spec.command and spec.command[0]):
        yield "command", "is empty, and a program has a name; write for example [python, train.py]"


def batch_is_stated(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Refuse a training without a global batch, and one that is cut without being stated."""
    batch = spec.batch
    if batch.global_batch_size is not None:
        return
    if spec.train is not None:
        yield "batch.global_batch_size", "is missing; write for example global_batch_size: 256"
        return
    for name in (*_CUTS, "unit"):
        if getattr(batch, name) != type(batch).model_fields[name].default:
            yield f"batch.{name}", "is given, and batch.global_batch_size, which it cuts, is not; write that too"
