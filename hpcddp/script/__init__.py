"""Reads sbatch scripts that people wrote: ``#SBATCH`` lines and shell lines. Nothing of them is executed."""
