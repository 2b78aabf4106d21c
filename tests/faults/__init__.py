"""What happens to a run by accident or on purpose, for real: real processes, real files, real signals."""
