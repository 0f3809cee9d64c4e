"""Made-up traces of one worker's speed: some that a factor leads, some that none does."""

from typing import NamedTuple

import numpy as np

ITERATIONS = 1000


class Trace(NamedTuple):
    """Arrays over iterations: what one took, and the shares of processor and memory known before it."""

    samples: np.ndarray
    seconds: np.ndarray
    cpu: np.ndarray
    memory: np.ndarray


def jitter(random, level):
    """Factors of mean 1 and this relative standard deviation."""
    sigma = np.sqrt(np.log1p(level**2))
    return np.exp(random.normal(-(sigma**2) / 2, sigma, ITERATIONS))


def wandering(random, memory):
    """An AR(1) series of mean 0 and variance 1."""
    shocks = random.normal(size=ITERATIONS)
    series = np.empty(ITERATIONS)
    series[0] = shocks[0]
    for k in range(1, ITERATIONS):
        series[k] = memory * series[k - 1] + np.sqrt(1.0 - memory**2) * shocks[k]
    return series


def episodes(random, shortest, longest):
    """A speed of 1 that falls to between 1/4 and 2/3 in every other stretch of this many iterations."""
    speeds, slow = [], False
    while len(speeds) < ITERATIONS:
        speed = 1.0 / random.uniform(1.5, 4.0) if slow else 1.0
        speeds += [speed] * int(random.integers(shortest, longest + 1))
        slow = not slow
    return np.array(speeds[:ITERATIONS])


def share(random, memory=0.9, middle=0.6, spread=0.25):
    return np.clip(middle + spread * wandering(random, memory), 0.02, 1.0)


def noisy(random, values, level):
    return np.clip(values + level * random.normal(size=ITERATIONS), 0.0, 1.0)


def before(values):
    return np.r_[values[:1], values[:-1]]


def pressed(memory):
    """The speed under memory pressure: 1, and a fifth of it where less than about a quarter is left."""
    return 0.2 + 0.8 / (1.0 + np.exp(-(memory - 0.25) / 0.04))


def made(random, speed, level, *, cpu=None, memory=None):
    ones = np.ones(ITERATIONS)
    seconds = 0.001 * jitter(random, level) / speed
    samples = np.full(ITERATIONS, 32)
    return Trace(samples, samples * seconds, ones if cpu is None else cpu, ones if memory is None else memory)


def processor(speed=lambda c: c, *, level=0.05, factor=share, seen=lambda random, c: c):
    """A speed that the processor's share leads; `seen` is what is measured of the share."""

    def make(random):
        cpu = factor(random)
        return made(random, speed(cpu), level, cpu=seen(random, cpu))

    return make


def plain(level, speed=lambda random: np.ones(ITERATIONS), *, cpu=None, memory=None):
    """A speed that nothing leads, with factors that have nothing to do with it."""

    def make(random):
        factors = {name: of(random) for name, of in (("cpu", cpu), ("memory", memory)) if of is not None}
        return made(random, speed(random), level, **factors)

    return make


def memory_leads(random):
    memory = share(random, middle=0.35, spread=0.2)
    return made(random, pressed(memory), 0.05, memory=memory)


def both_lead(random):
    cpu, memory = share(random), share(random, middle=0.35, spread=0.2)
    return made(random, cpu * pressed(memory), 0.05, cpu=cpu, memory=memory)


def uniform(random):
    return random.uniform(size=ITERATIONS)


def anything(random):
    return random.uniform(0.05, 1.0, ITERATIONS)


def walk(level):
    return lambda random: np.exp(np.cumsum(random.normal(0.0, level, ITERATIONS)))


LEADING = {
    "processor, in proportion": processor(),
    "processor, slow changes": processor(factor=lambda random: share(random, memory=0.98)),
    "processor, on and off": processor(factor=lambda random: episodes(random, 5, 40)),
    "processor, saturating": processor(lambda c: np.minimum(1.0, 1.6 * c**1.5)),
    "processor, best in the middle": processor(lambda c: np.exp(-0.5 * np.log(c / 0.4) ** 2), factor=anything),
    "processor, one iteration later in part": processor(lambda c: 0.6 * c + 0.4 * before(c)),
    "processor, measured with noise": processor(level=0.1, seen=lambda random, c: noisy(random, c, 0.1)),
    "processor, idle for the first half": processor(
        factor=lambda random: np.where(np.arange(ITERATIONS) < ITERATIONS // 2, 1.0, episodes(random, 5, 40))
    ),
    "memory, pressure below a quarter": memory_leads,
    "processor and memory": both_lead,
}
OTHER = {
    "persistent": plain(0.02),
    "jitter 10 %": plain(0.1),
    "jitter 30 %": plain(0.3),
    "episodes of 10 to 200": plain(0.03, lambda random: episodes(random, 10, 200)),
    "episodes of 10 to 200, jitter 10 %": plain(0.1, lambda random: episodes(random, 10, 200)),
    "episodes of 10 to 200, jitter 30 %": plain(0.3, lambda random: episodes(random, 10, 200)),
    "random walk": plain(0.02, walk(0.02)),
    "period of 12": plain(0.03, lambda random: 1.0 + 0.3 * np.sin(2.0 * np.pi * np.arange(ITERATIONS) / 12.0)),
    "one in 30 ten times slower": plain(0.05, lambda random: np.where(uniform(random) < 1 / 30, 0.1, 1.0)),
    "jitter 10 %, factors are noise": plain(0.1, cpu=uniform, memory=uniform),
    "jitter 10 %, factors of their own": plain(0.1, cpu=share, memory=lambda random: share(random, memory=0.98)),
    "jitter 30 %, factors of their own": plain(0.3, cpu=share, memory=lambda random: share(random, memory=0.98)),
    "episodes, factors of their own": plain(
        0.05, lambda random: episodes(random, 10, 200), cpu=share, memory=lambda random: share(random, memory=0.98)
    ),
}
