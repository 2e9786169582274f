"""Ask Slurm which form of a request for GPUs the cluster accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcddp.jobfile.cluster import ClusterFacts
from hpcddp.site.profile_writer import FIRST_LIMIT_S, Choice, time_limit_of, usable
from hpcddp.slurm import commands
from hpcddp.slurm.job_environment import submission_environment


def find_gpu_request(facts: ClusterFacts, choice: Choice, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the value of ``resources.gpu_request`` for a new profile, and the reason; None leaves the default.

    A plugin of slurmctld, a filter or a wrapper of sbatch may refuse a form, which no query shows. ``sbatch
    --test-only``, which submits nothing, is asked for one GPU of the profile's partition, or of the first one that has
    any. A job that requests no GPU gets those of its nodes only where it gets whole nodes. Of nodes whose GPUs Slurm
    does not list nothing is known.
    """
    names = [name for name in (choice.runs_in, *usable(facts)) if name and facts.partitions[name].gpus_per_node]
    if not names:
        return None
    partition = facts.partitions[names[0]]
    # Sites may require a type, a time limit, and numbers of nodes and tasks.
    gpu = ":".join([*partition.gpu_types[:1], "1"])
    limit = time_limit_of(partition, FIRST_LIMIT_S)
    options = [f"--partition={names[0]}", f"--time={limit}", "--nodes=1", "--ntasks-per-node=1"]
    settings = {"account": choice.account, "qos": choice.qos}
    options += [f"--{flag}={setting[0]}" for flag, setting in settings.items() if setting]
    inherited, _ = submission_environment(environment)
    requests = {"gres": [f"--gres=gpu:{gpu}"], "gpus-per-node": [f"--gpus-per-node={gpu}"]}
    if partition.whole_nodes:
        requests["none"] = []
    refused: list[str] = []
    for form, request in requests.items():
        try:
            commands.test_script("#!/bin/sh\n", environment=inherited, options=[*options, *request])
        except commands.SlurmCommandError as error:
            # Without an answer, and where slurmctld has a reason of its own (limits of an account, no node in service),
            # the form is not the reason: for slurmctld all forms are one. A plugin's refusal has no sentence of Slurm.
            slurms_own = re.search("allocation failure: (?!Unspecified error)", error.message)
            if isinstance(error, commands.SlurmUnavailableError) or slurms_own:
                return None
            refused += request
        else:
            return (form, f"sbatch refuses {' and '.join(refused)}") if refused else None
    return None
