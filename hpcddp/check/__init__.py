"""What is wrong with a job file or an sbatch script before it waits in the queue: ``hpcddp check``."""
