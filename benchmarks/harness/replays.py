"""Sizes in virtual time, by the estimators and the policy of a run, on iterations that real workers recorded.

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


class Line(NamedTuple):
    """A free worker's time for x samples: `fixed` + `slope` * x microseconds."""

    fixed: float
    slope: float

    def microseconds(self, samples):
        return self.fixed + self.slope * samples


class Replay(NamedTuple):
    """What happened: sizes, slowdown (what lasts of the loads) and compute microseconds, [iterations, workers] each."""

    sizes: np.ndarray
    slowdown: np.ndarray
    microseconds: np.ndarray
    fixed_samples: np.ndarray
    line: Line

    def makespan(self, sizes):
        """The longest time at these sizes, without the noise, of every iteration."""
        return (self.slowdown * self.line.microseconds(np.asarray(sizes))).max(axis=1)


def replay(load, line, share, loads, slowdown):
    """`share` is an equal size; `loads` are factors on the time, [iterations, workers], beside the slowdown."""
    workers = loads.shape[1]
    policy, estimators = load.policy(workers), [load.estimator() for _ in range(workers)]
    problem = Problem(
        global_batch_size=share * workers,
        minimum=np.full(workers, min(2, share), dtype=np.int64),
        maximum=np.full(workers, UNLIMITED, dtype=np.int64),
    )
    all_sizes, all_times, all_fixed = [], [], []
    for factors in loads * slowdown:
        sizes = policy.allocate(problem).sizes
        times = factors * line.microseconds(sizes)
        table = []
        for estimator, size, time in zip(estimators, sizes.tolist(), times.tolist(), strict=True):
            estimator.observe(size, time * 1e-6)
            e = estimator.estimate()
            estimated = (e.nanoseconds_per_sample, e.fixed_nanoseconds, e.error_ppm, e.flat_size)
            table.append([size, round(time), *estimated, UNLIMITED])
        rows = np.array(table, dtype=np.int64)
        policy.observe(Reports.from_table(rows))
        all_sizes.append(sizes)
        all_times.append(times)
        all_fixed.append(rows[:, 3] / np.maximum(rows[:, 2], 1))
    return Replay(np.array(all_sizes), slowdown, np.array(all_times), np.array(all_fixed), line)


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
    return Line(level * (1.0 - elasticity), level * elasticity / free.share)
