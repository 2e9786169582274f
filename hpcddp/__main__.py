"""``python -m hpcddp``."""

from hpcddp.cli.main import main

main()
