"""A run on one time axis for all workers: its iterations, its size changes, and the notes of its script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.report.account.account import ALIKE
from evenstep.report.iterations import FloatArray, joined
from evenstep.report.recorded import RecordedRun
from evenstep.telemetry.events import Noted, Planned

# Changes of sizes.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """New sizes from an iteration on, which started at `seconds`; `reason` is a sentence without its full stop."""

    iteration: int
    seconds: float
    before: tuple[int, ...]
    after: tuple[int, ...]
    reason: str


def moves_of(run: RecordedRun, elasticities: Mapping[int, float]) -> list[Move]:
    """The changes of the planned sizes by more than an eighth of an equal share since the previous one, in order.

    The reason is the worker whose time for an equal share has changed most. The `elasticities` are the parts of the
    workers' times that depend on their batch sizes.
    """
    teller = run.iterations[run.workers[0]]
    moves = []
    before = run.planned[0]
    for after in run.planned[1:]:
        if not _moved(before.batch_sizes, after.batch_sizes):
            continue
        index = min(int(np.searchsorted(teller.numbers, after.iteration)), len(teller) - 1)
        then, now = (_seconds_before(run, each.iteration, elasticities) for each in (before, after))
        move = Move(
            iteration=after.iteration,
            seconds=float(teller.began[index]),
            before=tuple(before.batch_sizes),
            after=tuple(after.batch_sizes),
            reason=(_came_or_went(before, after) if run.elastic is not None else "") or _reason(then, now),
        )
        moves.append(move)
        before = after
    return moves


def _moved(before: Sequence[int], after: Sequence[int]) -> bool:
    equal, pairs = sum(after) / max(len(after), 1), zip(before, after, strict=False)
    return len(before) != len(after) or any(abs(one - other) > ALIKE * equal for one, other in pairs)


def _came_or_went(before: Planned, after: Planned) -> str:
    """The workers that came or went between two plans, in words; empty if they are the same."""
    both = enumerate(zip(before.batch_sizes, after.batch_sizes, strict=True))
    changed = [(worker, has) for worker, (had, has) in both if (had == 0) != (has == 0)]
    return ", ".join(f"worker {worker} {'came' if has else 'went'}" for worker, has in changed)


def _reason(then: Mapping[int, float], now: Mapping[int, float]) -> str:
    if not now:
        return "no speed was measured yet"
    if not then:
        slow, fast = max(now, key=lambda each: now[each]), min(now, key=lambda each: now[each])
        return f"first speeds known: worker {slow} needs {now[slow] / now[fast]:.2f} times worker {fast}'s time"
    ratios = {worker: now[worker] / then[worker] for worker in now if worker in then}
    most = max(ratios, key=lambda each: abs(np.log(ratios[each])), default=None)
    if most is None or max(ratios[most], 1 / ratios[most]) < 1.05:
        return "speeds are known better"
    was, has = 1e3 * then[most], 1e3 * now[most]
    how = "slower" if has > was else "faster"
    return f"worker {most} is {how} now, {was:.3g} to {has:.3g} ms for an equal share"


def _seconds_before(run: RecordedRun, iteration: int, elasticities: Mapping[int, float]) -> dict[int, float]:
    """Each worker's compute seconds for an equal share in its last three iterations before this one, if it computed."""
    found = {}
    for worker, done in run.iterations.items():
        index = int(np.searchsorted(done.numbers, iteration))
        latest = done[max(index - 3, 0) : index]
        sizes = latest.measured * len(run.iterations) / run.global_batch_size
        seconds = latest.compute_seconds / np.maximum(1 + elasticities[worker] * (sizes - 1), 1e-9)  # For a size of 0.
        if seconds.any():
            found[worker] = float(np.median(seconds[seconds > 0]))
    return found


# Notes.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Noted values of one name at ascending times, all of shape [values]; `samples` counts all workers' so far."""

    name: str
    seconds: FloatArray
    samples: FloatArray
    values: FloatArray
    weights: FloatArray


def curves_of(run: RecordedRun) -> list[Curve]:
    """The curves of a run, by name.

    Behind a barrier, values that several workers noted in the same iteration become one, their mean weighted by
    samples: for a mean loss on each worker, this is the loss of the union batch.
    """
    together = joined(run.iterations.values())
    ends = together.began + together.iteration_seconds
    order = np.argsort(ends, kind="stable")
    ends, trained = ends[order], np.cumsum(together.samples[order])
    curves = []
    for name in sorted({name for note in run.notes for name in note.values}):
        seconds, values, weights = _values(run, name)
        samples = np.interp(seconds, ends, trained, left=0.0)
        curves.append(Curve(name=name, seconds=seconds, samples=samples, values=values, weights=weights))
    return curves


def _values(run: RecordedRun, name: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    notes = notes_of(run, name)
    at = np.array([run.since_begin(note.at, note.worker) for note, _ in notes])
    value = np.array([value for _, value in notes])
    # A note on a copy of another worker's sample counts only if there is no other note.
    weight = np.array([max(note.samples, 1e-9) for note, _ in notes])
    if run.servers is None:
        numbers = np.array([note.iteration for note, _ in notes])
        groups, index = np.unique(numbers, return_inverse=True)
        total = np.bincount(index, weights=weight)
        mean = np.bincount(index, weights=weight * value) / total
        last = np.full(len(groups), -np.inf)
        np.maximum.at(last, index, at)
        at, value, weight = last, mean, total
    order = np.argsort(at, kind="stable")
    return at[order], value[order], weight[order]


def notes_of(run: RecordedRun, name: str, worker: int | None = None) -> list[tuple[Noted, float]]:
    """The notes with this name, of all workers or one, and their values, NaN for a value that was not finite."""
    named = [(note, note.values[name]) for note in run.notes if name in note.values and worker in (None, note.worker)]
    return [(note, float("nan") if value is None else value) for note, value in named]


def seconds_until(run: RecordedRun, name: str, least: float) -> float | None:
    """Seconds of the first worker's iterations until it first noted at least that value; None if it never did.

    The start of the run and the time between iterations, such as an evaluation, do not count.
    """
    first = run.workers[0]
    for note, value in notes_of(run, name, first):
        if value >= least:
            return float(run.iterations[first].iteration_seconds[: note.iteration + 1].sum())
    return None
