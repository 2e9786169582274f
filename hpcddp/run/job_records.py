"""Records that the processes of a job write for each other: of a run's newest submission, and of each attempt.

``submission.json`` is the submission, and ``plan.json`` the plan of a training. In the directory of an attempt:
``start.json``, ``rendezvous.json``, ``ranks.json``, ``end-time.json``, ``decision.json``, ``exit-rank-N.json``, and
``error-rank-N.json``, of which
``hpcddp.run.failure`` makes sentences.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from hpcddp.errors import printable
from hpcddp.run.directory import AttemptDirectory, RunDirectory
from hpcddp.run.files import make_reserves
from hpcddp.run.record import FORMAT, Record, RecordError, read_record, write_record
from hpcddp.stop.reasons import Cause, ExitCode, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the training that the command line has named at a resumption.

    Args:
        key: the key path of the field.
        after: its value from then on.
        attempt: the first attempt with it.
    """

    key: str
    before: Any
    after: Any
    attempt: int = 0

    def __str__(self) -> str:
        """Return the change in words, the values as JSON; a command as a shell has it."""
        before, after = map(self._text, (self.before, self.after))
        return f"{self.key} {before} -> {after}"

    def _text(self, value: object) -> str:
        if self.key == "command" and isinstance(value, list):
            return shlex.join(map(str, value))
        return json.dumps(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionRecord(Record):
    """The newest submission of a run.

    Args:
        cluster: ``slurm``; ``local`` for a run on the submitting machine; ``here`` for one in its allocation.
        job_id: Slurm's job id, of a chain that of its first job; else the process id of the script.
        directory: the directory of submission.
        python: the interpreter of its tasks.
        time: when, in seconds since the epoch.
        run_dir: the run directory, so that a move and a copy are noticed.
        host: the submitting host, on which a local run's process is; None for a sweep, and for an element that begins
            in the job of its sweep.
        sweep: the id of the sweep that the run is an element of; None for a run of its own.
        index: which element it is.
        template: the value of ``--template``; None is the default one.
        changes: the changes of the training since the first submission, in their order.
        chain: the ids of all jobs of a chain (``--chain``), in the order in which they start; empty for one job.
    """

    ADVICE: ClassVar[str] = (
        "Slurm's own commands (squeue, scancel) still act on its job; to go on with the run, remove this file, and "
        "give the job file too: hpcddp submit JOB --resume RUN"
    )

    cluster: Literal["slurm", "local", "here"]
    job_id: str
    directory: str
    python: str
    time: float
    run_dir: str
    host: str | None = None
    sweep: str | None = None
    index: int | None = None
    template: str | None = None
    changes: tuple[Change, ...] = ()
    chain: tuple[str, ...] = ()

    @property
    def job_ids(self) -> tuple[str, ...]:
        """The ids of all of its jobs, in the order in which they start."""
        return self.chain or (self.job_id,)


def read_submission(run: RunDirectory) -> SubmissionRecord | None:
    """Return the newest submission of a run, or None if its script was submitted by hand.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(run.submission, SubmissionRecord)


def chain_of(run: RunDirectory) -> tuple[str, ...]:
    """Return the ids of the jobs of a run's chain; empty for a run of one job, and where the record is damaged."""
    submission = None
    with suppress(RecordError):
        submission = read_submission(run)
    return () if submission is None else submission.chain


def write_submission_record(run: RunDirectory, record: SubmissionRecord) -> None:
    """Write where a run went."""
    write_record(run.submission, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Record):
    """Who started an attempt.

    Args:
        job_id: Slurm's job id, or the process id of a local run; None by hand.
        host: where the batch script runs.
        time: seconds since the epoch.
        is_local: whether the job is a process of its host.
        restart_count: how often Slurm has requeued the job before.
        start_number: how many attempts this start of the job has begun before; more than 0 after a restart.
        submit_time: Slurm's submit time of this start, None if it could not be asked. Slurm renews it at every requeue.
        token: a secret, by which the ranks of this attempt know each other; empty where no ranks meet by it.
        end_time: when the job's time is over, in seconds since the epoch; None without a limit.
        run_dir: the run directory; None if a program of the user's own has begun the attempt itself.
        pid: the process of a program of the user's own that has begun the attempt itself; else None.
        allocation: Slurm's id of the allocation that a local run has its tasks in; else None.
        nodes: how many nodes Slurm has given the job, which may have asked for a range; None if that is not known.
    """

    ADVICE: ClassVar[str] = (
        "its checkpoints and logs are as they were; to go on with the run, make sure that its job has ended (squeue), "
        "and remove this file"
    )

    job_id: str | None
    host: str
    time: float
    is_local: bool
    restart_count: int = 0
    start_number: int = 0
    submit_time: str | None = None
    token: str = ""
    end_time: float | None = None
    run_dir: str | None = None
    pid: int | None = None
    allocation: str | None = None
    nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Record):
    """Why a job was refused: ``refused-<job id>.json``.

    Args:
        why: a sentence.
    """

    ADVICE: ClassVar[str] = "its job was refused once, and stays refused; use another run id or run_root"

    why: str


def read_start(attempt: AttemptDirectory) -> Start | None:
    """Return who started an attempt, or None if it has no record yet.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(attempt.start, Start)


def write_start(attempt: AttemptDirectory, start: Start) -> None:
    """Write who starts an attempt."""
    write_record(attempt.start, start)


def newest_start(run: RunDirectory) -> Start | None:
    """Return who started the newest attempt of a run, or None if none has started.

    Raises:
        RecordError: the record is damaged.
    """
    number = run.newest_attempt()
    return None if number is None else read_start(run.attempt(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAddress(Record):
    """Where rank 0 of an attempt listens.

    Args:
        addresses: the addresses by which others may reach it, the most likely first.
    """

    ADVICE: ClassVar[str] = "the ranks of this attempt cannot meet; its checkpoints are as they were"

    host: str
    addresses: tuple[str, ...]
    port: int


def publish_address(attempt: AttemptDirectory, address: PublishedAddress) -> None:
    """Write where rank 0 listens."""
    write_record(attempt.rendezvous, address, reserves=attempt.run.reserves("meeting"))


def read_address(attempt: AttemptDirectory) -> PublishedAddress | None:
    """Return where rank 0 listens, or None before it does.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(attempt.rendezvous, PublishedAddress)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedEnd(Record):
    """The end of the job as rank 0 of a command has asked Slurm for it; the other ranks read it here.

    Args:
        end_time: seconds since the epoch; None without a limit.
        time: when it was asked for, in seconds since the epoch.
    """

    ADVICE: ClassVar[str] = "the ranks end at the time that was known when the attempt began"

    end_time: float | None
    time: float


_RANKS_ADVICE: Final = "without it the hosts of the ranks are not known; everything else works"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The CPUs to which srun has bound a task, and its GPU.

    Args:
        cpus: as Linux and Slurm write numbers: ``0-7,64-71``.
        cpus_needed: how many its job asks for.
        gpu_address: that of its GPU on the PCI bus; empty without a GPU, and where it is not known.
        gpu_cpus: the CPUs of the NUMA node of that GPU; all of the host if the machine does not tell it.
    """

    cpus: str
    cpus_needed: int
    gpu_address: str = ""
    gpu_cpus: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank(Record):
    """Where a rank runs.

    Args:
        gpu: its GPU; None if it has none, or runs a command.
        launcher: the launcher that this task starts for the ranks of its host; None if the task is a rank.
        binding: None where it may use all CPUs of its host, or srun did not start it.
    """

    ADVICE: ClassVar[str] = _RANKS_ADVICE

    host: str
    gpu: str | None = None
    launcher: str | None = None
    binding: Binding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks(Record):
    """Where each rank of an attempt runs.

    Args:
        ranks: all of them, in their order.
    """

    ADVICE: ClassVar[str] = _RANKS_ADVICE

    ranks: tuple[Rank, ...]


def write_ranks(attempt: AttemptDirectory, ranks: Sequence[Rank]) -> None:
    """Write where all ranks of an attempt run."""
    write_record(attempt.ranks, Ranks(ranks=tuple(ranks)), reserves=attempt.run.reserves("meeting"))


def read_ranks(attempt: AttemptDirectory) -> tuple[Rank, ...] | None:
    """Return where all ranks of an attempt run, or None before they have met.

    Raises:
        RecordError: the record is damaged.
    """
    ranks = read_record(attempt.ranks, Ranks)
    return None if ranks is None else ranks.ranks


def known_ranks(attempt: AttemptDirectory) -> tuple[Rank, ...]:
    """Return where all ranks of an attempt run; none if that is not known, also where the record is damaged."""
    try:
        return read_ranks(attempt) or ()
    except RecordError:
        return ()


def known_hosts(attempt: AttemptDirectory) -> list[str]:
    """Return the host of each rank; none if they are not known."""
    return [rank.host for rank in known_ranks(attempt)]


def member_word(attempt: AttemptDirectory) -> str:
    """Return what the numbers of logs and records count: ``rank``, or ``task`` where each task starts a launcher."""
    ranks = known_ranks(attempt)
    return "task" if ranks and ranks[0].launcher else "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Record):
    """All ranks of an attempt stopped after the same step.

    Args:
        step: optimizer steps done.
        reason: why the ranks stopped.
        cause: the ``Cause``'s word, None if it was not asked or not known in time.
        saved: whether a checkpoint of that very step is there.
        save_s: how long the save took, in seconds; 0 if there was nothing to save.
        time: seconds since the epoch.
    """

    ADVICE: ClassVar[str] = "the checkpoints are as they were; to go on from the newest, resume the run"

    attempt: int
    step: int
    reason: StopReason
    cause: str | None
    saved: bool
    save_s: float
    time: float

    @property
    def known_cause(self) -> Cause | None:
        """The cause, None if it was not asked, not known in time, or is one of a newer version."""
        return next((cause for cause in Cause if cause == self.cause), None)


def write_decision(attempt: AttemptDirectory, decision: Decision) -> None:
    """Write the decision into the attempt's directory."""
    write_record(attempt.decision, decision, reserves=attempt.run.reserves("decision"))


def read_decision(attempt: AttemptDirectory) -> Decision | None:
    """Return the attempt's decision, or None if its ranks did not agree to stop.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(attempt.decision, Decision)


StopNotice = Literal["terminated", "warned", "deadline"]
"""TERM was received, the time limit is near and the command handles the warning, or the time limit has been reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramExit(Record):
    """How one rank's program ended.

    Args:
        time: seconds since the epoch.
        code: its exit code; a negative one is the signal that killed it, as ``subprocess`` has it.
        notice: how it was told to stop before it ended, ``told`` in the file; None if it ended by itself.
        cause: the ``Cause``'s word, None if it was not asked or not known in time.
        error: the exception that ended it after it was told to stop, as Python prints it; None if there was none.
    """

    ADVICE: ClassVar[str] = "how the program of that rank ended is not known; the logs of the ranks may tell"

    rank: int
    host: str
    time: float
    code: int
    notice: StopNotice | None = field(default=None, metadata={"key": "told"})
    cause: str | None = None
    error: str | None = None


def reserve_exit(attempt: AttemptDirectory, rank: int) -> None:
    """Make the reserve file for the record of a rank.

    Raises:
        OSError: the disk is full, read-only or gone.
    """
    make_reserves([attempt.rank_exit_reserve(rank)])


def write_exit(attempt: AttemptDirectory, record: ProgramExit) -> None:
    """Write the record of a rank; its reserve file is used or removed."""
    reserve = attempt.rank_exit_reserve(record.rank)
    write_record(attempt.rank_exit(record.rank), record, reserves=[reserve])
    reserve.unlink(missing_ok=True)


_LONGEST_LINE = 300
# Of a longer message the first and the last lines are shown: the last ones often hold the error that another one wraps.
_MOST_LINES_BELOW_HEADLINE = 9
_FIRST_LINES_BELOW_HEADLINE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord(Record):
    """Why one rank ended.

    Args:
        time: seconds since the epoch.
        kind: the error's kind or the exception's type.
        exit_code: what the task exits with.
        secondary: whether the rank only failed because another one had gone.
        waiting: whether the rank was found waiting for others, so that it is not the one that held them up.
        device: its device, None if it had none yet.
        step: optimizer steps that it had done; None before the first.
        who: which rank failed, or which task of a launcher, in words; None for the rank itself.
    """

    ADVICE: ClassVar[str] = "why that rank failed is not known; its log may tell"

    rank: int
    host: str
    time: float
    kind: str
    message: str
    traceback: str
    exit_code: int
    secondary: bool
    waiting: bool = False
    device: str | None = None
    step: int | None = None
    who: str | None = None

    @property
    def place(self) -> str:
        """Which rank it is, and where: ``rank 3 on n2 (cuda:1)``."""
        who = self.who or f"rank {self.rank}"
        device = f" ({self.device})" if self.device else ""
        return f"{who} on {self.host}{device}"

    @property
    def when(self) -> str:
        """How far it was, to be put behind a verb."""
        return "" if self.step is None else f" after step {self.step}"

    @property
    def label(self) -> str:
        """The exception's type before its message, as Python prints it; a kind of hpcddp's own is for programs."""
        return "" if self.kind.islower() else f"{self.kind}: "

    @property
    def headline(self) -> str:
        """The message's first line, cut where it would fill a screen."""
        return _cut(self.message.strip().partition("\n")[0])

    @property
    def below_headline(self) -> list[str]:
        """The message's other lines, for a terminal; of many lines, the middle is left out with a note."""
        lines = self.message.strip().split("\n")[1:]
        left_out = len(lines) - _MOST_LINES_BELOW_HEADLINE
        if left_out > 0:
            # The note takes a line as well.
            left_out += 1
            end = _FIRST_LINES_BELOW_HEADLINE + left_out
            lines[_FIRST_LINES_BELOW_HEADLINE:end] = [f"... ({left_out} lines are left out)"]
        return [_cut(printable(line.expandtabs(2)).rstrip()) for line in lines]


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How the programs of all tasks of an attempt ended.

    Args:
        exits: the records; that of a killed task is missing.
        tasks: Slurm tasks of the job.
        requested: whether the program has created the file that requests a requeue.
        damage: a record that cannot be read; it counts as missing where Slurm says enough.
    """

    exits: Sequence[ProgramExit]
    tasks: int
    requested: bool
    damage: RecordError | None = None

    @property
    def requeue_requested(self) -> bool:
        """Whether some rank requested a requeue: by exit code 75, or by the file."""
        return self.requested or any(exit_.code == ExitCode.STOPPED for exit_ in self.exits)

    @property
    def was_signalled(self) -> bool:
        """Whether some rank was told to stop before it ended."""
        return any(exit_.notice for exit_ in self.exits)

    @property
    def out_of_time(self) -> bool:
        """Whether the time limit was the reason."""
        return any(exit_.notice in {"warned", "deadline"} for exit_ in self.exits)

    @property
    def preempted(self) -> bool:
        """Whether Slurm showed a preemption while the programs ran."""
        return any(exit_.cause == Cause.PREEMPTION for exit_ in self.exits)

    @property
    def error_while_stopping(self) -> str | None:
        """The first exception that ended a program after it was told to stop, as a sentence; None if there was none."""
        failed = sorted((exit_ for exit_ in self.exits if exit_.error is not None), key=lambda exit_: exit_.time)
        if not failed:
            return None
        first = failed[0]
        first_name = f"rank {first.rank} on {first.host}"
        who = first_name if len(failed) == 1 else f"{first_name} (the first of {len(failed)} ranks)"
        return f"{who} failed after the request to stop: {first.error}"

    @property
    def is_complete(self) -> bool:
        """Whether every task left a record. One that did not was killed with its task, or its node was lost."""
        return len(self.exits) == self.tasks

    @property
    def finished(self) -> bool:
        """Whether every rank ended with exit code 0, was not told to stop, and requests no requeue."""
        well = self.is_complete and all(exit_.code == 0 for exit_ in self.exits)
        return well and not (self.was_signalled or self.requeue_requested)


def read_program_end(attempt: AttemptDirectory, *, tasks: int) -> ProgramEnd:
    """Return how the programs of an attempt ended.

    Args:
        tasks: Slurm tasks of the job.
    """
    exits: list[ProgramExit] = []
    damage: RecordError | None = None
    for path in _exit_files(attempt):
        try:
            record = read_record(path, ProgramExit)
        except RecordError as error:
            damage = damage or error
        else:
            exits += [record] if record is not None else []
    return ProgramEnd(exits=exits, tasks=tasks, requested=attempt.requeue_file.exists(), damage=damage)


def read_exits(attempt: AttemptDirectory) -> list[ProgramExit]:
    """Return the records of the programs of an attempt.

    Raises:
        RecordError: one of them is damaged.
    """
    records = (read_record(path, ProgramExit) for path in _exit_files(attempt))
    return [record for record in records if record is not None]


def _exit_files(attempt: AttemptDirectory) -> list[Path]:
    return sorted(attempt.path.glob("exit-rank-*.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord(Record):
    """The plan of a job that states a batch.

    Args:
        facts: all else that ``hpcddp plan --json`` prints, by name.
        steps_per_epoch: optimizer steps; None if the task counts the training data.
        total_steps: of the whole training; None like ``steps_per_epoch``.
    """

    ADVICE: ClassVar[str] = "without it the number of all steps is not known; everything else works"

    facts: Mapping[str, Any] = field(default_factory=dict)
    steps_per_epoch: int | None = None
    total_steps: int | None


def read_plan(run: RunDirectory) -> PlanRecord | None:
    """Return the plan of a run; None before there is one, and for a job that states no batch.

    Raises:
        RecordError: the record is damaged.
    """
    return read_record(run.plan, PlanRecord)


def write_plan_record(run: RunDirectory, document: Mapping[str, Any]) -> None:
    """Write the plan of a run.

    Args:
        document: what ``hpcddp plan --json`` prints.
    """
    write_record(run.plan, PlanRecord.from_document({"format": FORMAT, **document}))
