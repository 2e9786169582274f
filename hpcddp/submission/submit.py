"""The submission of a run: choose the cluster, check and render the job, write the run directory, give it to Slurm."""

from __future__ import annotations

import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from hpcddp.errors import printable
from hpcddp.jobfile.cluster import Cluster
from hpcddp.jobfile.read import ResolvedJob
from hpcddp.jobfile.sweep import element_spec
from hpcddp.run.directory import RunDirectory
from hpcddp.run.files import exists, write_text
from hpcddp.run.find import add_to_index
from hpcddp.run.job_file import read_job_file, write_exported_values
from hpcddp.run.job_records import Change, SubmissionRecord, chain_of, read_submission, write_submission_record
from hpcddp.run.ownership import group_writable_warnings, make_private_directory
from hpcddp.run.sweep import Sweep, element_id, index_of, sweep_of
from hpcddp.sandbox.request import default_directory
from hpcddp.site.rules import check_site
from hpcddp.slurm import commands
from hpcddp.slurm.job_environment import INDEX, submission_environment
from hpcddp.submission.checks import check_submittable, notes_about
from hpcddp.submission.code import take_code
from hpcddp.submission.interrupts import interruptible, tells_interruption, uninterrupted
from hpcddp.submission.render import exported_values, notes_about_script, render_script
from hpcddp.submission.request import SubmissionError, SubmitRequest, write_plan
from hpcddp.submission.source import record_source
from hpcddp.submission.template import template_to_record
from hpcddp.submission.turns import Turns

if TYPE_CHECKING:
    from submitit import Job

    from hpcddp.submission.executors import RenderedLocalExecutor, RenderedSlurmExecutor


# The paths that Slurm's packages and its configless mode use (slurm.conf(5)).
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
# sbatch(1), FILENAME PATTERN.
_SBATCH_PATTERNS: Final[tuple[str, ...]] = ("%", "\\")
# submitit.core.utils.JobPaths replaces these wherever they are in a path.
_SUBMITIT_TAGS: Final[tuple[str, ...]] = ("%j", "%t", "%A", "%a")
_DEFAULT_SIGNAL_LEAD_S = 30


def new_run_id(now: datetime, token: str) -> str:
    """Return a run id that sorts by the time of submission.

    Args:
        now: the time of submission.
        token: random letters, which make ids of the same second different.
    """
    return f"{now:%Y%m%d-%H%M%S}-{token}"


def choose_cluster(requested: Literal["auto", "slurm", "local", "here"], environment: Mapping[str, str]) -> Cluster:
    """Return the cluster to submit to.

    Args:
        requested: the value of ``--cluster``; ``auto`` is Slurm where sbatch and a configuration are found. Whether
            there is an allocation for ``here`` is checked with the job.

    Raises:
        SubmissionError: Slurm was requested and not found, or its controller does not answer.
    """
    if requested in {"local", "here"}:
        return requested
    configuration = environment.get("SLURM_CONF")
    if configuration and not Path(configuration).is_file():
        # A user who sets it wants that Slurm and not this machine, and Slurm's commands would fail.
        raise SubmissionError(
            f"SLURM_CONF is {configuration!r}, but that file does not exist; correct or unset it, or use "
            "--cluster local"
        )
    why_no_slurm = _why_no_slurm(environment)
    if why_no_slurm is not None:
        if requested == "auto":
            return "local"
        way_out = "submit on a login node, set SLURM_CONF, or use --cluster local"
        if (default_directory(environment) / "slurm.conf").is_file():
            way_out = "to use your sandbox, run the line that hpcddp sandbox status prints, or use --cluster local"
        raise SubmissionError(f"--cluster slurm: {why_no_slurm}; {way_out}")
    if shutil.which("srun", path=environment.get("PATH")) is None:
        # sbatch passes this PATH on to the script, which calls srun.
        raise SubmissionError(
            "sbatch was found on PATH, and srun was not; add the directory of Slurm's commands to PATH, or use "
            "--cluster local"
        )
    if not commands.controller_answers(environment):
        raise SubmissionError("Slurm's controller does not answer; try again later, or run here with --cluster local")
    return "slurm"


def _why_no_slurm(environment: Mapping[str, str]) -> str | None:
    """Return what of Slurm is not on this machine; None if a job can be given to sbatch."""
    if shutil.which("sbatch", path=environment.get("PATH")) is None:
        return "sbatch was not found"
    if environment.get("SLURM_CONF"):
        return None
    for path in _CONFIGURATIONS:
        if Path(path).is_file():
            return None
    return "no slurm.conf was found"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job that is checked and rendered; all that is left is to write its directory and to submit it.

    Args:
        notes: what may keep the job from running, a sentence each.
    """

    request: SubmitRequest
    script: str
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``submit --dry-run --json``."""
        run = self.request.run
        document: dict[str, Any] = {
            "cluster": self.request.cluster,
            "run_id": run.run_id,
            "run_dir": str(run.path),
            "script": self.script,
        }
        if self.request.elements:
            document["elements"] = self.request.elements
        return document


def prepare(request: SubmitRequest) -> PreparedJob:
    """Check and render a job or a sweep, without a change to anything.

    Raises:
        HpcddpError: the job cannot run, or cannot be rendered.
    """
    request_of_script = request
    if request.chain is not None and request.elements:
        raise SubmissionError(
            "--chain goes on with one run, and a sweep has several; leave it out, and resume each run that has stopped "
            "with --resume RUN --chain N"
        )
    if request.chain is not None and request.cluster != "slurm":
        raise SubmissionError("--chain submits jobs to Slurm, and this one runs here; leave it out")
    notes = check_submittable(request)
    if len(request.elements) == 1:
        notes += ("the sweep makes one run, because each key has one value; write several, as in 0.1,0.2 or 0..4",)
    if request.elements and request.cluster == "local":
        # On this machine each element has a script of its own; they differ in their values.
        request_of_script = element_request(request, 0)
    check_site(request.job, request.cluster, request.environment)
    script = render_script(request_of_script)
    notes = (*notes, *notes_about(request), *notes_about_script(request_of_script, script))
    return PreparedJob(request=request, script=script.text, notes=notes)


def element_request(request: SubmitRequest, index: int) -> SubmitRequest:
    """Return the request of an element of a sweep as a run of its own."""
    spec = element_spec(request.job.spec, request.elements[index])
    run_id = element_id(request.run.run_id, index)
    return replace(request, run_id=run_id, job=ResolvedJob(spec=spec, origins={}))


@tells_interruption()
def submit(request: SubmitRequest) -> Submission:
    """Write the directory of a new run, and submit its job.

    Raises:
        HpcddpError: the job could not be submitted; nothing is left behind.
    """
    job = prepare(request)
    code = take_code(request)
    run = request.run
    with uninterrupted(submitted_all_the_same(run)), new_run_directory(run, request.cluster):
        run.submitit.mkdir(mode=0o700)
        write_run(run, job)
        record_source(run, request)
        with interruptible():
            notes = (*job.notes, *code.write(run))
        # Slurm would create it with the submitter's umask.
        write_text(run.batch_log, "")
        return submit_script(run, request, job.script, notes=notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A submitted job.

    Args:
        cluster: ``slurm``; ``local`` for a run on this machine; ``here`` for one in the allocation of this shell.
        job: its job, of a chain the first one.
        dropped: names of inherited variables that sbatch did not get, because they would override directives.
        epochs: the epochs of the training.
        first_attempt: the number of the job's first attempt.
        notes: what may keep the job from running, a sentence each.
        consequences: what a resumption changes in the training, a sentence each.
    """

    run: RunDirectory
    cluster: Cluster
    job: Job[Any]
    dropped: tuple[str, ...]
    epochs: int
    first_attempt: int = 0
    notes: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()

    @property
    def job_id(self) -> str:
        """Slurm's job id; else the process id of the script."""
        return str(self.job.job_id)

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user, a sentence each."""
        return [*self.notes, *group_writable_warnings(self.run.path)]

    def as_json(self) -> dict[str, Any]:
        """Return what ``submit --json`` prints."""
        document: dict[str, Any] = {
            "run_id": self.run.run_id,
            "job_id": self.job_id,
            "run_dir": str(self.run.path),
            "cluster": self.cluster,
            "dropped_environment": list(self.dropped),
            "warnings": self.warnings,
        }
        chain = chain_of(self.run)
        if chain:
            document["chain"] = list(chain)
        if self.consequences:
            document["changes"] = list(self.consequences)
        return document


def submitted_all_the_same(run: RunDirectory) -> str:
    """Return what a user has to know who interrupts the submission of a run or of a sweep too late."""
    return f"{run.run_id} was submitted all the same; to end it: {shlex.join(['hpcddp', 'cancel', str(run.path)])}"


@contextmanager
def new_run_directory(run: RunDirectory, cluster: Cluster) -> Iterator[None]:
    """Make the directory of a new run; after an error remove it, and the parents that were made for it.

    Raises:
        SubmissionError: it exists already, or sbatch or submitit would change its path.
    """
    check_path(run.path, cluster)
    missing_parents = [parent for parent in run.path.parents if not exists(parent)]
    try:
        make_private_directory(run.path.parent)
        _make_run_directory(run)
        try:
            yield
        except BaseException:
            shutil.rmtree(run.path)
            raise
    except BaseException:
        # Also after Ctrl-C.
        for parent in missing_parents:
            # Another run may be there by now.
            with suppress(OSError):
                parent.rmdir()
        raise


def _make_run_directory(run: RunDirectory) -> None:
    try:
        run.path.mkdir(mode=0o700)
    except FileExistsError:
        raise SubmissionError(f"the run directory {run.path} exists already; use another run id or run_root") from None


def check_path(path: Path, cluster: Cluster) -> None:
    """Refuse a path that no script can hold, or in which submitit or sbatch replaces a pattern.

    Raises:
        SubmissionError: the path is not UTF-8, or holds a control character or such a pattern.
    """
    if printable(str(path)) != str(path):
        raise SubmissionError(
            f"the run directory {str(path)!r} is not UTF-8, or holds a control character; choose another run_root"
        )
    program = "sbatch" if cluster == "slurm" else "submitit"
    patterns = _SBATCH_PATTERNS if cluster == "slurm" else _SUBMITIT_TAGS
    for pattern in patterns:
        if pattern in str(path):
            raise SubmissionError(
                f"the run directory {path} holds {pattern}, which {program} replaces; choose another run_root"
            )


def turns_of(sweep: Sweep) -> Turns:
    """Return the turns of the elements of a sweep on this machine: one after another, unless its job says more."""
    return Turns(directory=sweep.path, count=read_job_file(sweep.directory).max_parallel or 1)


def write_run(run: RunDirectory, job: PreparedJob, *, total_steps: int | None = None) -> None:
    """Write job, plan, exported values and script of a run or of a sweep; ``total_steps`` as for ``write_plan``.

    On this machine bash runs this script. sbatch gets a copy of it, which submitit keeps beside the pickle
    (``RenderedSlurmExecutor``).
    """
    request = job.request
    write_text(run.job_file, request.job_text)
    if not request.elements:
        write_plan(run, request.plan, total_steps=total_steps)
    write_exported_values(run, exported_values(request))
    write_text(run.script, job.script)


def submit_script(
    run: RunDirectory,
    request: SubmitRequest,
    script: str,
    *,
    notes: tuple[str, ...] = (),
    changes: Sequence[Change] = (),
) -> Submission:
    """Give a script to sbatch, or start it on this machine, and record the submission in the run directory.

    It is called in a block of ``uninterrupted``.

    Args:
        run: the run's directory, with all that the script needs.
        request: the request that the script is rendered from.
        script: the text of the script.
        notes: what may keep the job from running, a sentence each.
        changes: what this submission changes in the training.

    Raises:
        HpcddpError: the job could not be submitted.
    """
    from hpcddp.task import work

    environment, dropped = submission_environment(request.environment)
    sweep = sweep_of(run)
    if sweep is not None:
        environment[INDEX] = str(index_of(run))
    dependency = request.all_dependencies
    options: tuple[str, ...] = ()
    if request.chain is not None:
        # Slurm starts a singleton when no job of its user and its name is left. With the name of the job alone, a run
        # would wait for all other runs of this job.
        dependency = dependency.also("singleton")
        options = (f"--job-name={run.name_of_chain}", "--no-requeue")
    executor: RenderedSlurmExecutor | RenderedLocalExecutor
    # The first one imports submitit.
    with interruptible():
        if request.cluster == "slurm":
            from hpcddp.submission.executors import RenderedSlurmExecutor

            executor = RenderedSlurmExecutor(
                run.submitit,
                script=script,
                tasks=request.job.spec.tasks,
                environment=environment,
                directory=request.directory,
                dependency=dependency,
                options=options,
            )
        else:
            executor = _local_executor(run, request, environment, sweep)
            # Only where sbatch would have taken them for options is a user told about them.
            dropped = ()
    # Read before the submission, because the job may begin at once.
    previous = read_submission(run)
    newest_attempt = run.newest_attempt()
    first_attempt = 0 if newest_attempt is None else newest_attempt + 1
    changes_of_attempt = [replace(change, attempt=first_attempt) for change in changes]
    jobs: list[Job[Any]] = []
    try:
        for _ in range(request.chain or 1):
            # A signal between two jobs of a chain undoes it.
            with interruptible():
                pass
            jobs.append(executor.submit(work.run, str(run.path)))
        record = submission_record(request, str(jobs[0].job_id))
        if sweep is not None:
            record = replace(record, sweep=sweep.sweep_id, index=index_of(run))
        changes_before = () if previous is None else previous.changes
        record = replace(record, host=socket.gethostname(), changes=(*changes_before, *changes_of_attempt))
        if request.chain is not None:
            record = replace(record, chain=tuple(str(job.job_id) for job in jobs))
        _write_record(run, record)
    except BaseException as error:
        # No record names these jobs. Those that wait come first: the end of one is the turn of another.
        for job in reversed(jobs):
            job.cancel(check=False)
        if isinstance(error, commands.SlurmCommandError) and jobs:
            why = (
                f"job {len(jobs) + 1} of the chain is not submitted, and those before it are cancelled: {error.message}"
            )
            raise type(error)(why, **error.values) from error
        raise
    add_to_index(run)
    train = request.job.spec.train
    epochs = 1 if train is None else train.epochs
    return Submission(
        run=run,
        cluster=request.cluster,
        job=jobs[0],
        dropped=dropped,
        epochs=epochs,
        first_attempt=first_attempt,
        notes=notes,
    )


def _local_executor(
    run: RunDirectory, request: SubmitRequest, environment: Mapping[str, str], sweep: Sweep | None
) -> RenderedLocalExecutor:
    """Return the executor of a run on this machine, or in the allocation of this shell."""
    from hpcddp.submission.executors import RenderedLocalExecutor

    spec = request.job.spec
    time_limit = spec.resources.time_limit
    signal_lead_s = _DEFAULT_SIGNAL_LEAD_S
    if spec.signal_lead:
        signal_lead_s = int(spec.signal_lead.total_seconds())
    program = ["/bin/bash", str(run.script)]
    allocation = None
    if request.cluster == "here":
        allocation = request.environment["SLURM_JOB_ID"]
    elif sweep is not None:
        program = turns_of(sweep).command(run.script)
    return RenderedLocalExecutor(
        run.submitit,
        program=program,
        log=run.batch_log,
        command=shlex.join([request.python, "-P", "-u", "-m", "hpcddp.task"]),
        tasks=spec.tasks,
        time_limit_s=None if time_limit is None else time_limit.seconds,
        signal_lead_s=signal_lead_s,
        environment=environment,
        directory=request.directory,
        allocation=allocation,
    )


def submission_record(request: SubmitRequest, job_id: str) -> SubmissionRecord:
    """Return the record of the submission of a run or of a sweep."""
    return SubmissionRecord(
        cluster=request.cluster,
        job_id=job_id,
        directory=str(request.directory),
        python=request.python,
        time=time.time(),
        template=template_to_record(request.template),
        run_dir=str(request.run.path),
    )


def _write_record(run: RunDirectory, record: SubmissionRecord) -> None:
    """Record the submission of a job, which is cancelled if that fails."""
    try:
        write_submission_record(run, record)
    except OSError as error:
        raise SubmissionError(
            f"job {record.job_id} was cancelled, because {run.submission} cannot be written: {error.strerror}"
        ) from error
