"""What became of runs: their states, logs and reasons; ending and requeueing them."""
