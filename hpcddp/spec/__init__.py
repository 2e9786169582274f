"""What the user asks for: the job file, its types, units, overrides and origins."""
