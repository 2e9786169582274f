"""A real Slurm of several hosts on this one machine."""
