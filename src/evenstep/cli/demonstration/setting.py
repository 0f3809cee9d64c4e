"""The setting of the demo: the data, the emulated cluster, and the most that balancing can gain on it."""

from pathlib import Path
from typing import Final

import numpy as np

WORKERS: Final = 4
BATCH_SIZE: Final = 26
"""Samples per worker. 4 times 26 in proportion to the speeds 4 : 4 : 4 : 1 is 32 : 32 : 32 : 8 exactly."""
IDEAL_SPEED_UP: Final = (4 + 4 + 4 + 1) / 4
"""Sizes in proportion to the speeds, over equal ones, with which all run at the speed of the slowest."""
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
    """Return the name of a scheme's folder."""
    return "".join(letter if letter.isalnum() or letter == "-" else "-" for letter in scheme)


def read_digits() -> dict[str, np.ndarray]:
    """Return 1797 handwritten digits, split into training and test images with a fixed seed.

    They come from scikit-learn: a part of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI
    Machine Learning Repository, https://doi.org/10.24432/C50P49, under CC BY 4.0.
    """
    given = np.load(Path(__file__).with_name("digits.npz"))
    images = (given["images"] / 16).astype(np.float32)[:, np.newaxis]
    targets = given["targets"].astype(np.int64)
    order = np.random.default_rng(SEED).permutation(len(images))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return {
        "train_images": images[train],
        "train_digits": targets[train],
        "test_images": images[test],
        "test_digits": targets[test],
    }
