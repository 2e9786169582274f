"""What versions of Slurm do otherwise, and what hpcddp does about it; ``docs/slurm-versions.md`` is made from this."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

Version = tuple[int, ...]

OLDEST: Final = "22.05"
"""The oldest version that hpcddp runs on."""

TESTED: Final = ("22.05.8", "24.11.5", "26.05.5")
"""The versions that the tests run on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that some versions of Slurm do otherwise.

    Args:
        since: the first version that does it.
        before: the first version that does it no more; None if all later ones do it.
        fact: what Slurm does, a sentence without its full stop.
        source: where that is stated, or that it was measured.
        answer: what hpcddp does about it, a sentence without its full stop.
        is_visible: whether a user sees it, in the state of a job for example.
    """

    since: str
    before: str | None = None
    fact: str
    source: str
    answer: str
    is_visible: bool = False

    def applies_to(self, version: Version) -> bool:
        """Return whether a version does it."""
        return version_of(self.since) <= version and (self.before is None or version < version_of(self.before))


REQUEUE_DELAY: Final = Difference(
    since="25.11",
    fact="`SchedulerParameters=requeue_delay` replaces `cred_expire` as the time that a requeued job waits",
    source="slurm.conf(5); `_requeue_delay` in slurmctld/job_mgr.c",
    answer="messages and the profile give the delay of the cluster",
)
DIFFERENCES: Final = (
    Difference(
        since="23.02",
        fact="a job has the variable `SLURM_JOB_END_TIME`",
        source="sbatch(1)",
        answer="the end is read from `scontrol show job`, with this variable if slurmctld does not answer",
    ),
    Difference(
        since="23.02",
        fact="`squeue --Format=exit_code` prints `0:53` for a job whose output file cannot be opened, with the reason "
        "`RaisedSignal:53`; before, it printed the wait status, `4021`, with the reason `JobLaunchFailure`",
        source="squeue/print.c; slurmctld/job_mgr.c; measured on 22.05.8",
        answer="`why` reads the signal from both forms of the exit code, and not from the reason",
    ),
    Difference(
        since="23.02",
        fact="the directory of a job's output file is made where it is missing; before, the job failed, as it still "
        "does where the directory cannot be made",
        source="slurmstepd/io.c; measured on 24.11.5 and 26.05.5",
        answer="a script that waits for the directory of its run waits for the files of the run",
    ),
    Difference(
        since="24.05",
        fact="a script that ends by itself within the grace time of a preemption is requeued, or is PREEMPTED with "
        "`PreemptMode=CANCEL`; before, it was COMPLETED",
        source="measured on 24.11.5 and 26.05.5",
        answer="a run that has ended for good sets `Requeue=0` before its script ends",
        is_visible=True,
    ),
    Difference(
        since="24.05",
        before="26.05.4",
        fact="a job that was preempted with a grace time stays marked as preempted after its requeue: at its next end "
        "Slurm requeues it once more, whatever its exit code, and a job that has finished shows PREEMPTED",
        source="`GRACE_PREEMPT` in slurmctld/job_mgr.c (commit a689104d15); measured on 24.11.5",
        answer="a run that has ended for good sets `Requeue=0`, and a start after that is refused; `--after` waits for "
        "the end of a job and then reads the result of its run",
        is_visible=True,
    ),
    Difference(
        since="24.05",
        fact="a backslash before a blank in a `#SBATCH` line has another meaning",
        source="commit d44b67f7be",
        answer="values are quoted so that they mean the same in all versions",
    ),
    Difference(
        since="24.11",
        before="26.05",
        fact="a job for more nodes than the partition has is refused when it is submitted, and not queued",
        source="measured on 24.11.5; 22.05.8 and 26.05.5 queue it",
        answer="with a profile, `submit` refuses such a job itself",
    ),
    Difference(
        since="24.11",
        fact="slurmstepd overwrites its environment with its title",
        source="measured",
        answer="the sandbox finds its processes by their open files",
    ),
    Difference(
        since="24.11",
        fact="slurmctld looks up the name of the submitting host, and waits 10 s for a name that it does not find",
        source="measured",
        answer="the sandbox's hosts file has the name of this machine",
    ),
    Difference(
        since="25.05",
        fact="slurmstepd's notices in the log of a job have no `slurmstepd-HOST:` before them",
        source="commits 892539ae62 and 2ee5b6b760",
        answer="both forms are read",
    ),
    REQUEUE_DELAY,
    Difference(
        since="25.11",
        fact="`scontrol show job` prints `SubmitLine=`, free text that may hold blank lines",
        source="scontrol/info_job.c",
        answer="the line is left out before the record is read",
    ),
    Difference(
        since="25.11",
        fact="`--requeue=expedite` requeues and holds a job after any exit code that is not 0; while its epilog has "
        "failed, the job is EXPEDITING",
        source="sbatch(1)",
        answer="`resources.sbatch` refuses it; the state is shown as one of a job that waits",
    ),
    Difference(
        since="25.11",
        fact="the user `nobody` is refused as SlurmUser",
        source="slurm.conf(5)",
        answer="`hpcddp sandbox`, which runs Slurm as the user who calls it, cannot be started by `nobody`",
    ),
)


def version_of(text: str) -> Version:
    """Return the numbers of a version such as ``24.11.5``; empty if the text does not begin with one."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return () if match is None else tuple(int(number) for number in match[0].split("."))


def visible_differences(version: str) -> list[str]:
    """Return what users of a version see, in plain text, a sentence each."""
    return [
        difference.fact.replace("`", "")
        for difference in DIFFERENCES
        if difference.is_visible and difference.applies_to(version_of(version))
    ]


def versions_page() -> str:
    """Return the text of ``docs/slurm-versions.md``."""
    return "\n".join(_page_lines())


def _page_lines() -> Iterator[str]:
    yield "# Versions of Slurm"
    yield ""
    tested = f"{', '.join(TESTED[:-1])} and {TESTED[-1]}"
    yield f"hpcddp needs Slurm {OLDEST} or later. Its tests run on {tested}. This page lists what versions do otherwise"
    yield "and what hpcddp does about it. `hpcddp doctor install` names what you see on your cluster."
    yield ""
    yield "| versions | what Slurm does | source | what hpcddp does |"
    yield "|---|---|---|---|"
    for difference in DIFFERENCES:
        until = "" if difference.before is None else f", before {difference.before}"
        yield f"| since {difference.since}{until} | {difference.fact} | {difference.source} | {difference.answer} |"
    yield ""
