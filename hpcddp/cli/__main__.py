"""``python -m hpcddp.cli``."""

from hpcddp.cli.main import main

main()
