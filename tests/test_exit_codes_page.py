"""docs/exit-codes.md lists the exit codes that the code has."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from hpcddp.cli import boundary
from hpcddp.errors import HpcddpError, UserError
from hpcddp.stop.reasons import ExitCode

PAGE = (Path(__file__).parents[1] / "docs" / "exit-codes.md").read_text(encoding="utf-8")
COMMANDS, JOB = PAGE.split("## Of a job")


def test_every_exit_code_of_a_job_is_listed_with_its_name_in_order() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", JOB, re.MULTILINE)
    assert rows == [(str(code.value), code.name) for code in ExitCode]


def test_every_exit_code_of_a_command_is_listed() -> None:
    rows = [int(code) for code in re.findall(r"^\| (\d+) \|", COMMANDS, re.MULTILINE)]
    assert rows == [0, HpcddpError.exit_code, UserError.exit_code, boundary.INTERRUPTED, 128 + signal.SIGTERM]
