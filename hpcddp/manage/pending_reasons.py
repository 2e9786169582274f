"""Why a job waits in Slurm's queue, by Slurm's reason code, and what helps."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReason:
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
_REASONS: Final[tuple[tuple[str, str, str], ...]] = (
    ("None|WaitingForScheduling|Sched.*", "Slurm has not looked at it yet", "Wait a minute"),
    ("Priority", "jobs of higher priority come first", _WAIT),
    ("Resources", "it is at the front of the queue, and the nodes that it needs are not free yet", _WAIT),
    ("DependencyNeverSatisfied", "{dependency} did not end as the dependency requires, so it never starts",
     "Cancel it, and submit it again without that dependency: hpcddp cancel {run}"),
    ("Dependency", "it waits for the end of {dependency}", "Wait"),
    ("BeginTime", "its earliest start time has not come; Slurm lets a requeued job wait, too", "Wait"),
    ("JobHeldUser", "its user holds it (scontrol hold, or sbatch --hold)", "Release it: scontrol release {job}"),
    ("JobHeldAdmin", "an administrator holds it", _ASK),
    ("launch failed requeued held", "a node could not launch it, and Slurm has held it since then",
     "Look at hpcddp logs {run} --batch, then release it: scontrol release {job}"),
    ("JobHoldMaxRequeue", "it was requeued too often for this cluster, and Slurm holds it",
     "Release it: scontrol release {job}"),
    ("job requeued in held state",
     "it was requeued to be held (scontrol requeuehold, or RequeueExitHold in slurm.conf)",
     "Release it: scontrol release {job}"),
    ("JobArrayTaskLimit", "as many elements of its array run as may run at once",
     "Wait, or allow more at once: scontrol update JobId={array} ArrayTaskThrottle=N"),
    ("PartitionTimeLimit", "its time limit is longer than its partition allows",
     "Cancel it, and submit it with a shorter resources.time_limit; `sinfo --format='%P %l'` shows what is allowed"),
    ("PartitionNodeLimit", "it asks for more nodes than its partition allows, or some of them are down",
     "Ask for fewer nodes, or another partition; `sinfo` shows both"),
    ("PartitionConfig", "it asks for what no node of its partition has", "Ask for less, or for another partition"),
    ("PartitionDown|PartitionInactive", "its partition does not start jobs now", "Wait, or take another partition"),
    ("ReservationDeleted|ReservationInvalid|InvalidReservation", "its reservation is gone",
     "Submit it without resources.reservation"),
    ("Reservation|RequiresReservation", "its reservation has not begun", "Wait for the reservation"),
    ("Nodes required for job are DOWN|ReqNodeNotAvail|NodeDown", "nodes that it needs are down, drained or reserved",
     "Look at `sinfo --list-reasons`. Before a maintenance only a time limit that ends earlier lets it start"),
    ("Licenses", "the licenses that it needs are in use", "Wait for others to give them back"),
    ("Constraints", "no node that has what it asks for can be used now", "Wait, or correct its constraint"),
    ("MaxPoweredUpNodes", "as many nodes are switched on as the site allows", "Wait"),
    ("MpiPortsBusy", "the ports that its MPI reserves are in use", "Wait"),
    ("NvidiaImexChannels", "all NVIDIA IMEX channels are in use", "Wait"),
    ("FedJobLock", "the clusters of the federation have not agreed on where it starts", "Wait a minute"),
    ("DeadLine", "it could not end before its deadline (sbatch --deadline)",
     "Cancel it, and submit it with a shorter resources.time_limit"),
    ("MaxMemPerLimit", "it asks for more memory for each CPU or node than is allowed", "Ask for less resources.mem"),
    ("BadConstraints", "no node has what it asks for", "Correct its constraint, GPUs, memory or CPUs per node"),
    ("InvalidAccount|AccountNotAllowed|AccountingPolicy", "its account is not valid here", "Correct resources.account"),
    ("InvalidQOS|QOSNotAllowed", "its QOS is not valid here", "Correct resources.qos"),
    ("QOSUsageThreshold", "its account has used too much for this QOS", "Wait, or use another resources.qos"),
    ("QOSMaxWall.*|AssocMaxWall.*", "its time limit is longer than its QOS or its account allows",
     "Cancel it, and submit it with a shorter resources.time_limit"),
    ("QOSMax.*(PerUser|PerAccount|(?-i:PU|PA)(Limit)?$)", "you, or your account, have reached the QOS limit",
     _SMALLER.format(where="qos")),
    ("QOSMax.*|QOSTimeLimit|QOSMin.*", "it asks for more, or less, than the QOS allows one job",
     _SMALLER.format(where="qos")),
    ("QOSGrp.*|QOSJobLimit|QOSResourceLimit|QOS.*", "all jobs of the QOS together have reached its limit",
     _SMALLER.format(where="qos")),
    ("AssocMax.*", "it requests more than your account allows one job, or you have reached its limit of jobs",
     _SMALLER.format(where="assoc")),
    ("Max.*PerUser", "you have reached a limit for one user", _SMALLER.format(where="qos")),
    ("Assoc.*|Max.*PerAccount", "your account, with all that share its limit, has reached that limit",
     _SMALLER.format(where="assoc")),
    ("BurstBuffer.*", "its burst buffer is not ready", "Wait"),
    ("Cleaning|Prolog", "its last attempt is still being cleaned up, or its nodes are still being prepared",
     "Wait a minute"),
    ("FrontEndDown|SystemFailure|JobLaunchFailure", "a cluster-side failure", _ASK),
    ("NonZeroExitCode|RaisedSignal|OutOfMemory|TimeLimit|InactiveLimit", "its last start ended early",
     "Wait; hpcddp logs {run} --batch shows how that start ended"),
)  # fmt: skip
_PATTERNS: Final = tuple((re.compile(pattern, re.IGNORECASE), why, advice) for pattern, why, advice in _REASONS)


def pending_reason(reason: str, *, job_id: str, run: str, dependency: str = "another job") -> PendingReason:
    """Return why a job waits.

    Args:
        reason: Slurm's reason code, with or without the details that follow some codes.
        run: the run's name in commands.
        dependency: the jobs that it depends on, in words.
    """
    plain_reason = reason.strip("()").replace("_", " ")
    for pattern, why, advice in _PATTERNS:
        if pattern.match(plain_reason):
            array_id = job_id.partition("_")[0]
            return PendingReason(
                why=why.format(dependency=dependency),
                advice=advice.format(job=job_id, array=array_id, run=shlex.quote(run)),
            )
    return PendingReason(why=f"Slurm says {reason}", advice="See https://slurm.schedmd.com/job_reason_codes.html")
