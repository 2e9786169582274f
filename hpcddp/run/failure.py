"""Failure records of the ranks, the order in which they failed, and the sentence about the first failure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from hpcddp.errors import printable
from hpcddp.run.directory import AttemptDirectory
from hpcddp.run.files import TAIL_BYTES, exists, read_tail
from hpcddp.run.job_records import FailureRecord, known_hosts, member_word, read_exits
from hpcddp.run.lost_peers import TimedOutRanks, UnevenRanks, find_lost_peers, place_of
from hpcddp.run.record import RecordError, create_record, read_record
from hpcddp.stop.reasons import Cause

_RANKS_NAMED = 16


def write_failure(attempt: AttemptDirectory, record: FailureRecord) -> None:
    """Write the record of a rank; a rank's first record stays."""
    # The reserves are for the first cause: the ranks that lost a peer would use them up.
    reserves = () if record.secondary else attempt.run.reserves("error")
    create_record(attempt.rank_error(record.rank), record, reserves=reserves)


def read_failures(attempt: AttemptDirectory) -> list[FailureRecord]:
    """Return the records of an attempt, the first cause first; ranks that failed as a consequence come last.

    Clocks of hosts differ, so time decides among equals alone. A damaged record is left out: ``damaged_failures``.
    """
    records, _ = _read_all(attempt)
    return sorted(records, key=lambda record: (record.secondary, record.waiting, record.time, record.rank))


def damaged_failures(attempt: AttemptDirectory) -> list[str]:
    """Return a sentence for each record of an attempt that cannot be read."""
    _, damages = _read_all(attempt)
    return damages


def _read_all(attempt: AttemptDirectory) -> tuple[list[FailureRecord], list[str]]:
    records: list[FailureRecord] = []
    damages: list[str] = []
    for path in sorted(attempt.path.glob("error-rank-*.json")):
        try:
            record = read_record(path, FailureRecord)
        except RecordError as error:
            damages.append(error.message)
        else:
            records += [record] if record is not None else []
    return records, damages


def ranks_without_record(attempt: AttemptDirectory) -> list[int]:
    """Return the ranks that started, as their logs show, and ended without a record."""
    return [
        rank
        for rank in sorted(attempt.rank_logs())
        if not exists(attempt.rank_error(rank)) and not exists(attempt.rank_exit(rank))
    ]


def first_ended_without_record(attempt: AttemptDirectory) -> list[int]:
    """Return the ranks that ended first of those without a record; all of these if srun does not say which.

    When one task has gone, srun ends the others, by force if they do not answer: they leave no record either.
    """
    refused = _refused_logs(attempt)
    if refused is not None:
        return refused.ranks
    silent = ranks_without_record(attempt)
    return first_to_end(attempt, silent) or silent


def failure_sentence(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str:
    """Return one line that says who failed first, and how.

    Args:
        attempt: the attempt that has ended without a result.
        records: as ``read_failures`` returns them.
    """
    # The first that is known.
    return (
        _lost_peers_sentence(attempt, records)
        or _named_sentence(records)
        or _launch_sentence(attempt)
        or _hang_sentence(attempt, records)
        or _not_started_sentence(attempt)
        or _without_log_sentence(attempt)
        or _silent_sentence(attempt, records)
        or _container_sentence(attempt)
        or _without_a_cause(attempt)
    )


def _named_sentence(records: Sequence[FailureRecord]) -> str | None:
    named = _named(records)
    if not named:
        return None
    first = named[0]
    return f"{first.place} failed first{first.when}: {first.label}{first.headline}"


def node_of_first_failure(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str | None:
    """Return the node on which an attempt failed first; None if that is not known, or was on several at once.

    Args:
        attempt: the attempt that has ended without a result.
        records: as ``read_failures`` returns them.
    """
    named = _named(records)
    if named:
        first = named[0]
        hosts_of_same_error = {record.host for record in named if record.message == first.message}
        return first.host if len(hosts_of_same_error) == 1 else None
    launch = _LAUNCH.search(_since_start(attempt))
    if launch is not None:
        return launch["node"]
    hosts = known_hosts(attempt)
    nodes = {hosts[rank] for rank in first_ended_without_record(attempt) if rank < len(hosts)}
    return nodes.pop() if len(nodes) == 1 else None


def text_of_first_failure(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str:
    """Return the message and the traceback of the first failure, or the ends of the logs of ranks without a record.

    Args:
        attempt: the attempt that has ended without a result.
        records: as ``read_failures`` returns them.
    """
    named = _named(records)
    if named:
        return f"{named[0].message}\n{named[0].traceback}"
    silent = first_ended_without_record(attempt)
    return "\n".join(read_tail(attempt.rank_log(rank), TAIL_BYTES) for rank in silent[:_RANKS_NAMED])


def rest_of_message(records: Sequence[FailureRecord], sentence: str) -> list[str]:
    """Return the lines of the first error's message that follow the line which a sentence about the failure quotes.

    Args:
        records: as ``read_failures`` returns them.
        sentence: as ``failure_sentence`` returns it, with or without more about the end of the run.
    """
    named = _named(records)
    is_quoted = bool(named) and f"{named[0].label}{named[0].headline}" in sentence
    return named[0].below_headline if is_quoted else []


def _not_started_sentence(attempt: AttemptDirectory) -> str | None:
    silent = ranks_without_record(attempt)
    reasons = {reason for rank in silent if (reason := never_started(attempt, rank)) is not None}
    if not reasons:
        return None
    return f"{_places(attempt, silent)} did not start: {'; '.join(sorted(reasons))}"


def _without_log_sentence(attempt: AttemptDirectory) -> str | None:
    refused = _refused_logs(attempt)
    if refused is None:
        return None
    return (
        f"{_places(attempt, refused.ranks)} on {refused.hosts} did not start, because the shell could not open a log "
        f"in {attempt.path} ({refused.why}): let every node see the run directory, and write to it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RefusedLogs:
    """Tasks that ended first, because their shell could not open their logs; srun has killed the others then.

    Args:
        hosts: where they ran, as srun writes it.
        why: what the shell says.
    """

    ranks: list[int]
    hosts: str
    why: str


def _refused_logs(attempt: AttemptDirectory) -> _RefusedLogs | None:
    """Return the tasks without a log that ended with the first one of which a shell says why; None if none does."""
    printed = _since_start(attempt)
    refused = _LOG_REFUSED.search(printed)
    if refused is None:
        return None
    rank = int(refused["rank"])
    end = next((match for match in _SRUN.finditer(printed) if rank in _numbers(match["tasks"])), None)
    if end is None or exists(attempt.rank_log(rank)):
        return None
    ranks = [task for task in _numbers(end["tasks"]) if not exists(attempt.rank_log(task))]
    return _RefusedLogs(ranks=ranks, hosts=end["hosts"], why=refused["why"].strip())


def _silent_sentence(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str | None:
    silent = first_ended_without_record(attempt)
    if not silent:
        return None
    # How far the others were is how far these were, to a step.
    when = next((record.when for record in records if record.step is not None), "")
    ways = {way for rank in silent if (way := exit_of(attempt, rank)) is not None}
    how = "; ".join(sorted(ways)) or "killed, out of memory, a crash in native code, or os._exit"
    return f"{_places(attempt, silent)} ended without an error message{when}: {how}"


def lost_peers(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> UnevenRanks | TimedOutRanks | None:
    """Return which ranks of an attempt the others lost (``find_lost_peers``), by srun's messages too."""
    return find_lost_peers(attempt, records, _ended_by_srun(attempt))


def _ended_by_srun(attempt: AttemptDirectory) -> set[int]:
    """Return the tasks whose end srun has reported after that of another one: it ends them."""
    ended = [set(_numbers(match["tasks"])) for match in _SRUN.finditer(_since_start(attempt))]
    return {task for later in ended[1:] for task in later} - ended[0] if ended else set()


def _lost_peers_sentence(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str | None:
    lost = lost_peers(attempt, records)
    if lost is None:
        return None
    where = place_of(lost.waited.traceback)
    if isinstance(lost, TimedOutRanks):
        whom = "as all others did"
        if lost.missing:
            whom = f"for {_places(attempt, lost.missing)}"
        return f"{lost.waited.place} waited in {where} {whom}, until its timeout: a hang"
    ended = "another rank ended"
    if lost.ended:
        ended = f"{_places(attempt, lost.ended)} ended"
    if not lost.have_aborted:
        ended = f"{ended} with exit code 0"
    return f"{ended} while {lost.waited.place} was still in {where}: the ranks ran different numbers of steps"


def _without_a_cause(attempt: AttemptDirectory) -> str:
    damages = damaged_failures(attempt)
    if damages:
        return damages[0]
    try:
        exits = read_exits(attempt)
    except RecordError as error:
        return error.message
    if any(exit_.notice for exit_ in exits):
        return "the tasks received SIGTERM, and the sender of SIGTERM is unknown"
    said = _SRUN_SAID.findall(_since_start(attempt))
    if said and not attempt.rank_logs():
        return f"srun started no task: {'; '.join(said[-3:])}"
    return "the tasks ended without a result and without naming a cause"


def _named(records: Sequence[FailureRecord]) -> list[FailureRecord]:
    """Return the records that name a cause of their own."""
    return [record for record in records if not record.secondary and not record.waiting]


def _hang_sentence(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str | None:
    if not records or not records[0].waiting:
        return None
    first = records[0]
    silent = ranks_without_record(attempt)
    if silent:
        return (
            f"{_places(attempt, silent)} stopped answering{first.when}: stopped, stuck in native code, or its host is "
            f"lost; {first.place} waited for other ranks"
        )
    return f"all ranks waited for each other{first.when}: {first.headline}"


def _places(attempt: AttemptDirectory, ranks: Sequence[int]) -> str:
    """Return ranks with their hosts, where these are known."""
    hosts = known_hosts(attempt)
    places = []
    for rank in ranks[:_RANKS_NAMED]:
        if rank < len(hosts):
            places.append(f"{rank} on {hosts[rank]}")
        else:
            places.append(str(rank))
    named = ", ".join(places)
    if len(ranks) > _RANKS_NAMED:
        named = f"{named} and {len(ranks) - _RANKS_NAMED} more"
    noun = member_word(attempt)
    if len(ranks) > 1:
        noun = f"{noun}s"
    return f"{noun} {named}"


def describe_failure(attempt: AttemptDirectory, records: Sequence[FailureRecord]) -> str:
    """Return the sentence about the first failure, the end of its traceback, and where the rest is.

    Args:
        attempt: the attempt that has ended without a result.
        records: as ``read_failures`` returns them.
    """
    lines = [failure_sentence(attempt, records)]
    for record in _named(records)[:1]:
        lines += [f"  {line}" for line in record.traceback.rstrip().splitlines()[-20:]]
    lines += [damage for damage in damaged_failures(attempt) if damage != lines[0]]
    command = shlex.join(["hpcddp", "logs", str(attempt.run.path), "--first-error"])
    lines.append(f"the logs of the ranks are in {attempt.path}; {command} tells how the other ranks ended")
    return "\n".join(lines)


# Anything may print to the batch log; more digits are no task's number.
_TASK: Final = "[0-9]{1,6}"
_TASKS: Final = f"{_TASK}(?:-{_TASK})?"
# srun: error: n2: task 1: Killed      srun: error: n[1-2]: tasks 0-1,3: Exited with exit code 3   (srun 22.05.8)
_SRUN: Final = re.compile(
    rf"srun: error: (?P<hosts>\S+): tasks? (?P<tasks>{_TASKS}(?:,{_TASKS})*): (?P<how>.+)", re.ASCII
)
# srun: error: Task launch for StepId=7.0 failed on node n2: Job credential expired   (22.05 to 26.05)
_LAUNCH: Final = re.compile(
    r"^srun: error: Task launch for \S+ failed on node (?P<node>\S+): (?P<why>.+)", re.MULTILINE
)
# srun: error: Node failure on n3   (srun --no-kill 22.05.8)
_NODE_FAILURE: Final = re.compile(r"^srun: error: Node failure on (?P<node>\S+)$", re.MULTILINE)
# srun kills the tasks at once when it gets TERM or HUP itself. It says the same behind the first task that failed.
_SRUN_SIGNALLED: Final = re.compile(r"^srun: (?:forcing job termination|Force Terminated )", re.MULTILINE)
# srun: unrecognized option '--foo=bar'      srun: error: unrecognized --cpu-bind argument "x"   (srun 22.05.8)
_SRUN_SAID: Final = re.compile(r"^srun: (?:error: )?(?!Job |Step )(.+)", re.MULTILINE)
# srun: First task exited 10s ago   (srun 22.05.8)
_SRUN_WAITED: Final = re.compile(r"^srun: First task exited (?P<seconds>[0-9]{1,9})s ago$", re.MULTILINE)
# sh: 3: cannot create /runs/a/1/attempts/0/rank-1.log: Directory nonexistent   (dash; bash without "cannot create")
_LOG_REFUSED: Final = re.compile(rf"/rank-(?P<rank>{_TASK})\.log: (?P<why>.+)", re.ASCII)
_PYXIS: Final = re.compile(r"error: pyxis: (?P<why>.+)")
_NOTICES: Final[Mapping[str, Cause]] = MappingProxyType(
    {"PREEMPTION": Cause.PREEMPTION, "TIME LIMIT": Cause.TIME_LIMIT, "NODE FAILURE": Cause.NODE_FAILURE}
)
# How a notice of slurmstepd begins: "slurmstepd-n1: error: *** "; since 25.05 "[2026-11-22T05:17:38.123] error: *** ".
_BEGINS: Final = r"^(?:\[[^\]\n]*\] )?(?:slurmstepd\S*: )?error: \*{3} "
# slurmstepd-n1: error: *** JOB 3 ON n1 CANCELLED AT 2026-11-22T05:17:38 DUE TO PREEMPTION ***   (slurmstepd 22.05.8)
# A step that environment.setup starts may have a time limit of its own.
_NOTICE: Final = re.compile(
    rf"{_BEGINS}(?!STEP .+ TIME LIMIT).+ CANCELLED AT \S+ DUE TO (?P<why>{'|'.join(_NOTICES)})",
    re.MULTILINE,
)
# slurmstepd-n1: error: *** JOB 3 ON n1 CANCELLED AT 2026-11-22T05:17:38 ***   (22.05.8; newer ones add DUE to SIGNAL
# Terminated). The notice about a step has the same words after any SIGTERM. A slurmstepd writes its first notice only.
_CANCELLED: Final = re.compile(
    _BEGINS + r"JOB .+ CANCELLED AT (?P<moment>\S+)( DUE to SIGNAL \w+)? \*{3}$", re.MULTILINE
)
_FATAL: Final = "Fatal Python error: "
# What the shell in a container says (the sbatch template), and what apptainer says before it starts a container.
_STARTUP_ERROR_PREFIXES: Final = ("hpcddp: this task cannot start: ", "FATAL: ")
KILLED_HINT: Final = "by SIGKILL, most often because it ran out of memory"
"""Said of a process that SIGKILL has ended, behind the word killed."""
_HINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Killed": KILLED_HINT,
        "Out Of Memory": "its memory limit was exceeded",
    }
)


def exits_in(text: str) -> dict[int, str]:
    """Return how tasks ended, as srun reports it; the first line about a task counts, srun causes later ones itself.

    Args:
        text: what the batch script printed.
    """
    exits: dict[int, str] = {}
    for match in _SRUN.finditer(text):
        how = match["how"].strip()
        for task in _numbers(match["tasks"]):
            exits.setdefault(task, how)
    return exits


def exits_of_tasks(attempt: AttemptDirectory) -> dict[int, str]:
    """Return how tasks of an attempt ended, as srun has reported it so far; see ``exits_in``."""
    return exits_in(_since_start(attempt))


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def exit_of(attempt: AttemptDirectory, rank: int) -> str | None:
    """Return how a rank of the attempt ended, in a few words, or None if unknown.

    Args:
        rank: a rank without a record.
    """
    log = read_tail(attempt.rank_log(rank), TAIL_BYTES)
    if _FATAL in log:
        # faulthandler, below the last line that Python could still print.
        return log.rpartition(_FATAL)[2].partition("\n")[0].strip()
    how = exits_in(_since_start(attempt)).get(rank)
    if how is None:
        return None
    hint = next((hint for word, hint in _HINTS.items() if how.startswith(word)), None)
    before_any_task_ended = _SRUN.split(_since_start(attempt), maxsplit=1)[0]
    waited = _SRUN_WAITED.search(before_any_task_ended)
    if waited is not None:
        hint = (
            f"by srun, {waited['seconds']} s after the first task had ended: the cluster's WaitTime says so; "
            "srun --wait=0 prevents that"
        )
    elif hint == KILLED_HINT and _SRUN_SIGNALLED.search(before_any_task_ended):
        hint = "by srun, which a signal to the whole job has ended, as scancel --full sends it"
    if hint is None:
        return how
    return f"{how} ({hint})"


def _launch_sentence(attempt: AttemptDirectory) -> str | None:
    """Return what srun says of a node on which it could not start the tasks, after which it kills the others."""
    match = _LAUNCH.search(_since_start(attempt))
    if match is None:
        return None
    return f"srun could not start the tasks on {match['node']}: {match['why'].strip()}"


def _container_sentence(attempt: AttemptDirectory) -> str | None:
    """Return what pyxis said first when it did not start the containers of an attempt, or None."""
    # slurmstepd: error: pyxis: failed to import docker image
    match = _PYXIS.search(_since_start(attempt))
    if match is None:
        return None
    return f"the containers did not start: pyxis: {match['why'].strip()}"


def never_started(attempt: AttemptDirectory, rank: int) -> str | None:
    """Return why a rank's container or interpreter did not start, or None if it did.

    Args:
        rank: a rank without a record.
    """
    last = read_tail(attempt.rank_log(rank), TAIL_BYTES).rstrip().rpartition("\n")[2]
    return next((last.removeprefix(start).strip() for start in _STARTUP_ERROR_PREFIXES if last.startswith(start)), None)


def beginning(attempt: AttemptDirectory) -> str:
    """Return the line that the batch script prints when an attempt begins; what is above it is of earlier ones."""
    return f"hpcddp: attempt {attempt.number} of run {printable(attempt.run.run_id)} begins\n"


def first_to_end(attempt: AttemptDirectory, ranks: Collection[int]) -> list[int]:
    """Return those of some ranks that srun saw end first; none if it says nothing of them."""
    for match in _SRUN.finditer(_since_start(attempt)):
        tasks = [task for task in _numbers(match["tasks"]) if task in ranks]
        if tasks:
            return tasks
    return []


def cause_in_log(attempt: AttemptDirectory) -> Cause | None:
    """Return why Slurm ended the job of an attempt, as slurmstepd says it in the batch log; None if it does not.

    slurmctld clears PreemptTime as soon as it requeues the job. Where there is no grace time, only this
    distinguishes it from a requeue by a person.
    """
    notice = _NOTICE.search(_since_start(attempt))
    return _NOTICES[notice["why"]] if notice else None


def cancelled_in_log(attempt: AttemptDirectory) -> bool:
    """Return whether slurmstepd says in the batch log that the job of an attempt was cancelled, and names no cause.

    Slurm shows a job that is cancelled in the grace time of a preemption like one that the preemption has ended; only
    this distinguishes them.
    """
    return cancelled_at(attempt) is not None


def cancelled_at(attempt: AttemptDirectory) -> str | None:
    """Return when the job of an attempt was cancelled, as slurmstepd writes it; None if it does not say so."""
    notice = _CANCELLED.search(_since_start(attempt))
    return None if notice is None else notice["moment"]


def _since_start(attempt: AttemptDirectory) -> str:
    """Return what the batch script has printed in an attempt."""
    following = attempt.run.attempt(attempt.number + 1)
    printed = read_tail(attempt.run.batch_log, TAIL_BYTES).rpartition(beginning(attempt))[2]
    return printed.partition(beginning(following))[0]
