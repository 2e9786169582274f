"""From a job file to running tasks: render, submit, rendezvous, the task's first lines."""
