"""hpcddp: Slurm job templating and PyTorch DDP with the right start, batch, stop and resume."""

__version__ = "0.1.0"
