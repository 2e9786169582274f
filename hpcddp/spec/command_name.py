"""What a job without a name is called: after the program that it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

_SCRIPT = re.compile(r".+\.(?:py|sh|bash|pl|R|jl)", re.ASCII)
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)
_LONGEST = 64


def name_of_command(command: Sequence[str]) -> str:
    """Return a name for a job: of its script, of its module after ``-m``, else of its program.

    Args:
        command: the words of the command, at least one.
    """
    module = next((word.rpartition(".")[2] for flag, word in pairwise(command) if flag == "-m"), None)
    script = next((PurePath(word).stem for word in command if _SCRIPT.fullmatch(word)), None)
    name = _FOREIGN.sub("-", script or module or PurePath(command[0]).name).lstrip("._-")
    return name[:_LONGEST] or "command"
