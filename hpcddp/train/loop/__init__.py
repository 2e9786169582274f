"""The built-in training: steps, evaluations, saves and stops."""
