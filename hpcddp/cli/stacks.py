"""``hpcddp stacks``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Final

import typer

from hpcddp.cli.options import RUN_ROOT, AsJson, Run, RunRoot
from hpcddp.cli.output import echo


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(stacks)


# The threads that hpcddp has in every task, such as the one that listens to signals.
_OWN_FRAME: Final = re.compile(r'  File "[^"]*(/threading\.py|/hpcddp/[^"]*)", line ')

# How faulthandler begins the stack of a thread.
_HEAD: Final = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ ")


def _without_own_threads(lines: Sequence[str]) -> Iterator[str]:
    """Yield stacks without threads of hpcddp's own; the last one, which is the main thread, comes first."""
    if not any(_HEAD.match(line) for line in lines):
        # py-spy's own form, or a sentence.
        yield from lines
        return
    *others, main = "\n".join(lines).split("\n\n")
    yield from main.splitlines()
    own = 0
    for thread in others:
        head, *frames = thread.splitlines()
        if all(_OWN_FRAME.match(frame) for frame in frames):
            own += 1
        else:
            yield from ("", head, *frames)
    if own:
        yield f"(and {own} thread{'s' if own > 1 else ''} of hpcddp's own, which --json prints too)"


def stacks(
    run: Run = None,
    *,
    rank: Annotated[list[int] | None, typer.Option(metavar="R", help="Print only this rank; repeatable.")] = None,
    run_root: RunRoot = RUN_ROOT,
    as_json: AsJson = False,
) -> None:
    """Print where every rank of a running job is, as Python stacks.

    The job continues. A training and an entrypoint answer by themselves, even in a collective that hangs. The program
    of a command needs py-spy in the environment of the job: pip install py-spy. If no stack can be read, the exit code
    is 1.

    Example: hpcddp stacks 20260314-1544
    """
    from hpcddp.manage.live import live_run
    from hpcddp.manage.live import stacks as stacks_of
    from hpcddp.manage.overview import one_run, status_now
    from hpcddp.submission.sweep_element import chosen_to_act_on

    environment = dict(os.environ)
    chosen = one_run(chosen_to_act_on(run, run_root))
    status = status_now(chosen, environment)
    live = live_run(status)
    for one in rank or ():
        live.check_rank(one)
    found = [each for each in stacks_of(live, environment) if not rank or each.rank in rank]
    if as_json:
        echo(json.dumps({"run_id": chosen.run_id, "processes": [asdict(each) for each in found]}, indent=2))
    for each in () if as_json else found:
        who = "no rank" if each.rank is None else f"rank {each.rank}"
        echo(f"{who} on {each.host}, process {each.pid}: {each.command}")
        echo("".join(f"  {line}".rstrip() + "\n" for line in _without_own_threads(each.lines)))
    if not (found or as_json):
        echo(f"no process of run {chosen.run_id} was found on its nodes; it may just have started or ended", err=True)
    if not any(each.is_known for each in found):
        raise typer.Exit(1)
