"""Check an installation: the interpreter, torch, Slurm, the run root, and what several nodes share."""
