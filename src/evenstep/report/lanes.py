"""How each worker's time divides over a run: in each of many equal stretches, the share of every part."""

from collections.abc import Sequence
from enum import StrEnum
from typing import final

import numpy as np

from evenstep.report.iterations import FloatArray, Iterations


@final
class Part(StrEnum):
    """What a worker does with its time, in the order of an iteration."""

    INPUT = "input"
    COMPUTE = "compute"
    WAIT = "waiting"
    COMMUNICATION = "communication"
    SCRIPT = "script"


def parts_of(done: Iterations) -> dict[Part, FloatArray]:
    """The seconds of each part, iteration by iteration; each of shape [iterations]."""
    return {
        Part.INPUT: done.input_seconds,
        Part.COMPUTE: done.compute_seconds,
        Part.WAIT: done.wait_seconds,
        Part.COMMUNICATION: done.comm_seconds,
        Part.SCRIPT: done.rest_seconds,
    }


def shares(done: Iterations, began: FloatArray, edges: FloatArray) -> dict[Part, FloatArray]:
    """The share of each part between two edges each, 0 to 1, of shape [edges - 1]; `began` is when iterations began.

    What lies between iterations (an evaluation, a pause) is in no part. Exact, whatever the stretches are: each part's
    seconds up to a time are a line with a bend at every change, and are read off at the edges.
    """
    parts = parts_of(done)
    seconds = np.stack(list(parts.values()), axis=1)
    ends = began[:, np.newaxis] + np.cumsum(seconds, axis=1)
    # An iteration's parts may overlap its successor's beginning by the clock's last digits.
    times = np.maximum.accumulate(np.column_stack([began, ends]).ravel())
    result = {}
    for index, part in enumerate(parts):
        grown = np.zeros((len(began), 1 + len(parts)))
        grown[:, index + 1] = seconds[:, index]
        spent = np.interp(edges, times, np.cumsum(grown.ravel()))
        result[part] = np.clip(np.diff(spent) / np.diff(edges), 0.0, 1.0)
    return result


def levels(seconds: float, iterations: int, sizes: Sequence[int]) -> list[FloatArray]:
    """The edges of ever finer divisions of a run, none finer than is worth it for so many iterations."""
    useful = [size for size in sizes if size <= 8 * iterations] or [sizes[0]]
    return [np.linspace(0.0, max(seconds, 1e-9), size + 1) for size in useful]
