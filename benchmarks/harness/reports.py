"""A worker's row of `Reports`, as it travels with a push."""

from dataclasses import fields

from evenstep.core.values import UNLIMITED, Reports


def row(samples, seconds):
    """Of an iteration of so many samples that took so long, from a worker that estimates nothing."""
    known = {"samples": samples, "compute_microseconds": round(seconds * 1e6), "largest_size": UNLIMITED}
    return [known.get(each.name, 0) for each in fields(Reports)]
