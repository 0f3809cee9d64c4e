"""A worker's row of `Reports`, as it travels with a push."""

from evenstep.core.values import UNLIMITED, Reports


def row(samples, seconds):
    """Of an iteration of so many samples that took so long, from a worker that estimates nothing."""
    known = {"samples": samples, "compute_microseconds": round(seconds * 1e6), "largest_size": UNLIMITED}
    return [known.get(name, 0) for name in Reports._fields]
