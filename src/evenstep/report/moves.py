"""The changes of the batch sizes, each with the reason that the workers' own predictions give for it."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

import numpy as np

from evenstep.report.clock import Times
from evenstep.report.recorded import Plan, RecordedRun

_NOTEWORTHY: Final = 1.05


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Other sizes from an iteration on, which began at `seconds` of the run; `reason` is a sentence without its end."""

    iteration: int
    seconds: float
    before: tuple[int, ...]
    after: tuple[int, ...]
    reason: str


def moves_of(run: RecordedRun, times: Times) -> list[Move]:
    """Every change of the planned sizes, in order, but for those that end a comparison with equal sizes.

    The reason is the worker whose predicted seconds per sample have changed most since the sizes before were chosen.
    """
    teller = run.workers[0]
    began, numbers = times.began[teller], run.iterations[teller].numbers
    result = []
    for before, after in pairwise(run.planned):
        if before.basis == "comparison" or before.batch_sizes == after.batch_sizes:
            continue
        index = min(int(np.searchsorted(numbers, after.iteration)), len(began) - 1)
        result.append(
            Move(
                iteration=after.iteration,
                seconds=float(began[index]),
                before=before.batch_sizes,
                after=after.batch_sizes,
                reason=_reason(run, before, after),
            )
        )
    return result


def _reason(run: RecordedRun, before: Plan, after: Plan) -> str:
    if after.basis == "comparison":
        return "equal for a few iterations, to measure what other sizes gain"
    then, now = _paces(run, before.iteration), _paces(run, after.iteration)
    if not now:
        return "no worker had told of its speed yet"
    if not then:
        slow, fast = max(now, key=lambda each: now[each]), min(now, key=lambda each: now[each])
        return f"first speeds known: worker {slow} needs {now[slow] / now[fast]:.2f} times worker {fast}'s time"
    ratios = {worker: now[worker] / then[worker] for worker in now if worker in then}
    most = max(ratios, key=lambda each: abs(np.log(ratios[each])), default=None)
    if most is None or max(ratios[most], 1 / ratios[most]) < _NOTEWORTHY:
        return "speeds are known better"
    was, has = 1e3 * then[most], 1e3 * now[most]
    return f"worker {most} is {'slower' if has > was else 'faster'} now, {was:.2f} to {has:.2f} ms a sample"


def _paces(run: RecordedRun, iteration: int) -> dict[int, float]:
    """The seconds per sample that each worker had told of itself before this iteration."""
    result = {}
    for worker, done in run.iterations.items():
        index = int(np.searchsorted(done.numbers, iteration)) - 1
        if index >= 0 and np.isfinite(done.pace[index]):
            result[worker] = float(done.pace[index])
    return result
