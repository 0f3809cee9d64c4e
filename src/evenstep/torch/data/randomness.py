"""Seeds derived from a key, and temporary seeding of the global generators of Python, NumPy and torch (CPU)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mixed(*key: int) -> int:
    """Derive a 63-bit seed from the key, whose parts have up to 64 bits."""
    sequence = np.random.SeedSequence([part & 0xFFFFFFFFFFFFFFFF for part in key])
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1


def seed_generators(*key: int) -> None:
    """Seed all generators from the key."""
    seed = mixed(*key)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def seeded_randomness(*key: int) -> Iterator[None]:
    """Seed all generators from the key inside the context; restore them afterwards."""
    before = random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()
    seed_generators(*key)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
