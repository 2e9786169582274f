"""Slurm's formats and commands: directives, host lists, job records, the rank environment."""
