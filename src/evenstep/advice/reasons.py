"""Sentences about what slows the machines: which worker, how much, and whether it lasts."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from evenstep.advice.machines import Machines
from evenstep.report.account.verdict import SLOW, times
from evenstep.report.iterations import FloatArray

_NAMED: Final = 0.1
"""The least part of a usual compute for which more input or script than the others', or jitter, is named."""


def reasons(machines: Machines) -> Iterator[str]:
    """A sentence for each cause of workers' waiting for each other, the most important first; at most four."""
    seconds = machines.seconds
    found = [*_slow(seconds), *_episodes(seconds), *_jitter(seconds), *_others(machines, seconds)]
    yield from found[:4] or ["All workers are equally fast, and stay so."]


def _slow(seconds: FloatArray) -> Iterator[str]:
    """Workers that are slower than the fastest half, similar ones in one sentence."""
    usual = np.median(seconds, axis=1)
    fast = float(np.median(np.sort(usual)[: max(len(usual) // 2, 1)]))
    alike: dict[str, list[int]] = {}
    for worker in np.argsort(-usual, kind="stable").tolist():
        if usual[worker] >= SLOW * fast:
            alike.setdefault(times(float(usual[worker]) / fast), []).append(worker)
    for ratio, workers in alike.items():
        yield f"{_named(workers)} a steady {ratio} slower than the fastest, in equal batches."


def _episodes(seconds: FloatArray) -> Iterator[str]:
    """Episodes in which workers are 1.5 times slower than usual, if they take 2 % of the iterations."""
    # The median of a few in a row, because a single slow iteration is not an episode.
    windows = np.lib.stride_tricks.sliding_window_view(seconds, min(5, seconds.shape[1]), axis=1)
    level = np.median(windows, axis=2) / np.median(seconds, axis=1)[:, np.newaxis]
    slow = level >= 1.5
    workers = np.flatnonzero(slow.mean(axis=1) >= 0.02).tolist()
    if workers:
        factor, share = float(np.median(level[workers][slow[workers]])), float(slow[workers].mean())
        yield f"{_named(workers)} {times(factor)} slower for a while now and then, {share:.0%} of the time."


def _jitter(seconds: FloatArray) -> Iterator[str]:
    """Slowness that changes in every iteration: neighbours differ, but the level stays."""
    changes = np.abs(np.diff(np.log(seconds), axis=1))
    spread = float(np.median(changes)) / 0.954  # The median of |difference of two normals| over their deviation.
    if spread >= _NAMED:
        yield f"Times change by {spread:.0%} from one iteration to the next, which no sizes can follow."


def _others(machines: Machines, seconds: FloatArray) -> Iterator[str]:
    usual = float(np.median(seconds))
    for worker, other in enumerate(machines.others):
        if other >= _NAMED * usual:
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
    return f"Workers {listed} are" if len(workers) <= 8 else f"{len(workers)} workers are"
