"""Slurm's language and its doors: directives, host lists, rank environment, commands."""
