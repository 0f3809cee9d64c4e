"""What happens to workers, by name: slowness that lasts, comes and goes or drifts, with noise; and recorded loads."""

import numpy as np

from evenstep.cluster.slowness import MEASURED_CURVES, PointCurve
from harness import clusters
from harness.replays import Case, Curves, Lines, Recording

ITERATIONS, WORKERS, SHARE = 300, 4, 64
BEGIN, END = 60, 120
LEVELS = ("3ms", "10ms", "50ms", "300ms")


def described(seeds, milliseconds):
    """By name, a case for each seed, of four workers whose equal share takes so long; and of four GPUs."""
    even = np.ones((ITERATIONS, WORKERS))
    proportional = Lines(0.0, 1000 * milliseconds / SHARE)
    half_fixed = Lines(500 * milliseconds, 500 * milliseconds / SHARE)

    def cases(slow, level, times=proportional, more=1.0):
        made = slow if callable(slow) else lambda seed: slow
        extra = more if callable(more) else lambda seed: more
        return [Case(times, SHARE * WORKERS, white(level, seed) * extra(seed), made(seed)) for seed in range(seeds)]

    found = {}
    unequal = even * [1.0, 1.0, 2.0, 4.0]
    for level in (0.02, 0.05, 0.1, 0.2):
        found[f"constant 1:1:2:4, noise {level:.0%}"] = cases(unequal, level)
        found[f"equal, noise {level:.0%}"] = cases(even, level)
    found["constant 1:1:2:4, half fixed, noise 5%"] = cases(unequal, 0.05, half_fixed)
    for factor in (2, 4):
        for level in (0.02, 0.05, 0.15):
            found[f"step x{factor} for 60, noise {level:.0%}"] = cases(step(factor), level)
    found["step x2 for 60, half fixed, noise 5%"] = cases(step(2), 0.05, half_fixed)
    found["step x1.2 for good, noise 5%"] = cases(step(1.2, end=ITERATIONS), 0.05)
    found["ramp 1-3-1 in 200, noise 5%"] = cases(_ramp(), 0.05)
    found["slow drift of all, noise 5%"] = cases(_drift, 0.05)
    for on, length in ((20, 40), (5, 20), (2, 10)):
        found[f"periodic x2, {on} of {length}, noise 5%"] = cases(_periodic(on, length), 0.05)
    found["bursts x1.5-4 of 4 in 100, noise 5%"] = cases(_episodes(4, 100, 1.5, 4.0), 0.05)
    found["single spikes x5, 3%, noise 5%"] = cases(even, 0.05, more=_spikes)
    found["step x2 and single spikes x5, noise 5%"] = cases(step(2), 0.05, more=_spikes)
    for on, off in ((10, 30), (30, 30), (100, 100)):
        found[f"Markov x2.5, {on}/{off}, noise 5%"] = cases(_episodes(on, off, 2.5, 2.5), 0.05)
    found["Markov x2.5, 30/30, noise 15%"] = cases(_episodes(30, 30, 2.5, 2.5), 0.15)
    curves, total = [PointCurve.measured(name) for name in MEASURED_CURVES], 512
    table = np.array([[1e6 * curve.seconds(size) for size in range(total + 1)] for curve in curves])
    gpus = Curves(table * milliseconds / 100, np.array(clusters.best(curves, total)[1], dtype=float))
    for level in (0.01, 0.03):
        found[f"GPU curves, noise {level:.0%}"] = [Case(gpus, total, white(level, seed), even) for seed in range(seeds)]
    return found


def recorded(windows):
    """By name, cases of two workers with the loads of real iterations; free ones are also slowed on purpose."""
    found = {}
    for level in LEVELS:
        for job in "ab":
            for condition in ("free", "busy", "hog"):
                try:
                    recording = Recording(f"{level}-{job}-{condition}")
                except FileNotFoundError:
                    continue
                loads, even = recording.windows(windows, ITERATIONS), np.ones((ITERATIONS, 2))
                slow = {f"{condition} equal": even}
                if condition == "free":
                    slow |= {f"step x{factor}": step(factor, workers=2) for factor in (2, 4)}
                    slow["constantly x3"] = even * [1.0, 3.0]
                for name, factors in slow.items():
                    found[f"recorded {level}, {name}, job {job}"] = [
                        Case(recording.line, 2 * recording.share, each, factors) for each in loads
                    ]
    return found


def white(level, seed, workers=WORKERS):
    """Factors of mean 1 that are new in every iteration, of this relative standard deviation."""
    return np.exp(np.random.default_rng(seed).normal(-(level**2) / 2, level, (ITERATIONS, workers)))


def step(factor, *, begin=BEGIN, end=END, workers=WORKERS):
    """The last worker is slower in these iterations."""
    slow = np.ones((ITERATIONS, workers))
    slow[begin:end, -1] = factor
    return slow


def _ramp():
    slow = np.ones((ITERATIONS, WORKERS))
    slow[50:150, 3], slow[150:250, 3] = np.linspace(1, 3, 100), np.linspace(3, 1, 100)
    return slow


def _drift(seed):
    """Ornstein and Uhlenbeck's process in the logarithm, of standard deviation 0.3."""
    generator, logs = np.random.default_rng(seed + 50), np.zeros((ITERATIONS, WORKERS))
    for k in range(1, ITERATIONS):
        logs[k] = 0.98 * logs[k - 1] + 0.06 * generator.normal(size=WORKERS)
    return np.exp(logs)


def _periodic(on, length):
    slow = np.ones((ITERATIONS, WORKERS))
    slow[np.arange(ITERATIONS) % length >= length - on, 3] = 2.0
    return slow


def _spikes(seed):
    return np.where(np.random.default_rng(seed + 70).random((ITERATIONS, WORKERS)) < 0.03, 5.0, 1.0)


def _episodes(on, off, least, most):
    """Each worker is slower for `on` iterations on average, then not for `off`, by a factor from least to most."""

    def made(seed):
        generator, slow = np.random.default_rng(seed + 900), np.ones((ITERATIONS, WORKERS))
        for worker in range(WORKERS):
            begin = int(generator.exponential(off)) + 1
            while begin < ITERATIONS:
                end = begin + max(1, round(generator.exponential(on)))
                slow[begin:end, worker] = generator.uniform(least, most)
                begin = end + max(1, round(generator.exponential(off)))
        return slow

    return made
