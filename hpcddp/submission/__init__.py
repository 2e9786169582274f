"""From a job file to a queued job: render, checks before queueing, submit, resume."""
