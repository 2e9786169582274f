"""Stop reasons, exit codes, signals, deadline, heartbeat and fault injection, for tasks and trainings. No torch."""
