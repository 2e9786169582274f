"""What to write in place of a key that the job file does not have."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hpcddp.spec.document import Path, dotted
from hpcddp.spec.fieldtree import field_paths, find_place
from hpcddp.spec.names import nearest

# What other tools call a field, where the words are too far apart to be taken for a slip.
OTHER_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "arch": "train.model",
        "batch_size": "batch.global_batch_size",
        "env": "environment.env",
        "gres": "resources.gpus_per_node",
        "job_name": "name",
        "lr": "learning_rate.base",
        "memory": "resources.mem",
        "ntasks": "resources.tasks_per_node",
        "ntasks_per_node": "resources.tasks_per_node",
        "num_nodes": "resources.nodes",
        "output": "run_root",
        "output_dir": "run_root",
        "queue": "resources.partition",
        "timeout": "resources.time_limit",
        "walltime": "resources.time_limit",
        "workers": "train.num_workers",
    }
)


def unknown_key(path: Path) -> str:
    """Return the sentence about a key path that the job file does not have, with the nearest one that it has.

    Args:
        path: the key path as it was written.
    """
    depth = next(length for length in range(1, len(path) + 1) if find_place(path[:length]) is None)
    parent, key = path[: depth - 1], path[depth - 1]
    place = find_place(parent)
    if place is None or place.section is None:
        return f"is no field, because {dotted(parent)} holds a single value; write {dotted(parent)} alone"
    where = f"a field of {dotted(parent)}" if parent else "a field of the job file"
    return f"is not {where}; {_instead(parent, key, tuple(place.section.model_fields))}"


def _instead(parent: Path, key: str, siblings: tuple[str, ...]) -> str:
    sibling = nearest(key, siblings)
    if sibling is not None:
        return f"did you mean {dotted((*parent, sibling))}?"
    elsewhere = OTHER_WORDS.get(key.lower().replace("-", "_")) or _elsewhere(key)
    if elsewhere is not None:
        return f"did you mean {elsewhere}?"
    if parent == ("resources",):
        return f"any other sbatch flag goes under resources.sbatch, as in {{{key.replace('_', '-')}: ...}}"
    return f"the fields are {', '.join(siblings)}"


def _elsewhere(key: str) -> str | None:
    by_name = {path[-1]: path for path, _ in reversed(list(field_paths()))}
    near = nearest(key, by_name)
    return dotted(by_name[near]) if near is not None else None
