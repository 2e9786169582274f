"""A real Slurm on this one machine."""
