"""What makes eight workers slow: lasting differences, episodes, jitter, or differences with jitter."""

from evenstep.cluster.slowness import Episodic, Jitter
from harness import clusters

SPEEDS = (2, 1, 4, 1, 1.5, 3, 1, 2)
ALIKE = (1, 3) * (len(SPEEDS) // 2)
"""Hosts that are alike, a group each, with an older and a newer device."""
EQUAL = (1,) * len(SPEEDS)
EPISODES = {"factor": 3.0, "period": 60, "shortest": 5, "longest": 35}
SPREAD = 0.3
REGIMES = {
    "persistent": f"speeds {':'.join(map(str, SPEEDS))}, lasting",
    "episodic": "equal workers, each 3x slower in episodes of 5 to 35 iterations, one in every 60",
    "jitter": "equal workers, jitter of 30 %",
    "mixed": f"speeds {':'.join(map(str, ALIKE))}, and jitter of 30 %",
}
SECONDS = 0.5
"""Of an iteration of a worker of the mean speed, at an equal part of the global batch."""


def cluster(regime, seed, global_batch_size, more=()):
    """The workers of a regime, with `more` disturbances of some; the seed decides when they are slow."""
    disturbance = {
        "episodic": Episodic(**EPISODES, seed=seed),
        "jitter": Jitter(spread=SPREAD, seed=seed),
        "mixed": Jitter(spread=SPREAD, seed=seed),
    }.get(regime)
    speeds = {"persistent": SPEEDS, "mixed": ALIKE}.get(regime, EQUAL)
    disturbances = [] if disturbance is None else [(worker, disturbance) for worker in range(len(speeds))]
    return clusters.cluster_of(clusters.proportional(speeds, global_batch_size, SECONDS), [*disturbances, *more])
