"""A first job file for a cluster: small, in need of nothing, and a place to begin."""

from __future__ import annotations

import shlex

from hpcddp.launch.site_choice import time_limit_of
from hpcddp.spec.cluster import ClusterFacts
from hpcddp.spec.profiles import DEFAULT_PROFILE
from hpcddp.spec.units import MINUTE

_LIMIT_S = 10 * MINUTE
_MEM_MB = 4 * 1024


def first_job(file: str, profile: str, facts: ClusterFacts, *, runs_in: str | None) -> str:
    """Return the text of a job file that runs on a cluster with its profile.

    A ResNet-18 learns handwritten digits on CPUs: it needs neither a GPU nor data from elsewhere.

    Args:
        file: its own path, for the commands that it names.
        profile: the profile's name.
        facts: what was found.
        runs_in: the partition that the profile's jobs go to, if there is one.
    """
    partition = facts.partitions.get(runs_in or "")
    kinds = partition.kinds if partition is not None else ()
    tasks = 2 if max((kind.cpus for kind in kinds), default=2) > 1 else 1
    lines = [
        f"# A first job on {facts.name}: a ResNet-18 learns handwritten digits on CPUs, which takes a minute or two.",
        "#",
        f"#   hpcddp submit {shlex.quote(file)} --follow    # run it, and watch",
        f"#   hpcddp render {shlex.quote(file)}             # the script that it is",
        "name: first-job",
        *([] if profile == DEFAULT_PROFILE else [f"profile: {profile}"]),
        "",
        "resources:",
        f"  tasks_per_node: {tasks}        # one task is one rank",
    ]
    gpus = partition.gpus_per_node if partition is not None else 0
    if gpus:
        lines.append(f"  # gpus_per_node: {gpus}       # in place of tasks_per_node: as many ranks, each with a GPU")
    lines += ["  cpus_per_task: 1", f'  time_limit: "{time_limit_of(partition, _LIMIT_S)}"']
    if facts.memory_is_shared_out:
        smallest = min((kind.mem_mb for kind in kinds), default=_MEM_MB)
        lines.append(f"  mem: {'4G' if smallest >= _MEM_MB else f'{smallest}M'}")
    lines += [
        "",
        "batch:",
        "  global_batch_size: 64    # over all ranks; the training is the same on any number of them",
        "",
        "learning_rate:",
        "  base: 0.03",
        "",
        "train:",
        "  model: resnet18          # any of torchvision's, or your own: my_package.models:build",
        "  dataset: digits          # 1,797 images that come with scikit-learn; or your own: my_package.data:build",
        "  epochs: 2",
        "  optimizer: {name: sgd, momentum: 0.9}",
    ]
    return "".join(f"{line}\n" for line in lines)
