"""An obstacle to a submission, and the type of the checks that find obstacles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hpcddp.errors import UserError
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.job import JobSpec


class SubmissionError(UserError):
    """A job that cannot be submitted as it is."""

    kind = "submission"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Something that keeps a job from running, or may do so.

    Args:
        sentence: what it is, and what to do instead.
        certain: whether the job cannot run; False where that depends on the nodes that the job gets.
    """

    sentence: str
    certain: bool = True


Check = Callable[[JobSpec, Cluster, Mapping[str, str]], Iterator[Obstacle]]
"""Yields the obstacles to a job, given the job, its cluster and the submitter's environment."""
