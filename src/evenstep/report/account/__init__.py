"""The use of a run's time, the gain from its sizes, and the verdict on it, in running totals."""
