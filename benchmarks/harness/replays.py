"""Sizes in virtual time, by the policy of a run, against iterations that are described or that real workers recorded.

A recorded iteration is a load: its time over that of a free worker of the same job at the same size. So a replay can
ask how long it would have taken at any other size.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenstep.core.values import UNLIMITED, Problem, Reports

FOLDER = Path(__file__).parents[1] / "traces" / "sizes"


class Lines(NamedTuple):
    """Workers' times for x samples: `fixed` + `slope` * x microseconds, of shape [workers] each, or a number."""

    fixed: np.ndarray | float
    slope: np.ndarray | float

    def microseconds(self, sizes):
        return self.fixed + self.slope * sizes

    def best(self, slow, total, least=2):
        """The fractional sizes, at least `least`, with which workers that are so slow end earliest."""
        low, high = 0.0, float((slow * self.microseconds(np.full(len(slow), float(total)))).max())
        for _ in range(50):
            middle = (low + high) / 2
            if np.maximum((middle / slow - self.fixed) / self.slope, least).sum() >= total:
                high = middle
            else:
                low = middle
        sizes = np.maximum((high / slow - self.fixed) / self.slope, least)
        return sizes * total / sizes.sum()


class Curves(NamedTuple):
    """Workers' times at every whole size from 0 up: microseconds of shape [workers, sizes]. `optimum`: known sizes."""

    table: np.ndarray
    optimum: np.ndarray

    def microseconds(self, sizes):
        every = np.arange(self.table.shape[1])
        return np.stack([np.interp(sizes[..., i], every, row) for i, row in enumerate(self.table)], -1)

    def best(self, slow, total, least=2):
        return self.optimum


class Case(NamedTuple):
    """What happens to workers: their times, the samples of an iteration, and factors of shape [iterations, workers].

    `slow`: what lasts and could be known; `noise`: what is new in each iteration. A change of sizes to some that were
    never used costs `change` iterations.
    """

    times: Lines | Curves
    total: int
    noise: np.ndarray
    slow: np.ndarray
    change: float = 0.0


def replay(load, case):
    """The sizes that a policy gives, and how long each iteration took in microseconds, [iterations] each."""
    workers = case.noise.shape[1]
    policy, nothing = load.policy(workers), np.zeros(workers, dtype=np.int64)
    problem = Problem(
        global_batch_size=case.total,
        minimum=np.full(workers, min(2, case.total // workers), dtype=np.int64),
        maximum=np.full(workers, UNLIMITED, dtype=np.int64),
    )
    all_sizes, spent, used = [], [], set()
    for factors in case.noise * case.slow:
        sizes = policy.allocate(problem).sizes
        times = factors * case.times.microseconds(sizes.astype(float))
        if tuple(sizes.tolist()) not in used:
            used.add(tuple(sizes.tolist()))
            times = times + case.change * times.max()
        policy.observe(Reports(sizes, np.rint(times).astype(np.int64), nothing, nothing + UNLIMITED))
        all_sizes.append(sizes)
        spent.append(times.max())
    return np.array(all_sizes), np.array(spent)


def least(case):
    """How long each iteration takes with the sizes that are best for what lasts, noise included, in microseconds."""
    found = {}
    for factors in case.slow:
        key = factors.tobytes()
        if key not in found:
            found[key] = case.times.best(factors, case.total)
    sizes = np.array([found[factors.tobytes()] for factors in case.slow])
    return (case.noise * case.slow * case.times.microseconds(sizes)).max(axis=1)


class Recording:
    """One file of `traces/sizes`."""

    def __init__(self, name):
        self.name = name
        trace = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        self.share = trace["size"]
        workers = trace["workers"]
        samples = np.array([worker["samples"] for worker in workers]).T
        self._times = np.array([worker["microseconds"] for worker in workers], dtype=np.float64).T
        self._samples = samples
        usual = self._times[(samples == self.share).all(axis=1)]
        # Relative to each worker's own median: a lasting difference between the two is no noise.
        self.loads = usual / np.median(usual, axis=0)

    @property
    def line(self):
        return _line(self.name.rsplit("-", 1)[0])

    def windows(self, count, iterations):
        """Stretches of this many iterations, as loads; the trace starts again where it ends."""
        length = len(self.loads)
        return [self.loads[(length * k // count + np.arange(iterations)) % length] for k in range(count)]


@cache
def _line(job):
    """Through the sweeps of the free job: the median slope over all pairs of sizes (Theil and Sen)."""
    free = Recording(f"{job}-free")
    samples, times = free._samples, free._times
    swept = (samples != free.share).any(axis=1)
    known = np.array([np.median(times[:, worker][samples[:, worker] == free.share]) for worker in (0, 1)])
    points = [
        (x, np.median((times[:, worker] / known[worker])[swept & (samples[:, worker] == x)]))
        for worker in (0, 1)
        for x in np.unique(samples[swept][:, worker])
    ]
    x, t = np.array(points).T
    first, second = np.triu_indices(len(x), 1)
    apart = np.abs(x[second] - x[first]) >= 0.25 * free.share
    first, second = first[apart], second[apart]
    slope = np.median((t[second] - t[first]) / (x[second] - x[first]))
    elasticity = min(max(slope * free.share, 0.0), 1.0)
    level = float(known.mean())
    return Lines(level * (1.0 - elasticity), level * elasticity / free.share)
