"""What the demo trains on: the data, the emulated cluster, and the most that balancing can gain on it."""

from pathlib import Path
from typing import Final

import numpy as np

from evenstep.cluster import parse_cluster

WORKERS: Final = 4
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
    """Write the 1797 handwritten digits of digits.npz, split into training and test images with a fixed seed.

    They are those of scikit-learn: a part of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI
    Machine Learning Repository, https://doi.org/10.24432/C50P49, under CC BY 4.0.
    """
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images = (digits["images"] / 16).astype(np.float32)[:, np.newaxis]
    targets = digits["targets"].astype(np.int64)
    order = np.random.default_rng(SEED).permutation(len(images))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    np.savez(
        path,
        train_images=images[train],
        train_digits=targets[train],
        test_images=images[test],
        test_digits=targets[test],
    )


def ideal_speed_up() -> float:
    """How much faster the emulated cluster is with sizes in proportion to its speeds than with equal sizes."""
    cluster = parse_cluster(CLUSTER)
    speeds = [
        1 / cluster.disturbance().seconds(worker=worker, iteration=0, batch_size=1, natural_seconds=0.0, now=0.0)
        for worker in range(len(cluster))
    ]
    return sum(speeds) / len(speeds) / min(speeds)
