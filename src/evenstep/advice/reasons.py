"""Sentences about what slows the machines: which worker, how much, and whether it lasts."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from evenstep.advice.machines import Machines
from evenstep.report.account.verdict import SLOW, times
from evenstep.report.iterations import FloatArray

_LATE: Final = 0.1  # Of its usual compute, a worker that has more input or script than the others is named.
_JITTER: Final = 0.1  # The relative deviation from which jitter is named.
_EPISODE: Final = 1.5  # Times slower than usual.
_LEAST_IN_EPISODES: Final = 0.02  # Of its iterations; fewer are not worth a sentence.
_WINDOW: Final = 5  # Iterations in a row.
_MOST: Final = 4  # Sentences.
_MOST_NAMED: Final = 8  # Workers in a sentence.


def reasons(machines: Machines) -> Iterator[str]:
    """A sentence for each cause of workers' waiting for each other, the most important first."""
    seconds = machines.seconds
    found = [*_slow(seconds), *_episodes(seconds), *_jitter(seconds), *_others(machines, seconds)]
    yield from found[:_MOST] or ["All workers are equally fast, and stay so."]


def _slow(seconds: FloatArray) -> Iterator[str]:
    """Workers that are slower than the fastest half, similar ones in one sentence."""
    usual = np.median(seconds, axis=1)
    fast = float(np.median(np.sort(usual)[: max(len(usual) // 2, 1)]))
    alike: dict[str, list[int]] = {}
    for worker in np.argsort(-usual, kind="stable").tolist():
        if usual[worker] >= SLOW * fast:
            alike.setdefault(times(float(usual[worker]) / fast), []).append(worker)
    for ratio, workers in alike.items():
        yield f"{_named(workers)} a steady {ratio} slower than the fastest."


def _episodes(seconds: FloatArray) -> Iterator[str]:
    """Episodes in which workers are slower than usual."""
    # The median of a few in a row, because a single slow iteration is not an episode.
    windows = np.lib.stride_tricks.sliding_window_view(seconds, min(_WINDOW, seconds.shape[1]), axis=1)
    level = np.median(windows, axis=2) / np.median(seconds, axis=1)[:, np.newaxis]
    slow = level >= _EPISODE
    workers = np.flatnonzero(slow.mean(axis=1) >= _LEAST_IN_EPISODES).tolist()
    if workers:
        factor, share = float(np.median(level[workers][slow[workers]])), float(slow[workers].mean())
        yield f"{_named(workers)} {times(factor)} slower for a while now and then, {share:.0%} of the time."


def _jitter(seconds: FloatArray) -> Iterator[str]:
    """Slowness that changes in every iteration: neighbours differ, but the level stays."""
    changes = np.abs(np.diff(np.log(seconds), axis=1))
    spread = float(np.median(changes)) / 0.954  # The median of |difference of two normals| over their deviation.
    if spread >= _JITTER:
        yield f"Times change by {spread:.0%} from one iteration to the next, which no sizes can follow."


def _others(machines: Machines, seconds: FloatArray) -> Iterator[str]:
    usual = float(np.median(seconds))
    for worker, other in enumerate(machines.others):
        if other >= _LATE * usual:
            yield (
                f"Worker {worker} spends {1000 * other:.1f} ms of each iteration on input or script, beyond the others:"
                " look there first, since no scheme helps against that."
            )
    if machines.exchange_seconds >= usual:
        yield (
            f"Communication takes {1000 * machines.exchange_seconds:.0f} ms of each iteration, more than computing:"
            " larger batches or local-sgd communicate less often."
        )


def _named(workers: list[int]) -> str:
    """Name workers, with the verb: `Worker 3 is`, `Workers 0 1 2 are`, `10 workers are`."""
    if len(workers) == 1:
        return f"Worker {workers[0]} is"
    listed = " ".join(map(str, sorted(workers)))
    return f"Workers {listed} are" if len(workers) <= _MOST_NAMED else f"{len(workers)} workers are"
