"""Counter-based randomness: each draw depends on where it is used, not on the number of draws before it.

With a sequential stream a worker would get other numbers if another worker asked first. A run in real time and its
replay in virtual time would then be two different experiments.
"""

import struct
from enum import IntEnum
from hashlib import blake2b
from typing import Final

_PLACE: Final = struct.Struct("<QQQQ")
_WORD: Final = struct.Struct("<Q")


class Purpose(IntEnum):
    """The purpose of a draw: equal seeds give unrelated draws for different purposes."""

    JITTER = 1
    EPISODE = 2
    SPOT = 3
    COST = 4


def derive_seed(seed: int, name: str) -> int:
    """Derive the seed for `name` from `seed`: stable, and unrelated for different names."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def uniforms(count: int, *, seed: int, purpose: Purpose, worker: int, index: int) -> list[float]:
    """The `count` (at most 8) uniform draws from (0, 1) for this seed, purpose, worker and index.

    Any index costs the same (about a microsecond), and the numbers do not depend on library versions.
    """
    digest = blake2b(_PLACE.pack(seed, purpose, worker, index), digest_size=8 * count).digest()
    # 52 bits plus a half: never 0 or 1, which an inverse distribution function would turn into infinity.
    return [((word >> 12) + 0.5) * 2.0**-52 for word in struct.unpack(f"<{count}Q", digest)]


def uniform(seed: int, purpose: int, worker: int, index: int) -> float:
    """The same draw as `uniforms(1, ...)` at half the cost, because a simulation draws millions."""
    word: int = _WORD.unpack(blake2b(_PLACE.pack(seed, purpose, worker, index), digest_size=8).digest())[0]
    return ((word >> 12) + 0.5) * 2.0**-52
