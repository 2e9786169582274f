from __future__ import annotations

from pathlib import Path

from hpcddp.sandbox.network import build_commands
from hpcddp.sandbox.programs import Command, Instructions
from hpcddp.sandbox.sandbox import daemons_of
from tests.sandbox.clusters import SHARED, cluster


def test_instructions_are_read_back_as_they_were_written() -> None:
    for wanted in (cluster(), SHARED):
        instructions = Instructions(commands=build_commands(wanted), daemons=daemons_of(wanted))
        line = instructions.as_line()
        assert "\n" not in line
        assert Instructions.from_line(line) == instructions


def test_instructions_hold_any_text() -> None:
    instructions = Instructions(commands=(Command(argv=("a\nb", "'\"$\\"), standard_input="é\n"),), daemons=())
    assert Instructions.from_line(instructions.as_line()) == instructions


def test_the_daemons_start_in_the_order_in_which_they_need_each_other() -> None:
    assert [daemon.name for daemon in daemons_of(SHARED)] == ["munged", "slurmctld", "n1", "n2"]
    munged, slurmctld, *nodes = daemons_of(SHARED)
    assert munged.ready_socket == Path("/somewhere/sandbox/munge/socket")
    assert slurmctld.ready_address == ("127.0.0.1", 10_100)
    assert all(node.argv[0] == "slurmd" for node in nodes)


def test_a_node_that_is_a_host_of_its_own_starts_inside_it() -> None:
    argv = daemons_of(cluster())[-1].argv
    assert argv[:4] == ("nsenter", "--net=/somewhere/sandbox/net/n2", "--uts=/somewhere/sandbox/uts/n2", "--")
