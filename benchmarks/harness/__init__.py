"""What the benchmarks share: worker processes, timed segments of training, and the record of a run."""
