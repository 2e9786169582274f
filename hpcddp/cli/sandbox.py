"""``hpcddp sandbox``."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hpcddp.cli.options import AsJson
from hpcddp.cli.output import echo
from hpcddp.sandbox.request import Hosts, Request, default_directory, default_hosts

sandbox = typer.Typer(
    name="sandbox",
    help="""Run a real Slurm with several nodes on this machine.

    Example: eval "$(hpcddp sandbox up)" && hpcddp submit job.yaml --follow
    """,
    rich_markup_mode=None,
    no_args_is_help=True,
)

Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Directory of the sandbox. [default: ~/.local/state/hpcddp/sandbox]"),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(sandbox)


@sandbox.command()
def up(
    *,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 4,
    hosts: Annotated[
        Hosts | None,
        typer.Option(
            help="namespaces: each node is its own host (root only); shared: all nodes are this host. "
            "[default: namespaces for root]"
        ),
    ] = None,
    cpus_per_node: Annotated[int, typer.Option(help="CPUs that each node claims.")] = 8,
    gpus_per_node: Annotated[int, typer.Option(help="Fake GPUs of each node, for scheduling only.")] = 4,
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="KEY=VALUE", help="Change a setting of slurm.conf; repeatable."),
    ] = None,
    slurm: Annotated[
        Path | None,
        typer.Option(
            metavar="ROOT",
            help="Run the Slurm in this root directory of another Linux (root only). [default: this machine's Slurm]",
        ),
    ] = None,
    directory: Directory = None,
    as_json: AsJson = False,
) -> None:
    """Start the sandbox and print how to use it.

    The command prints a line for the shell that sets SLURM_CONF, so that Slurm's commands and hpcddp use the sandbox;
    with --slurm also one that puts the commands of that Slurm first in PATH.

    Example: eval "$(hpcddp sandbox up --nodes 2)" && sinfo

    Example: hpcddp sandbox up --conf KillWait=15 --conf AuthInfo=cred_expire=5
    """
    from hpcddp.sandbox import sandbox as sandboxes
    from hpcddp.sandbox.configuration import parse_overrides

    began = time.monotonic()
    request = Request(
        directory=_directory(directory),
        hosts=hosts or default_hosts(),
        nodes=nodes,
        cpus_per_node=cpus_per_node,
        gpus_per_node=gpus_per_node,
        overrides=parse_overrides(conf or ()),
        slurm_root=None if slurm is None else slurm.expanduser().resolve(),
    )
    running = sandboxes.up(request, environment=dict(os.environ))
    if as_json:
        echo(json.dumps(running.as_json(), indent=2))
        return
    seconds = time.monotonic() - began
    words_to_end = ["hpcddp", "sandbox", "down"]
    if directory:
        words_to_end += ["--dir", str(directory)]
    echo(
        f"nodes {' '.join(running.nodes)} ({request.hosts.value}) are up after {seconds:.1f} s, "
        f"partitions {' '.join(running.partitions)}; {shlex.join(words_to_end)} ends it",
        err=True,
    )
    _print_exports(running.as_json())


@sandbox.command()
def down(*, directory: Directory = None, as_json: AsJson = False) -> None:
    """Stop the sandbox, and remove its jobs and files.

    Example: hpcddp sandbox down
    """
    from hpcddp.sandbox import sandbox as sandboxes

    where = _directory(directory)
    ended = sandboxes.down(where)
    if as_json:
        echo(json.dumps({"ended": ended is not None, "directory": str(where)}, indent=2))
        return
    echo(f"the sandbox in {where} was removed" if ended else f"there is no sandbox in {where}")


@sandbox.command()
def status(*, directory: Directory = None, as_json: AsJson = False) -> None:
    """Show whether the sandbox runs, and the state of its nodes.

    Example: hpcddp sandbox status --json
    """
    from hpcddp.sandbox import sandbox as sandboxes

    where = _directory(directory)
    document = sandboxes.status(where, environment=dict(os.environ))
    if as_json:
        echo(json.dumps(document, indent=2))
        return
    echo(_sentence(document["state"], where))
    for name, word in (document.get("node_states") or {}).items():
        echo(f"  {name}  {word}")
    if document["state"] in {"up", "degraded"}:
        _print_exports(document)


def _print_exports(document: Mapping[str, Any]) -> None:
    """Print the lines that make a shell use the sandbox."""
    echo(f"export SLURM_CONF={shlex.quote(document['slurm_conf'])}")
    if document["bin"] is not None:
        echo(f'export PATH={shlex.quote(document["bin"])}:"$PATH"')


def _directory(given: Path | None) -> Path:
    return (given or default_directory(os.environ)).expanduser().absolute()


def _sentence(state: str, where: Path) -> str:
    return {
        "none": f"there is no sandbox in {where}",
        "stopped": f"the sandbox in {where} has stopped; hpcddp sandbox down removes what it left",
        "degraded": f"the sandbox in {where} is up, but slurmctld or a node does not answer",
        "up": f"the sandbox in {where} is up",
    }[state]
