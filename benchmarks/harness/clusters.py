"""Clusters to emulate, and the sizes with which they would finish soonest."""

import numpy as np

from evenstep.cluster import Cluster, ClusterWorker
from evenstep.cluster.slowness import AffineCurve, Device


def cluster_of(curves, disturbances=()):
    """A worker for each curve; `disturbances` are pairs of a worker and what disturbs it."""
    return Cluster(
        workers=tuple(
            ClusterWorker(
                device=Device(curve=curve),
                disturbances=tuple(disturbance for who, disturbance in disturbances if who == worker),
            )
            for worker, curve in enumerate(curves)
        )
    )


def proportional(speeds, global_batch_size, ideal_seconds):
    """Curves through the origin with these relative speeds, which together take the ideal time for the batch."""
    whole = sum(speeds)
    return [AffineCurve(seconds_per_sample=ideal_seconds * whole / (speed * global_batch_size)) for speed in speeds]


def best(curves, global_batch_size, factors=None):
    """The least possible time of an iteration, exactly, and sizes that reach it.

    Curves may fall as well as rise, so the sizes that a worker finishes within a time need not be all up to a largest
    one. The set of sums that the workers can reach within it is kept as the bits of an integer, and the least time is
    searched for among all times that any worker can take. Every worker has one sample at least.
    """
    factors = factors or [1.0] * len(curves)
    times = [
        [factor * curve.seconds(size) for size in range(1, global_batch_size + 1)]
        for curve, factor in zip(curves, factors, strict=True)
    ]
    candidates = sorted({seconds for each in times for seconds in each})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _sums(times, candidates[middle], global_batch_size)[-1] >> global_batch_size & 1:
            high = middle
        else:
            low = middle + 1
    return candidates[low], _sizes(times, candidates[low], global_batch_size)


def best_of_rising(curves, global_batch_size, factors):
    """As `best`, for curves that never fall, and for all iterations at once.

    `factors` has shape [iterations, workers], and so have the sizes. The least time is found by bisection to the last
    bits of a float; whole samples that two workers could both take within it go to the first of them.
    """
    rising = [np.array([curve.seconds(size) for size in range(1, global_batch_size + 1)]) for curve in curves]
    if any((np.diff(times) < 0).any() for times in rising):
        raise ValueError("a curve falls somewhere: use best(), which can deal with that")

    def largest(seconds):
        # A bound of the last bits, so that a size whose time is the limit itself is within it.
        limits = seconds[:, None] / factors * (1.0 + 1e-12)
        return np.stack([np.searchsorted(times, limits[:, i], side="right") for i, times in enumerate(rising)], axis=1)

    def enough(sizes):
        return (sizes >= 1).all(axis=1) & (sizes.sum(axis=1) >= global_batch_size)

    low = np.zeros(len(factors))
    high = (factors * [times[-1] for times in rising]).max(axis=1)
    for _ in range(80):
        middle = (low + high) / 2
        done = enough(largest(middle))
        low, high = np.where(done, low, middle), np.where(done, middle, high)
    sizes = largest(high)
    for worker in reversed(range(len(curves))):
        spare = sizes.sum(axis=1) - global_batch_size
        sizes[:, worker] -= np.minimum(spare, sizes[:, worker] - 1)
    return sizes


def slowness(cluster, iterations, batch_size=1):
    """How many times slower than its undisturbed device each worker is, shape [iterations, workers].

    Asked at one batch size: for disturbances that multiply the device's time, as all of these benchmarks do.
    """
    disturbance = cluster.disturbance()
    plain = [worker.device.curve.seconds(batch_size) for worker in cluster.workers]
    return np.array(
        [
            [
                disturbance.seconds(
                    worker=worker, iteration=k, batch_size=batch_size, natural_seconds=0.0
                ) / plain[worker]
                for worker in range(len(cluster))
            ]
            for k in range(iterations)
        ]
    )  # fmt: skip


def emulated_seconds(cluster, sizes):
    """The emulated compute of every worker in every iteration for these sizes, both of shape [iterations, workers]."""
    disturbance = cluster.disturbance()
    return np.array(
        [
            [
                disturbance.seconds(worker=worker, iteration=k, batch_size=int(size), natural_seconds=0.0)
                for worker, size in enumerate(row)
            ]
            for k, row in enumerate(sizes)
        ]
    )


def _within(times, limit):
    return [size for size, seconds in enumerate(times, start=1) if seconds <= limit]


def _sums(times, limit, whole):
    """After each worker, the sums that it and those before it can reach: bit s for the sum s."""
    reached, mask = [1], (1 << (whole + 1)) - 1
    for each in times:
        sums = 0
        for size in _within(each, limit):
            sums |= reached[-1] << size
        reached.append(sums & mask)
    return reached


def _sizes(times, limit, whole):
    reached, sizes = _sums(times, limit, whole), []
    for worker in reversed(range(len(times))):
        size = next(
            x for x in reversed(_within(times[worker], limit)) if x <= whole and reached[worker] >> (whole - x) & 1
        )
        sizes.append(size)
        whole -= size
    return sizes[::-1]
