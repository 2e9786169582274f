"""What ``submit --cluster here`` refuses: no allocation, or one that has ended, is another user's, or is too small."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpcddp.slurm.hostlist import HostListError
from hpcddp.submission.allocation_checks import NodeCapacity, capacities_of
from hpcddp.submission.request import SubmissionError
from hpcddp.submission.submit import prepare
from tests.submission.requests import request_of
from tests.submission.submitting import errors_of, program, spec_of, warnings_of

# Lines of scontrol show job --details of Slurm 22.05.8, and the same with GPUs.
DETAILS = f"""\
JobId=12 JobName=interactive
   UserId=ann({os.getuid()}) GroupId=ann(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   NodeList=n[1-3]
   NumNodes=3 NumCPUs=10 NumTasks=3 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:a100:4
     Nodes=n[1-2] CPU_IDs=0-1,4-5 Mem=0 GRES=gpu:a100:2(IDX:0,3)
     Nodes=n3 CPU_IDs=0-1 Mem=0 GRES=
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
"""
RESOURCES: dict[str, Any] = {"nodes": 2, "tasks_per_node": 2, "time_limit": "1h", "partition": "gpu"}
SALLOC = (
    "; submit in the shell that this command opens: salloc --nodes=2 --ntasks-per-node=2 --cpus-per-task=1 "
    "--time=01:00:00 --partition=gpu; or give the job to the queue: --cluster slurm"
)


def answer(here: Path, text: str) -> None:
    """Have scontrol print a text."""
    (here / "answer").write_text(text)
    program(here, "scontrol", f'#!/bin/sh\n[ "$*" = "show job --details 12" ] && cat {here}/answer\n')


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "this shell is in no allocation, because SLURM_JOB_ID is not set"),
        ({"SLURM_JOB_ID": "12;id"}, "SLURM_JOB_ID is '12;id', which is no job id"),
        (
            {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"},
            "srun has started this shell as a step of job 12, and the step holds the CPUs that the tasks need",
        ),
    ],
)
def test_a_shell_without_an_allocation_is_told_how_to_get_one(
    here: Path, variables: dict[str, str], problem: str
) -> None:
    answer(here, DETAILS)
    assert errors_of(here, {}, "here", variables, resources=RESOURCES) == [f"--cluster here: {problem}{SALLOC}"]


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("RUNNING", "COMPLETED", "that job does not run"),
        ("RUNNING", "PENDING", "that job does not run"),
        (f"({os.getuid()})", f"({os.getuid() + 1})", "that is the job of another user"),
    ],
)
def test_an_allocation_that_cannot_be_used_is_named(here: Path, before: str, after: str, problem: str) -> None:
    answer(here, DETAILS.replace(before, after))
    (error,) = errors_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources=RESOURCES)
    assert error == f"--cluster here: SLURM_JOB_ID is 12, and {problem}{SALLOC}"


def test_an_allocation_that_slurm_does_not_show_is_named_with_slurms_reason(here: Path) -> None:
    program(here, "scontrol", "#!/bin/sh\necho 'scontrol: error: Unable to contact slurm controller' >&2; exit 1\n")
    (error,) = errors_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources=RESOURCES)
    assert error == (
        "--cluster here: SLURM_JOB_ID is 12, and Slurm does not show that job (scontrol show job 12 failed: scontrol: "
        f"error: Unable to contact slurm controller){SALLOC}"
    )
    program(here, "scontrol", "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    (error,) = errors_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources=RESOURCES)
    assert error == f"--cluster here: SLURM_JOB_ID is 12, and that job does not run{SALLOC}"


@pytest.mark.parametrize(
    ("resources", "problem"),
    [
        ({"nodes": 3}, None),
        ({"nodes": 2, "gpus_per_node": 2, "cpus_per_task": 2}, None),
        ({"nodes": 4}, "resources.nodes is 4, and the allocation, job 12, has 3"),
        (
            {"nodes": 3, "tasks_per_node": 3},
            "the job needs 3 CPUs on each of 3 nodes, and the allocation, job 12, has so many on 2 only",
        ),
        (
            {"cpus_per_task": 5},
            "the job needs 5 CPUs on its node, and the allocation, job 12, has at most 4 on a node",
        ),
        (
            {"nodes": 3, "gpus_per_node": 1},
            "the job needs 1 GPU on each of 3 nodes, and the allocation, job 12, has so many on 2 only",
        ),
        (
            {"nodes": 2, "gpus_per_node": 4},
            "the job needs 4 GPUs on each of 2 nodes, and the allocation, job 12, has at most 2 on a node",
        ),
    ],
)
def test_what_the_allocation_does_not_have_is_named(here: Path, resources: dict[str, Any], problem: str | None) -> None:
    answer(here, DETAILS)
    variables = {"SLURM_JOB_ID": "12"}
    if problem is None:
        assert warnings_of(here, {}, "here", variables, resources=resources) == []
        return
    (error,) = errors_of(here, {}, "here", variables, resources=resources)
    assert error.startswith(f"--cluster here: {problem}; submit in the shell that this command opens: salloc --nodes=")


def test_an_answer_in_another_form_leaves_the_question_to_srun(here: Path) -> None:
    with pytest.raises(HostListError):
        capacities_of("     Nodes=n[1-2 CPU_IDs=0 Mem=0 GRES=\n")
    assert capacities_of(DETAILS) == [NodeCapacity(cpus=4, gpus=2)] * 2 + [NodeCapacity(cpus=2, gpus=0)]
    for changed in (DETAILS.replace("CPU_IDs", "Cores"), DETAILS.replace("n[1-2]", "n[1-2")):
        answer(here, changed)
        assert warnings_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources={"nodes": 8}) == []


def test_a_sweep_is_refused(here: Path) -> None:
    answer(here, DETAILS)
    environment = {"PATH": f"{here / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "12"}
    spec = spec_of({}, sweep={"train.seed": [0, 1]})
    with pytest.raises(SubmissionError, match="--cluster here runs one job, and this one is a sweep; submit its"):
        prepare(request_of(spec, cluster="here", environment=environment))
