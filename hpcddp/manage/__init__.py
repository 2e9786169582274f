"""Runs after submission, on the login node: status, logs, why, follow, cancel, requeue."""
