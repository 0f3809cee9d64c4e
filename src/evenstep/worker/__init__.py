"""One worker of a run, whatever its framework."""
