"""What the demo trains on: the data, the emulated cluster, and what balancing could gain on it at best."""

from pathlib import Path
from typing import Final

import numpy as np

from evenstep.cluster import parse_cluster
from evenstep.core.load.allocate import shares
from evenstep.core.values import UNLIMITED

WORKERS: Final = 4
SLOW_WORKER: Final = 3
BATCH_SIZE: Final = 26
"""Per worker. 4 times 26 in proportion to the speeds 4 : 4 : 4 : 1 is 32 : 32 : 32 : 8 exactly."""
EPOCHS: Final = 6
SEED: Final = 0

CLUSTER: Final = """\
# The cluster of `evenstep demo`: four workers, the last one four times slower than the others.

[devices.fast]
per_sample = "1.75 ms"

[devices.slow]
per_sample = "7 ms"

[[workers]]
device = "fast"
count = 3

[[workers]]
device = "slow"
"""

_TEST_IMAGES = 360


def folder_of(scheme: str) -> str:
    """The name of a scheme's folder."""
    return "".join(letter if letter.isalnum() or letter == "-" else "-" for letter in scheme)


def write_digits(path: Path) -> None:
    """Write scikit-learn's 1797 handwritten digits, split at random but always alike into training and test images."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, np.newaxis]
    order = np.random.default_rng(SEED).permutation(len(images))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    np.savez(
        path,
        train_images=images[train],
        train_digits=digits.target[train],
        test_images=images[test],
        test_digits=digits.target[test],
    )


def ideal_speed_up() -> float:
    """How much faster the emulated cluster is with sizes in proportion to its speeds than with equal ones."""
    cluster = parse_cluster(CLUSTER)
    disturbance = cluster.disturbance()

    def seconds(worker: int, size: int) -> float:
        return disturbance.seconds(worker=worker, iteration=0, batch_size=size, natural_seconds=0.0, now=0.0)

    workers = range(len(cluster))
    speeds = np.array([round(1e6 / seconds(worker, 1)) for worker in workers], dtype=np.int64)
    limits = (np.ones_like(speeds), np.full_like(speeds, UNLIMITED))
    sizes = shares(BATCH_SIZE * len(cluster), speeds, lower=limits[0], upper=limits[1])
    equal = max(seconds(worker, BATCH_SIZE) for worker in workers)
    return equal / max(seconds(worker, int(size)) for worker, size in zip(workers, sizes, strict=True))
