"""The job file as a value: sections, units, rules, YAML with line numbers, overrides, profiles, sweeps."""
