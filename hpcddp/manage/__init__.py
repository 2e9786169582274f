"""Runs after submission, on the login node: status, logs, why, follow, report, shell, stacks, cancel, requeue."""
