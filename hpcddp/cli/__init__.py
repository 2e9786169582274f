"""The command line: parse, call, print."""

from hpcddp.cli.main import main

__all__ = ["main"]
