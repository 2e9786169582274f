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
from tests.messages import GoldenMessages
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
SALLOC = "salloc --nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --time=01:00:00 --partition=gpu"


def answer(here: Path, text: str) -> None:
    """Have scontrol print a text."""
    (here / "answer").write_text(text)
    program(here, "scontrol", f'#!/bin/sh\n[ "$*" = "show job --details 12" ] && cat {here}/answer\n')


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "SLURM_JOB_ID is not set"),
        ({"SLURM_JOB_ID": "12;id"}, "SLURM_JOB_ID is '12;id', which is not a job id"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}, "srun has started this shell as a step of job 12"),
    ],
)
def test_a_shell_without_an_allocation_is_told_how_to_get_one(
    here: Path, golden: GoldenMessages, variables: dict[str, str], problem: str
) -> None:
    answer(here, DETAILS)
    (error,) = errors_of(here, {}, "here", variables, resources=RESOURCES)
    message = golden.message(error)
    assert problem in message
    assert SALLOC in message
    assert message.endswith("--cluster slurm")


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("RUNNING", "COMPLETED", "that job is not running"),
        ("RUNNING", "PENDING", "that job is not running"),
        (f"({os.getuid()})", f"({os.getuid() + 1})", "belongs to another user"),
    ],
    ids=["completed", "pending", "of another user"],
)
def test_an_allocation_that_cannot_be_used_is_named(
    here: Path, golden: GoldenMessages, before: str, after: str, problem: str
) -> None:
    answer(here, DETAILS.replace(before, after))
    (error,) = errors_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources=RESOURCES)
    message = golden.message(error)
    assert "SLURM_JOB_ID is 12, but that" in message
    assert problem in message
    assert SALLOC in message


def test_an_allocation_that_slurm_does_not_show_is_named_with_slurms_reason(here: Path, golden: GoldenMessages) -> None:
    program(here, "scontrol", "#!/bin/sh\necho 'scontrol: error: Unable to contact slurm controller' >&2; exit 1\n")
    (error,) = errors_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources=RESOURCES)
    message = golden.message(error)
    assert "SLURM_JOB_ID is 12" in message
    assert "(scontrol show job 12 failed: " in message
    assert "Unable to contact slurm controller)" in message
    assert SALLOC in message
    program(here, "scontrol", "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    (error,) = errors_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources=RESOURCES)
    message = golden.message(error)
    assert "SLURM_JOB_ID is 12, " in message
    assert "that job is not running" in message
    assert SALLOC in message


@pytest.mark.parametrize(
    ("resources", "facts"),
    [
        ({"nodes": 4}, ("resources.nodes is 4", "has 3;", "--nodes=4 ")),
        ({"nodes": 3, "tasks_per_node": 3}, ("3 CPUs on each of 3 nodes", "on only 2 nodes;", "--ntasks-per-node=3 ")),
        ({"cpus_per_task": 5}, ("5 CPUs on its node", "at most 4 on a node;", "--cpus-per-task=5;")),
        ({"nodes": 3, "gpus_per_node": 1}, ("1 GPU on each of 3 nodes", "on only 2 nodes;", "--gres=gpu:1 ")),
        ({"nodes": 2, "gpus_per_node": 4}, ("4 GPUs on each of 2 nodes", "at most 2 on a node;", "--gres=gpu:4 ")),
    ],
)
def test_what_the_allocation_does_not_have_is_named(
    here: Path, golden: GoldenMessages, resources: dict[str, Any], facts: tuple[str, ...]
) -> None:
    answer(here, DETAILS)
    (error,) = errors_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources=resources)
    message = golden.message(error)
    assert [fact for fact in (*facts, "the allocation, job 12,") if fact not in message] == []


@pytest.mark.parametrize("resources", [{"nodes": 3}, {"nodes": 2, "gpus_per_node": 2, "cpus_per_task": 2}])
def test_what_the_allocation_has_is_accepted(here: Path, resources: dict[str, Any]) -> None:
    answer(here, DETAILS)
    assert warnings_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources=resources) == []


def test_an_answer_in_another_form_leaves_the_question_to_srun(here: Path) -> None:
    with pytest.raises(HostListError):
        capacities_of("     Nodes=n[1-2 CPU_IDs=0 Mem=0 GRES=\n")
    assert capacities_of(DETAILS) == [NodeCapacity(cpus=4, gpus=2)] * 2 + [NodeCapacity(cpus=2, gpus=0)]
    for changed in (DETAILS.replace("CPU_IDs", "Cores"), DETAILS.replace("n[1-2]", "n[1-2")):
        answer(here, changed)
        assert warnings_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources={"nodes": 8}) == []


def test_a_sweep_is_refused(here: Path, golden: GoldenMessages) -> None:
    answer(here, DETAILS)
    environment = {"PATH": f"{here / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "12"}
    spec = spec_of({}, sweep={"train.seed": [0, 1]})
    with pytest.raises(SubmissionError) as caught:
        prepare(request_of(spec, cluster="here", environment=environment))
    message = golden.message(caught.value)
    assert message.startswith("--cluster here ")
    assert "is a sweep; submit its" in message
