"""``hpcddp init``."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcddp.api import profiles_directory
from hpcddp.cli.options import AsJson
from hpcddp.cli.output import echo, write
from hpcddp.errors import UserError, counted, printable

if TYPE_CHECKING:
    from hpcddp.jobfile.cluster import ClusterFacts, Partition
    from hpcddp.site.profile_writer import Choice


_LISTED_PARTITIONS = 20


class InitError(UserError):
    """A profile cannot be written."""

    kind = "init"


class NoSlurmError(InitError):
    """This machine belongs to no cluster.

    Attributes:
        reason: how that shows.
    """


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(init)


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The profile's name.")] = "default",
    *,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="The partition of all jobs.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="The account of all jobs.")] = None,
    qos: Annotated[str | None, typer.Option(metavar="NAME", help="The QOS of all jobs.")] = None,
    script: Annotated[
        Path | None, typer.Option("--from", metavar="SCRIPT", help="Make a job file from this sbatch script.")
    ] = None,
    job_file: Annotated[
        Path | None,
        typer.Option(
            "--job", "-o", metavar="FILE", help="The first job file; by default job.yaml, or the name of SCRIPT."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing profile, or the job file of SCRIPT.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written, and write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a profile for this cluster, or a job file for a script.

    The command queries the cluster, and also writes a first job file. The profile,
    ~/.config/hpcddp/profiles/NAME.yaml, holds default settings for all jobs and the facts about the cluster:
    partitions, limits, GPUs, accounts, preemption. With these facts, hpcddp refuses a job that cannot run on the
    cluster. If Slurm lists GPUs, sbatch --test-only, which submits nothing, tells how the cluster lets jobs request
    them. On a machine without Slurm, the command writes only the job file, for a job that runs on this machine; NAME,
    --partition, --account or --qos are then an error.

    With --from, the command asks no cluster. It reads SCRIPT, runs nothing of it, and writes a job file that requests
    the same and runs the same program. It prints the job file, and what became of each line of the script.

    Example: hpcddp init && hpcddp submit job.yaml --follow

    Example: hpcddp init --from train.sbatch
    """
    from hpcddp.jobfile.profiles import DEFAULT_PROFILE, profile_file
    from hpcddp.site.gpu_request import find_gpu_request
    from hpcddp.site.profile_writer import choose

    settings = {"--partition": partition, "--account": account, "--qos": qos}
    given = [option for option, value in settings.items() if value]
    if name != DEFAULT_PROFILE:
        given.insert(0, "NAME")
    if script is not None:
        if given:
            raise InitError(
                f"{', '.join(given)} is for a profile, and --from takes every setting from the script; leave it "
                "out, and change the job file afterwards"
            )
        write_job_of_script(script, job_file, force=force, dry_run=dry_run, as_json=as_json)
        return
    job_file = job_file or Path("job.yaml")
    file = profile_file(_checked(name), profiles_directory(os.environ))
    if os.path.lexists(file) and not (force or dry_run):
        raise InitError(f"the profile {file} is there already; add --force to write it anew, or give another NAME")
    try:
        facts = _query_cluster()
    except NoSlurmError as error:
        if given:
            raise
        _write_local_job(job_file, error.reason, dry_run=dry_run, as_json=as_json)
        return
    choice = choose(facts, partition=partition, account=account, qos=qos)
    choice = replace(choice, gpu_request=find_gpu_request(facts, choice, os.environ))
    document = _write_profile(name, file, job_file, facts, choice, dry_run=dry_run)
    _print(document, _summary(facts, choice, document), dry_run=dry_run, as_json=as_json)


def _checked(name: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from hpcddp.jobfile.fields import ProfileName

    try:
        return TypeAdapter[str](ProfileName).validate_python(name)
    except ValidationError as error:
        reason = error.errors()[0].get("ctx", {})
        raise InitError(f"NAME is {name!r}, and {reason['why']}; write for example default") from None


def _query_cluster() -> ClusterFacts:
    """Return the facts about this cluster.

    Raises:
        NoSlurmError: this machine belongs to no cluster.
        InitError: Slurm does not answer.
    """
    from hpcddp.run.files import user_and_groups
    from hpcddp.site.facts import ask_site, read_site
    from hpcddp.slurm import commands

    user, groups = user_and_groups()
    try:
        answers = ask_site(os.environ, user=user)
    except commands.SlurmMissingError as error:
        raise _no_slurm(error.message.partition(" ")[0] + " was not found") from None
    except commands.SlurmUnavailableError:
        raise InitError("Slurm's controller does not answer, and only it knows the cluster; try again later") from None
    except commands.SlurmCommandError as error:
        if commands.NO_CONFIGURATION in error.message:
            raise _no_slurm("Slurm's commands find no slurm.conf") from None
        raise
    if answers.accounting_error is not None:
        echo(f"hpcddp: your accounts are not known: {answers.accounting_error}", err=True)
    return read_site(answers, user=user, groups=groups, today=f"{datetime.now().astimezone():%Y-%m-%d}")


def _no_slurm(reason: str) -> NoSlurmError:
    return NoSlurmError(
        f"there is no Slurm here ({reason}), so there is no cluster to look at; run hpcddp init on a login node, or "
        "without a name, --partition, --account and --qos: it then writes a job file for this machine",
        reason=reason,
    )


def _write_local_job(job_file: Path, reason: str, *, dry_run: bool, as_json: bool) -> None:
    """Write the first job file of a machine without Slurm, and print what was written.

    Args:
        job_file: the file; an existing one is kept.
        reason: why there is no cluster.
        dry_run: whether the job is printed, and nothing is written.
        as_json: whether one JSON document is printed.
    """
    from hpcddp.packages import shipped_directory

    quoted_file = shlex.quote(str(job_file))
    shipped_text = (shipped_directory("jobs") / "quickstart.yaml").read_text(encoding="utf-8")
    text = shipped_text.replace("jobs/quickstart.yaml", quoted_file)
    is_new = not os.path.lexists(job_file)
    if is_new and not dry_run:
        _save(job_file, text, "--job names another file")
    document = {
        "profile": None,
        "written": False,
        "no_cluster": reason,
        "job_file": str(job_file),
        "job_file_written": is_new and not dry_run,
        "text": text,
        "next": f"hpcddp submit {quoted_file} --cluster local --follow",
    }
    lines = [f"cluster        none: {reason}", _job_file_line(document), f"next           {document['next']}"]
    _print(document, lines, dry_run=dry_run, as_json=as_json)


def _job_file_line(document: Mapping[str, Any]) -> str:
    kept = "" if document["job_file_written"] else ", which was there and is kept"
    return f"job file       {document['job_file']}{kept}"


def _print(document: Mapping[str, Any], lines: Iterable[str], *, dry_run: bool, as_json: bool) -> None:
    """Print what was written: a document for programs, or what a dry run would write, or a summary."""
    if as_json:
        echo(json.dumps(document, indent=2))
    elif dry_run:
        write(document["text"], nl=False)
    else:
        echo("\n".join(lines))


def _write_profile(
    name: str, file: Path, job_file: Path, facts: ClusterFacts, choice: Choice, *, dry_run: bool
) -> dict[str, Any]:
    """Write the profile, and the first job file if there is none, and return what ``--json`` prints."""
    from hpcddp.jobfile.profiles import DEFAULT_PROFILE
    from hpcddp.site.profile_writer import first_job, profile_text

    is_new = not os.path.lexists(job_file)
    words = ["hpcddp", "submit", str(job_file)]
    if not is_new and name != DEFAULT_PROFILE:
        # A job file that is kept does not name this profile.
        words += ["--set", f"profile={name}"]
    text = profile_text(name, facts, choice)
    if not dry_run:
        if is_new:
            job = first_job(str(job_file), name, facts, runs_in=choice.runs_in)
            _save(job_file, job, "--job names another file")
        _save(file, text, "XDG_CONFIG_HOME names another directory, and --dry-run prints it", below=True)
    given = {name: getattr(choice, name) for name in ("partition", "account", "qos", "gpu_request")}
    return {
        "profile": name,
        "profile_file": str(file),
        "written": not dry_run,
        "job_file": str(job_file),
        "job_file_written": is_new and not dry_run,
        "given": {key: value[0] for key, value in given.items() if value is not None},
        "runs_in": choice.runs_in,
        "cluster": facts.model_dump(mode="json"),
        "text": text,
        "next": shlex.join([*words, "--follow"]),
    }


def _save(file: Path, text: str, way_out: str, *, below: bool = False) -> None:
    """Write a file, through a link where its user keeps it elsewhere.

    Args:
        way_out: what to do if it cannot be written.
        below: whether a missing directory is created.
    """
    from hpcddp.run.files import write_through_link

    try:
        if below:
            Path(os.path.realpath(file)).parent.mkdir(parents=True, exist_ok=True)
        write_through_link(file, text)
    except OSError as error:
        raise InitError(f"{file} cannot be written ({error.strerror}); {way_out}") from None


def _summary(facts: ClusterFacts, choice: Choice, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that summarise the cluster and the written files."""
    from hpcddp.slurm.controller import visible_differences

    yield f"cluster        {facts.name}, Slurm {facts.slurm}"
    if differences := visible_differences(facts.slurm):
        yield from _under("this Slurm", [*differences, "see docs/slurm-versions.md"])
    yield from _under("partitions", _partition_lines(facts))
    yield f"accounts       {_accounts_line(facts)}"
    if choice.gpu_request is not None:
        yield f"GPU requests   {': '.join(choice.gpu_request)}"
    if facts.submit_plugins:
        yield f"site's rules   {', '.join(facts.submit_plugins)}: they may change or refuse any job"
    if not facts.preemption.requeue:
        yield (
            "requeue        only of jobs that ask for it (JobRequeue=0), as those of hpcddp do; where that is refused, "
            "and sbatch on nodes too: hpcddp submit --chain N"
        )
    if facts.disable_root_jobs and facts.user == "root":
        yield "root           is not allowed to submit jobs here"
    yield f"profile        {document['profile_file']}"
    yield _job_file_line(document)
    if choice.runs_in is None:
        yield "next           no partition is open to you: ask your site, or name one with --partition"
    else:
        line = f"next           {document['next']}"
        idle = _idle(facts.partitions[choice.runs_in])
        if idle is not None:
            line += f", which waits while {choice.runs_in} is {idle}"
        yield line


def _idle(partition: Partition) -> str | None:
    """Return why a partition starts no jobs now, or None if it does."""
    if partition.state != "UP":
        return partition.state
    if any(kind.available for kind in partition.kinds):
        return None
    return "without a node that is up"


def _partition_lines(facts: ClusterFacts) -> list[str]:
    """Return a line for each partition, those that the user may use first, up to a limit."""
    from hpcddp.site.profile_writer import describe_partition

    lines = []
    for name in sorted(facts.partitions, key=lambda name: facts.barred(name) is not None):
        partition = facts.partitions[name]
        barred = facts.barred(name)
        idle = _idle(partition)
        label = f"{name} (default)" if partition.default else name
        if barred:
            lines.append(f"{label}: you may not use it: {barred}")
        elif idle:
            lines.append(f"{label}: {describe_partition(partition)}; {idle}")
        else:
            lines.append(f"{label}: {describe_partition(partition)}")
    unlisted = len(lines) - _LISTED_PARTITIONS
    if unlisted <= 0:
        return lines
    return [*lines[:_LISTED_PARTITIONS], f"and {unlisted} more: the profile has them all"]


def _under(label: str, lines: list[str]) -> Iterator[str]:
    first, *others = lines or ["none"]
    yield f"{label:<15}{first}"
    for line in others:
        yield f"{'':<15}{line}"


def _accounts_line(facts: ClusterFacts) -> str:
    accounts = facts.accounts
    if not accounts.required:
        return "none needed"
    if not accounts.names:
        return "needed, and none of yours is known"
    names = [f"{name} (default)" if name == accounts.default else name for name in accounts.names]
    return f"needed: {', '.join(names)}"


def write_job_of_script(script: Path, job_file: Path | None, *, force: bool, dry_run: bool, as_json: bool) -> None:
    """Write a job file for an sbatch script, and print it with what became of each line.

    Args:
        job_file: the job file; None is the script's name with .yaml, in this directory.
        force: whether an existing job file is replaced.
        dry_run: whether nothing is written.
        as_json: whether one JSON document is printed.

    Raises:
        UserError: the script cannot be read or converted, or the job file cannot be written.
    """
    from hpcddp.script.convert import ConversionError, convert
    from hpcddp.script.parse import read_script

    target = Path(f"{script.stem}.yaml") if job_file is None else job_file
    if os.path.lexists(target) and not (force or dry_run):
        raise InitError(f"{target} is there already; add --force to write it anew, or name another file: --job")
    try:
        conversion = convert(read_script(script), name=script.stem, environment=os.environ)
    except ConversionError as error:
        raise InitError(f"{script}: {error.message}") from None
    text = f"# Made from {printable(script.name)} by hpcddp init --from.\n{conversion.text}"
    if not dry_run:
        _save(target, text, "name another file with --job, or print it with --dry-run")
    next_command = shlex.join(["hpcddp", "submit", str(target)])
    if as_json:
        document = {
            "script": str(script),
            "job_file": str(target),
            "written": not dry_run,
            "text": text,
            "rows": [asdict(row) for row in conversion.rows],
            "next": next_command,
        }
        echo(json.dumps(document, indent=2))
        return
    echo(text)
    for row in conversion.rows:
        first, line_break, _ = row.text.partition("\n")
        shown = f"{first} ..." if line_break else first
        echo(f"line {row.line:<4} {row.outcome:<11} {printable(shown)} -> {printable(row.reason)}")
    open_rows = sum(row.outcome == "to do" for row in conversion.rows)
    echo(f"\njob file       {target}{', not written (--dry-run)' if dry_run else ''}")
    look = f"look at {counted(open_rows, 'line')} to do, then: " if open_rows else ""
    echo(f"next           {look}{next_command}")
