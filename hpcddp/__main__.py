"""The command ``hpcddp``, also as ``python -m hpcddp``."""

from __future__ import annotations

import sys

# What a shell returns for a program that SIGINT has ended (bash(1), EXIT STATUS).
_INTERRUPTED = 130


def main() -> None:
    """Load the command line, run it, and exit with its code."""
    try:
        # The import takes long enough for Ctrl-C.
        from hpcddp.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
