"""What ``submit --cluster here`` refuses: no allocation, or one that has ended, is another user's, or is too small."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpcddp.submission.request import SubmissionError
from hpcddp.submission.submit import prepare
from tests.messages import GoldenMessages
from tests.submission.requests import request_of
from tests.submission.submitting import errors_of, program, spec_of, warnings_of

# Lines of scontrol show job of Slurm 22.05.8.
DETAILS = f"""\
JobId=12 JobName=interactive
   UserId=ann({os.getuid()}) GroupId=ann(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   NodeList=n[1-3]
   NumNodes=3 NumCPUs=10 NumTasks=3 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
"""
RESOURCES: dict[str, Any] = {"nodes": 2, "tasks_per_node": 2, "time_limit": "1h", "partition": "gpu"}
SALLOC = "salloc --nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --time=01:00:00 --partition=gpu"


def answer(here: Path, text: str) -> None:
    """Have scontrol print a text."""
    (here / "answer").write_text(text)
    program(here, "scontrol", f'#!/bin/sh\n[ "$*" = "show job 12" ] && cat {here}/answer\n')


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


def test_an_allocation_with_too_few_nodes_is_named(here: Path, golden: GoldenMessages) -> None:
    answer(here, DETAILS)
    (error,) = errors_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources={"nodes": 4})
    message = golden.message(error)
    assert [fact for fact in ("resources.nodes is 4", "job 12, has 3;", "--nodes=4 ") if fact not in message] == []


def test_an_allocation_with_the_nodes_is_accepted(here: Path) -> None:
    answer(here, DETAILS)
    assert warnings_of(here, {}, "here", {"SLURM_JOB_ID": "12"}, resources={"nodes": 3}) == []


def test_a_sweep_is_refused(here: Path, golden: GoldenMessages) -> None:
    answer(here, DETAILS)
    environment = {"PATH": f"{here / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "12"}
    spec = spec_of({}, sweep={"train.seed": [0, 1]})
    with pytest.raises(SubmissionError) as caught:
        prepare(request_of(spec, cluster="here", environment=environment))
    message = golden.message(caught.value)
    assert message.startswith("--cluster here ")
    assert "is a sweep; submit its" in message
