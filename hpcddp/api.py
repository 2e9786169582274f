"""The Python interface: what the commands ``submit``, ``render``, ``plan``, ``status``, ``logs`` and ``cancel`` do.

The functions are those of the command line, which calls the same code. All of them work from the working directory, as
the commands do, and need no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args, overload

from hpcddp.errors import HpcddpError, UserError
from hpcddp.run.directory import RunDirectory

if TYPE_CHECKING:
    from hpcddp.batch.job import JobPlan
    from hpcddp.jobfile.job import JobSpec
    from hpcddp.jobfile.overrides import Override
    from hpcddp.jobfile.problems import Problem
    from hpcddp.jobfile.read import DefaultSettings, ResolvedJob
    from hpcddp.manage.overview import SweepStatus
    from hpcddp.manage.status import RunStatus
    from hpcddp.run.result import Result
    from hpcddp.run.sweep import Sweep as SubmittedSweep
    from hpcddp.slurm.job import State
    from hpcddp.submission.request import CodeChoice, SubmitRequest

Job: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | None"
"""A job file, the content of one as a mapping, or None for a job that only the other arguments describe."""
ClusterChoice: TypeAlias = Literal["auto", "slurm", "local", "here"]
"""Where a job runs; ``auto`` is Slurm where it is found, otherwise this machine."""
SweepValues: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]]"
"""A sweep as the job file has it: the values of each field, which make a grid, or the fields of each run."""
RUN_ROOT = Path("runs")
"""The directory of all runs where nothing says another."""
_POLL_S = 1.0
_SWEEP_POLL_S = 10.0
"""Each look at a sweep on Slurm reads the files of all its elements, and asks Slurm."""


@overload
def submit(
    job: Job = None,
    *,
    command: Sequence[str | os.PathLike[str]] | None = None,
    cluster: ClusterChoice = "auto",
    force: bool = False,
    sweep: SweepValues,
    **overrides: object,
) -> Sweep: ...


@overload
def submit(
    job: Job = None,
    *,
    command: Sequence[str | os.PathLike[str]] | None = None,
    cluster: ClusterChoice = "auto",
    force: bool = False,
    sweep: None = None,
    **overrides: object,
) -> Run: ...


def submit(
    job: Job = None,
    *,
    command: Sequence[str | os.PathLike[str]] | None = None,
    cluster: ClusterChoice = "auto",
    force: bool = False,
    **overrides: object,
) -> Run | Sweep:
    """Submit a job, as ``hpcddp submit`` does, and return its run at once; of a job with a sweep, return the sweep.

    A type checker does not read the job, and expects a ``Sweep`` only if ``sweep`` is an argument. For a job file with
    a sweep of its own, use ``typing.cast``.

    Args:
        job: the path of a job file, or its content as a mapping; None for a command without a job file.
        command: the words of a command to run as the tasks, such as ``["python", "train.py"]``.
        cluster: where the job runs; ``auto`` is Slurm where it is found, otherwise this machine; ``here`` is the
            allocation that this process is in, as inside ``salloc``.
        force: whether to submit although something is missing on this machine that the nodes may have.
        **overrides: fields of the job by their key path (``**{"train.epochs": 3}``), or sections as mappings
            (``resources={"nodes": 2}``), whose other fields keep their values. ``sweep={"train.seed": "0..4"}`` makes
            a sweep, and ``max_parallel=2`` limits how many of its runs run at the same time.

    Raises:
        HpcddpError: the job is invalid, cannot run, or was refused; nothing is left behind.
    """
    from hpcddp.submission.submit import choose_cluster, new_run_id
    from hpcddp.submission.submit import submit as submit_request_
    from hpcddp.submission.sweep import submit_sweep

    if cluster not in get_args(ClusterChoice):
        raise UserError(f"cluster is {cluster!r}, which is no place for a job; write auto, slurm, local or here")
    resolved = _load(job, command, overrides)
    environment = dict(os.environ)
    request = request_to_submit(
        resolved,
        run_id=new_run_id(datetime.now().astimezone(), os.urandom(2).hex()),
        cluster=choose_cluster(cluster, environment),
        environment=environment,
        force=force,
    )
    if resolved.spec.sweep is not None:
        return Sweep(submit_sweep(request).sweep.path)
    return Run(submit_request_(request).run.path)


def render(
    job: Job = None,
    *,
    command: Sequence[str | os.PathLike[str]] | None = None,
    run_id: str | None = None,
    **overrides: object,
) -> str:
    """Return the sbatch script of a job, as ``hpcddp render`` prints it; arguments as ``submit`` has them.

    Args:
        command: the words of a command.
        run_id: the id of the run that the script is for; None for a script that you give to sbatch yourself.
        **overrides: fields of the job.

    Raises:
        HpcddpError: the job is invalid, or cannot run on any machine.
    """
    from hpcddp.submission.checks import check_renderable
    from hpcddp.submission.render import render_script

    request = request_to_submit(_load(job, command, overrides), run_id=run_id, environment=os.environ)
    check_renderable(request)
    return render_script(request).text


def plan(
    job: Job,
    *,
    samples: int | None = None,
    **overrides: object,
) -> JobPlan:
    """Return the batch plan of a job, as ``hpcddp plan`` explains it; of a range of nodes, for the largest number.

    Args:
        job: the job; arguments as ``submit`` has them.
        samples: samples of the training data; None counts them.
        **overrides: fields of the job.

    Raises:
        HpcddpError: the job is invalid, or its batch cannot be split as it asks.
    """
    spec = _load(job, None, overrides).spec
    return plans_of(spec, samples)[spec.nodes]


def plans_of(spec: JobSpec, samples: int | None) -> dict[int, JobPlan]:
    """Return the batch plans of a job that is read, by its numbers of nodes: one, or those of a range.

    Args:
        samples: samples of the training data; None counts them.
    """
    from hpcddp.batch.job import plan_each_node_count, plan_job
    from hpcddp.batch.samples import count_samples

    if samples is not None or spec.train is None:
        return plan_each_node_count(spec, partial(plan_job, samples=samples))
    python = spec.environment.interpreter or sys.executable
    count = count_samples(spec.train, spec.batch, directory=Path.cwd(), python=python)
    notes = () if count.note is None else (count.note,)
    return plan_each_node_count(spec, partial(plan_job, samples=count.samples, notes=notes))


def runs(run_root: str | os.PathLike[str] | None = None, *, everywhere: bool = False) -> list[Run]:
    """Return the runs under a run root, the newest first; each element of a sweep that has begun is a run.

    Args:
        run_root: the directory of all runs; None is the default of the command line.
        everywhere: whether to add the runs of this user under all other roots.
    """
    from hpcddp.run.find import all_runs

    directories = all_runs(_chosen_root(run_root), everywhere=everywhere)
    return [Run(run.path) for run in directories if not run.sweep_manifest.exists()]


@dataclass(frozen=True, slots=True, init=False)
class Run:
    """A run: one training, over all its attempts and requeues.

    Args:
        path: its directory; ``Run.find`` finds it by a name. That of an element of a sweep need not exist yet.

    Raises:
        NoRunError: there is no run in this directory.
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from hpcddp.run.find import NoRunError, is_run
        from hpcddp.run.sweep import sweep_of

        if not is_run(Path(path)) and sweep_of(RunDirectory(Path(path))) is None:
            raise NoRunError(f"{path} is no run directory; give the path of one, or find a run by name: Run.find(name)")
        object.__setattr__(self, "path", Path(path))

    def __repr__(self) -> str:
        """Return its id, its job's name, and its result or newest attempt, from its records alone."""
        from hpcddp.run.find import brief

        return f"<Run {self.run_id} ({brief(self._directory)})>"

    @classmethod
    def find(cls, name: str, run_root: str | os.PathLike[str] | None = None) -> Self:
        """Return the run that a name means: an id or a part of it, a job's name, a Slurm job id, or ``last``.

        Args:
            name: the name, or the run directory.
            run_root: the directory in which it is looked for first; None is the default of the command line.

        Raises:
            NoRunError: there is no such run, or there are several.
            UserError: it is a sweep of several runs.
        """
        from hpcddp.manage.overview import one_run
        from hpcddp.run.find import find_run

        return cls(one_run(find_run(name, _chosen_root(run_root))).path)

    @classmethod
    def _at(cls, path: Path) -> Self:
        """Return the run of a directory that need not be checked."""
        run = object.__new__(cls)
        object.__setattr__(run, "path", path)
        return run

    @property
    def run_id(self) -> str:
        """Its id."""
        return self.path.name

    @property
    def name(self) -> str:
        """The name of its job."""
        return RunDirectory(self.path).name

    @property
    def status(self) -> RunStatus:
        """Its state, its progress and its job now; one query to Slurm at most. ``status.as_json()`` is a dictionary."""
        from hpcddp.manage.overview import status_now

        return status_now(self._directory, os.environ)

    @property
    def state(self) -> State:
        """Its state now: a string such as ``running`` or ``finished``."""
        return self.status.state

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> State:
        """Wait until the run has ended, through requeues, and return its state.

        Args:
            timeout: seconds after which to stop waiting; None waits without a limit.
            progress: whether to print a line to stderr when the state changes, and once a minute if steps were made.

        Raises:
            TimeoutError: it has not ended by then; the run goes on.
        """
        from hpcddp.manage.follow import EndOfRun, ProgressLines

        end = EndOfRun(self._directory)
        lines = ProgressLines(f"run {self.run_id}")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            is_alive = end.is_alive()
            if progress and end.status is not None:
                lines.show_run(end.status)
            # The result is written a moment before the job leaves its nodes.
            if not is_alive and not self._has_job():
                break
            if not _sleep_until(deadline, _POLL_S):
                raise TimeoutError(f"run {self.run_id} has not ended after {timeout:g} s; it goes on")
        return self.state if end.state is None else end.state

    def result(self) -> Result | None:
        """Return its result, or None while it has none.

        Raises:
            RecordError: the record is damaged.
        """
        from hpcddp.run.result import read_result

        return read_result(self._directory)

    def metrics(self) -> list[dict[str, Any]]:
        """Return its metrics: a dictionary for each line of ``metrics.jsonl``, with ``step`` and what was measured.

        Raises:
            RecordError: the file cannot be read.
        """
        from hpcddp.run.metrics import read_metrics
        from hpcddp.run.record import LARGEST_RECORD

        return [line.as_json() for line in read_metrics(self._directory.metrics, LARGEST_RECORD).records]

    def logs(self, rank: int = 0, *, attempt: int | None = None) -> str:
        """Return the output of a rank.

        Args:
            attempt: the number of the attempt; None is the newest.

        Raises:
            UserError: there is no such log.
        """
        from hpcddp.manage.logs import chosen_attempt, merged, sources

        lines = merged(sources(chosen_attempt(self._directory, attempt), ranks=[rank]))
        return "".join(f"{line.text}\n" for line in lines)

    def cancel(self) -> str:
        """Cancel the run, as ``hpcddp cancel`` does, and return what happens now, in a sentence.

        Raises:
            HpcddpError: it could not be cancelled.
        """
        from hpcddp.manage.control import cancel
        from hpcddp.slurm import commands
        from hpcddp.submission.sweep_element import chosen_to_act_on

        chosen_to_act_on(str(self.path), self.path.parent.parent)
        environment = dict(os.environ)
        return cancel(self.status, end=lambda job_ids: commands.cancel(job_ids, environment))

    def requeue(self) -> str:
        """Save the run and start it again, as ``hpcddp requeue`` does, and return what happens now, in a sentence.

        Raises:
            HpcddpError: it does not run, or could not be requeued.
        """
        from hpcddp.manage.control import commands_of_slurm, requeue
        from hpcddp.submission.sweep_element import chosen_to_act_on

        chosen_to_act_on(str(self.path), self.path.parent.parent)
        return requeue(self.status, commands_of_slurm(dict(os.environ)))

    def resume(
        self,
        *,
        command: Sequence[str | os.PathLike[str]] | None = None,
        force: bool = False,
        code: CodeChoice | None = None,
        **overrides: object,
    ) -> Run:
        """Submit the run again from its newest checkpoint, as ``hpcddp submit --resume`` does, and return it.

        Args:
            command: the words of a new command; None keeps the run's own.
            force: whether to submit although something is missing on this machine that the nodes may have.
            code: ``now`` runs the code of the project as it is now, ``submitted`` that of the submission; None leaves
                that to ``environment.code``.
            **overrides: fields of the job that change, as ``submit`` has them; the others stay as they were.

        Raises:
            HpcddpError: it is alive, has finished and gets nothing more to do, would be another training, or was
                refused.
        """
        from hpcddp.jobfile.read import change_job
        from hpcddp.submission.resume import request_to_resume, resume
        from hpcddp.submission.sweep_element import find_to_resume

        run = find_to_resume(str(self.path), self.path.parent.parent)
        environment = dict(os.environ)
        options = _options(command, overrides)

        def change(spec: JobSpec) -> ResolvedJob:
            profiles = profiles_directory(environment)
            return change_job(spec, file=str(run.job_file), options=options, profiles=profiles, environment=environment)

        request = request_to_resume(run, change if options else None, environment=environment)
        return Run(resume(run, replace(request, force=force, code=code)).run.path)

    def _has_job(self) -> bool:
        from hpcddp.run.job_records import newest_start
        from hpcddp.run.ownership import is_alive
        from hpcddp.run.record import RecordError
        from hpcddp.slurm.commands import SlurmUnavailableError

        with suppress(RecordError, SlurmUnavailableError):
            start = newest_start(self._directory)
            return start is not None and is_alive(start)
        return False

    @property
    def _directory(self) -> RunDirectory:
        return RunDirectory(self.path)


@dataclass(frozen=True, slots=True, init=False)
class Sweep:
    """A sweep: many runs of one training with different values, submitted at once.

    Args:
        path: its directory; ``Sweep.find`` finds it by a name.

    Raises:
        NoRunError: there is no sweep in this directory.
        UserError: the record of the sweep is damaged.
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))
        self._read()

    def __repr__(self) -> str:
        """Return its id, its job's name, and the results of its runs, from their records alone."""
        try:
            results = self.results()
            counts = Counter(result.status for result in results if result is not None)
            ended = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
            state = f"{len(results)} runs, {ended or 'none with a result'}"
        except (HpcddpError, OSError):
            state = "its records cannot be read"
        return f"<Sweep {self.sweep_id} ({self.name}, {state})>"

    def __iter__(self) -> Iterator[Run]:
        """Yield its runs in their order."""
        return iter(self.runs)

    def __len__(self) -> int:
        """Return the number of its runs."""
        return len(self._read().elements)

    @classmethod
    def find(cls, name: str, run_root: str | os.PathLike[str] | None = None) -> Self:
        """Return the sweep that a name means: an id or a part of it, a job's name, a Slurm job id, or ``last``.

        Args:
            name: the name, or the directory of the sweep.
            run_root: the directory in which it is looked for first; None is the default of the command line.

        Raises:
            NoRunError: there is no such sweep, or there are several.
        """
        from hpcddp.run.find import find_run

        return cls(find_run(name, _chosen_root(run_root)).path)

    @property
    def sweep_id(self) -> str:
        """Its id; the id of run 5 is this id and ``_5``."""
        return self.path.name

    @property
    def name(self) -> str:
        """The name of its job."""
        return RunDirectory(self.path).name

    @property
    def runs(self) -> list[Run]:
        """Its runs in their order; on Slurm, the directory of a run that waits for its first start does not exist."""
        sweep = self._read()
        return [Run._at(sweep.run(index).path) for index in range(len(sweep.elements))]  # noqa: SLF001

    @property
    def values(self) -> list[dict[str, Any]]:
        """The values with which each run was submitted, by key path, in the order of the runs."""
        return [dict(values) for values in self._read().elements]

    @property
    def status(self) -> SweepStatus:
        """The state and the progress of all its runs now; one query to Slurm at most. ``status.counts`` counts them."""
        from hpcddp.manage.overview import sweep_status_now

        status, _ = sweep_status_now(self._read(), os.environ)
        return status

    @property
    def states(self) -> list[State]:
        """The state of each run now, in the order of the runs; one query to Slurm at most."""
        return [element.state for element in self.status.elements]

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> list[State]:
        """Wait until all runs have ended, through requeues, and return their states in the order of the runs.

        Args:
            timeout: seconds after which to stop waiting; None waits without a limit.
            progress: whether to print a line to stderr when the number of runs in a state changes.

        Raises:
            TimeoutError: they have not ended by then; the runs go on.
        """
        from hpcddp.manage.follow import ProgressLines
        from hpcddp.slurm.job import State

        lines = ProgressLines(f"sweep {self.sweep_id}")
        deadline = None if timeout is None else time.monotonic() + timeout
        poll_s = _SWEEP_POLL_S if self._read().chunks else _POLL_S
        alive_before: list[Run] = []
        while True:
            status = self.status
            if progress:
                lines.show(status.sentence)
            has_ended = not status.is_alive and State.UNKNOWN not in status.counts
            # A result is written a moment before the job leaves its nodes.
            if has_ended and not any(run._has_job() for run in alive_before):  # noqa: SLF001
                return [element.state for element in status.elements]
            if not has_ended:
                alive_before = [Run._at(element.run.path) for element in status.elements if element.is_alive]  # noqa: SLF001
            if not _sleep_until(deadline, poll_s):
                raise TimeoutError(
                    f"sweep {self.sweep_id} has not ended after {timeout:g} s ({status.sentence}); it goes on"
                )

    def results(self) -> list[Result | None]:
        """Return the result of each run in the order of the runs, None for a run that has none.

        Raises:
            RecordError: a record is damaged.
        """
        return [run.result() for run in self.runs]

    def cancel(self) -> str:
        """Cancel all runs that wait or run, as ``hpcddp cancel`` does, and return what happens now, in a sentence.

        Raises:
            HpcddpError: they could not be cancelled.
        """
        from hpcddp.manage.control import cancel_sweep
        from hpcddp.slurm import commands
        from hpcddp.submission.sweep_element import chosen_to_act_on

        chosen_to_act_on(str(self.path), self.path.parent.parent)
        environment = dict(os.environ)
        return cancel_sweep(self.status, end=lambda job_ids: commands.cancel(job_ids, environment), now=time.time())

    def resume(self, *, force: bool = False, code: CodeChoice | None = None) -> Sweep:
        """Continue all runs that have ended and not finished, as ``hpcddp submit --resume`` does, and return the sweep.

        Args:
            force: whether to submit although something is missing on this machine that the nodes may have.
            code: with which code, as for a run.

        Raises:
            HpcddpError: there is no such run, the state of a run is unknown, or the submission was refused.
        """
        from hpcddp.manage.overview import sweep_status_now
        from hpcddp.submission.resume import request_to_resume
        from hpcddp.submission.resume_sweep import resume_sweep
        from hpcddp.submission.sweep_element import checked_run

        checked_run(RunDirectory(self.path))
        sweep = self._read()
        environment = dict(os.environ)
        status, unanswered = sweep_status_now(sweep, environment)
        left = status.elements_to_resume(unanswered)
        request = request_to_resume(sweep.directory, environment=environment)
        resume_sweep(sweep, left, replace(request, force=force, code=code))
        return self

    def _read(self) -> SubmittedSweep:
        """Return what the record of the sweep says."""
        from hpcddp.run.find import NoRunError
        from hpcddp.run.sweep import read_sweep

        sweep = read_sweep(self.path)
        if sweep is None:
            raise NoRunError(f"{self.path} is no directory of a sweep; find a sweep by name: Sweep.find(name)")
        return sweep


def _sleep_until(deadline: float | None, seconds: float) -> bool:
    """Sleep some seconds, but not beyond a deadline; return False if the deadline has passed.

    Args:
        deadline: on the monotonic clock; None for none.
        seconds: how long to sleep.
    """
    left = seconds if deadline is None else min(seconds, deadline - time.monotonic())
    if left <= 0:
        return False
    time.sleep(left)
    return True


def _load(job: Job, command: Sequence[str | os.PathLike[str]] | None, overrides: Mapping[str, Any]) -> ResolvedJob:
    options = _options(command, overrides)
    source: Path | Mapping[str, Any] | None = None
    if isinstance(job, Mapping):
        source = _plain_mapping(job)
    elif job is not None:
        source = Path(job)
    if source is None and command is None and not overrides:
        raise UserError("no job is given; write the path of a job file, a mapping, or command=[...]")
    return read_job(source, (), options=options)


def _options(
    command: Sequence[str | os.PathLike[str]] | None, overrides: Mapping[str, Any]
) -> list[Override | Problem]:
    """Return the fields that keyword arguments set."""
    from hpcddp.jobfile.overrides import read_options

    words = None if command is None else _words(command)
    return [*read_options({}, words), *_overrides(overrides)]


def _words(command: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the words of a command, a path as a text."""
    if isinstance(command, str):
        raise UserError(f"command is {command!r}, one text; write a list of its words: command={command.split()!r}")
    words: list[Any] = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in command]
    no_text = next((word for word in words if not isinstance(word, str)), None)
    if no_text is not None:
        raise UserError(f"command holds {no_text!r}, and each of its words is a text; write {str(no_text)!r}")
    return words


def _overrides(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[Override | Problem]:
    """Yield the fields that keyword arguments set; a mapping for a section sets some of its fields."""
    from hpcddp.jobfile.document import Source
    from hpcddp.jobfile.job import find_key
    from hpcddp.jobfile.messages import unknown_key
    from hpcddp.jobfile.overrides import Override
    from hpcddp.jobfile.problems import Problem

    for name, value in values.items():
        path = (*above, *name.split("."))
        key = ".".join(path)
        file = f"argument {'.'.join(path)}"
        kind = find_key(path)
        if kind is None:
            yield Problem(file=file, key=key, sentence=unknown_key(path))
        elif kind.section is not None and isinstance(value, Mapping):
            yield from _overrides(value, path)
        else:
            yield Override(path=path, value=_plain(value), source=Source(origin="argument", file=file))


def _plain_mapping(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: object) -> object:
    """Return a value as YAML has it: a path is a text, a tuple a list."""
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def read_job(
    job: Path | Mapping[str, Any] | None,
    overrides: Sequence[str] | None,
    *,
    options: Sequence[Override | Problem] = (),
) -> ResolvedJob:
    """Read a job with the default settings of ``hpcddp.yaml`` and the user's profiles.

    Args:
        job: the job file, or its content; None if the options describe the whole job.
        overrides: the values of ``--set``.
        options: the fields that other options set.

    Raises:
        JobFileError: with every problem of the files and options.
    """
    from hpcddp.jobfile.read import load_job

    return load_job(job, overrides=overrides or (), options=options, defaults=defaults_of_process())


def request_to_submit(
    job: ResolvedJob,
    *,
    run_id: str | None,
    cluster: Literal["slurm", "local", "here"] = "slurm",
    template: str | None = None,
    environment: Mapping[str, str],
    force: bool = False,
) -> SubmitRequest:
    """Return the request to submit a job, or to render its script, from the working directory."""
    from hpcddp.submission.request import SubmitRequest

    return SubmitRequest(
        job=job,
        run_id=run_id,
        cluster=cluster,
        python=job.spec.environment.python or sys.executable,
        template=template,
        directory=Path.cwd(),
        environment=environment,
        force=force,
    )


def default_run_root() -> Path:
    """Return the default of ``--run-root``: ``run_root`` of ``hpcddp.yaml`` or the profile, else ``runs``.

    Raises:
        JobFileError: one of these files cannot be used.
    """
    from hpcddp.jobfile.read import shared_run_root

    return Path(shared_run_root(defaults_of_process()) or RUN_ROOT)


def _chosen_root(run_root: str | os.PathLike[str] | None) -> Path:
    return default_run_root() if run_root is None else Path(run_root)


def defaults_of_process() -> DefaultSettings:
    """Return the locations of default settings for this user and working directory."""
    from hpcddp.jobfile.profiles import find_project_file
    from hpcddp.jobfile.read import DefaultSettings

    directory = Path.cwd()
    home = os.environ.get("HOME")
    return DefaultSettings(
        profiles=profiles_directory(os.environ),
        project=find_project_file(directory, home=Path(home) if home else None),
        directory=directory,
        user_id=os.geteuid(),
        environment=os.environ,
    )


def profiles_directory(environment: Mapping[str, str]) -> Path:
    """Return the directory of the user's cluster profiles (XDG Base Directory Specification)."""
    configuration = environment.get("XDG_CONFIG_HOME") or _home(environment) / ".config"
    return Path(configuration) / "hpcddp" / "profiles"


def _home(environment: Mapping[str, str]) -> Path:
    try:
        return Path(environment.get("HOME") or Path.home())
    except RuntimeError:
        raise UserError(
            f"HOME is not set, and user {os.getuid()} has no home directory in the user database; set HOME, or "
            "XDG_CONFIG_HOME"
        ) from None
