"""What the script noted down, as one curve per name: against time, and against the samples trained on by then."""

from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.report.clock import Times
from evenstep.report.iterations import FloatArray
from evenstep.report.recorded import RecordedRun
from evenstep.report.told import Note


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values of one name at ascending times; all of shape [values]. `samples` are those of all workers by then."""

    name: str
    seconds: FloatArray
    samples: FloatArray
    values: FloatArray
    weights: FloatArray


def curves_of(run: RecordedRun, times: Times) -> list[Curve]:
    """The curves of a run, by name; empty where its script noted nothing, or its log has no times.

    Behind a barrier, what several workers noted in the same iteration is one value, their mean weighted by samples:
    with a mean loss on each worker that is the loss of the union batch.
    """
    if times.zeros is None:
        return []
    ends, trained = _trained(run, times)
    result = []
    for name, notes in sorted(run.told.notes.items()):
        seconds, values, weights = _values(run, times, notes)
        samples = np.interp(seconds, ends, trained, left=0.0)
        result.append(Curve(name=name, seconds=seconds, samples=samples, values=values, weights=weights))
    return result


def _trained(run: RecordedRun, times: Times) -> tuple[FloatArray, FloatArray]:
    """When iterations ended, over all workers, and the samples trained on by then."""
    ends = np.concatenate([times.began[worker] + run.iterations[worker].iteration_seconds for worker in run.workers])
    samples = np.concatenate([run.iterations[worker].samples for worker in run.workers])
    order = np.argsort(ends, kind="stable")
    return ends[order], np.cumsum(samples[order])


def _values(run: RecordedRun, times: Times, notes: tuple[Note, ...]) -> tuple[FloatArray, FloatArray, FloatArray]:
    at = np.array([times.since_begin(note.at, note.worker) or 0.0 for note in notes])
    value = np.array([note.value for note in notes])
    # What was noted on a copy of another worker's sample counts only where there is nothing else.
    weight = np.array([max(note.weight, 1e-9) for note in notes])
    if run.servers is None:
        numbers = np.array([note.iteration for note in notes])
        groups, index = np.unique(numbers, return_inverse=True)
        total = np.bincount(index, weights=weight)
        mean = np.bincount(index, weights=weight * value) / total
        last = np.full(len(groups), -np.inf)
        np.maximum.at(last, index, at)
        at, value, weight = last, mean, total
    order = np.argsort(at, kind="stable")
    return at[order], value[order], weight[order]
