"""Why Slurm lets a job wait: its reason codes in plain words, each with what to do."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why a job waits.

    Args:
        why: in words that follow "because".
        advice: what to do, without a full stop, for it may end with a command.
    """

    why: str
    advice: str


_WAIT = "Wait; fewer nodes or a shorter time limit may let it in earlier"
_SMALLER = "Wait until other jobs have ended, or ask for less; `sacctmgr show {where}` shows its limits"
_ASK = "Ask the cluster's administrators"

# squeue(1), JOB REASON CODES, and https://slurm.schedmd.com/job_reason_codes.html; the first that fits wins.
_TABLE: Final[tuple[tuple[str, str, str], ...]] = (
    ("None|WaitingForScheduling|Sched.*", "Slurm has not looked at it yet", "Wait a minute"),
    ("Priority", "jobs of higher priority come first", _WAIT),
    ("Resources", "it is at the front of the queue, and the nodes that it needs are not free yet", _WAIT),
    ("DependencyNeverSatisfied", "the job that it depends on did not end as it had to, so it never starts",
     "Cancel it, and submit it again without that dependency: hpcddp cancel {run}"),
    ("Dependency", "it waits for the end of another job", "Wait; to see for which: squeue --jobs={job} --format=%E"),
    ("BeginTime", "its earliest start time has not come; Slurm lets a requeued job wait, too", "Wait"),
    ("JobHeldUser", "its user holds it (scontrol hold, or sbatch --hold)", "Release it: scontrol release {job}"),
    ("JobHeldAdmin", "an administrator holds it", _ASK),
    ("launch failed requeued held", "a node could not launch it, and Slurm holds it since",
     "Look at hpcddp logs {run} --batch, then release it: scontrol release {job}"),
    ("JobHoldMaxRequeue|job requeued in held state", "it was requeued too often for this cluster, and Slurm holds it",
     "Release it: scontrol release {job}"),
    ("JobArrayTaskLimit", "as many elements of its array run as may run at once",
     "Wait, or allow more at once: scontrol update JobId={array} ArrayTaskThrottle=N"),
    ("PartitionTimeLimit", "its time limit is longer than its partition allows",
     "Cancel it, and submit it with a shorter resources.time_limit; `sinfo --format='%P %l'` shows what is allowed"),
    ("PartitionNodeLimit", "it asks for more nodes than its partition allows, or some of them are down",
     "Ask for fewer nodes, or another partition; `sinfo` shows both"),
    ("PartitionConfig", "it asks for what no node of its partition has", "Ask for less, or for another partition"),
    ("PartitionDown|PartitionInactive", "its partition does not start jobs now", "Wait, or take another partition"),
    ("ReservationDeleted|InvalidReservation", "its reservation is gone", "Submit it without resources.reservation"),
    ("Reservation|RequiresReservation", "its reservation has not begun", "Wait for the reservation"),
    ("Nodes required for job are DOWN|ReqNodeNotAvail|NodeDown", "nodes that it needs are down, drained or reserved",
     "Look at `sinfo --list-reasons`. Before a maintenance only a time limit that ends earlier lets it start"),
    ("Licenses", "the licenses that it needs are in use", "Wait for others to give them back"),
    ("BadConstraints", "no node has what it asks for", "Correct its constraint, GPUs, memory or CPUs per node"),
    ("InvalidAccount|AccountNotAllowed|AccountingPolicy", "its account is not valid here", "Correct resources.account"),
    ("InvalidQOS|QOSNotAllowed", "its QOS is not valid here", "Correct resources.qos"),
    ("QOSUsageThreshold", "its account has used too much for this QOS", "Wait, or use another resources.qos"),
    ("QOSMaxWall.*|AssocMaxWall.*", "its time limit is longer than its QOS or its account allows",
     "Cancel it, and submit it with a shorter resources.time_limit"),
    ("QOSMax.*(PerUser|PerAccount|PU|PA)", "you, or your account, have as much at work as the QOS allows",
     _SMALLER.format(where="qos")),
    ("QOSMax.*|QOSTimeLimit|QOSMin.*", "it asks for more, or less, than the QOS allows one job",
     _SMALLER.format(where="qos")),
    ("QOSGrp.*|QOSJobLimit|QOSResourceLimit|QOS.*", "all jobs of the QOS together have as much as it allows",
     _SMALLER.format(where="qos")),
    ("AssocMax.*", "it asks for more than your account allows one job, or you have as many jobs as it allows",
     _SMALLER.format(where="assoc")),
    ("Assoc.*|Max.*PerAccount", "your account and all that share its limit have as much at work as it allows",
     _SMALLER.format(where="assoc")),
    ("BurstBuffer.*", "its burst buffer is not ready", "Wait"),
    ("Cleaning|Prolog", "its last attempt is still being cleaned up, or its nodes prepared", "Wait a minute"),
    ("FrontEndDown|SystemFailure|JobLaunchFailure", "the cluster itself is in trouble", _ASK),
)  # fmt: skip
_KNOWN: Final = tuple((re.compile(pattern, re.IGNORECASE), why, advice) for pattern, why, advice in _TABLE)


def waiting(reason: str, *, job_id: str, run: str) -> Waiting:
    """Return why a job waits.

    Args:
        reason: Slurm's code, with or without what some codes have behind them.
        job_id: the job.
        run: what commands call the run.
    """
    plain = reason.strip("()").replace("_", " ")
    for pattern, why, advice in _KNOWN:
        if pattern.match(plain):
            return Waiting(
                why=why, advice=advice.format(job=job_id, array=job_id.partition("_")[0], run=shlex.quote(run))
            )
    return Waiting(why=f"Slurm says {reason}", advice="See https://slurm.schedmd.com/job_reason_codes.html")
