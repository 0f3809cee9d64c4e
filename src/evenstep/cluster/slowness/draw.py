"""Counter-based randomness: each draw is a function of where it is used, not of how many draws came before it.

A sequential stream would give a worker other numbers as soon as another worker asked first; that would make a run in
real time and its replay in virtual time two different experiments.
"""

import struct
from enum import IntEnum
from hashlib import blake2b
from typing import Final

from evenstep.core.errors import ConfigError

_SEEDS: Final = 2**64
_PLACE: Final = struct.Struct("<QQQQ")
_WORD: Final = struct.Struct("<Q")


class Purpose(IntEnum):
    """What a draw is for: equal seeds give unrelated draws for different purposes."""

    JITTER = 1
    EPISODE = 2
    SPOT = 3


def require_seed(seed: int) -> None:
    """Raise ConfigError unless 0 <= `seed` < 2**64."""
    if not 0 <= seed < _SEEDS:
        raise ConfigError(f"seed must lie between 0 and {_SEEDS - 1}, not {seed!r}")


def derive_seed(seed: int, name: str) -> int:
    """The seed that belongs to `name` under `seed`: stable, and unrelated for different names."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def uniforms(count: int, *, seed: int, purpose: Purpose, worker: int, index: int) -> list[float]:
    """The `count` (at most 8) uniform draws from (0, 1) that belong to this seed, purpose, worker and index.

    A keyed hash of where the draw is used: any index costs the same (about a microsecond), and the numbers are the same
    in every version of every library.
    """
    place = _PLACE.pack(seed, purpose, worker, index)
    digest = blake2b(place, digest_size=8 * count).digest()
    # 52 bits and a half: neither 0 nor 1 can come out, of which an inverse distribution function makes infinities.
    return [((word >> 12) + 0.5) * 2.0**-52 for word in struct.unpack(f"<{count}Q", digest)]


def uniform(seed: int, purpose: int, worker: int, index: int) -> float:
    """The one draw that `uniforms(1, ...)` gives, at half of its cost: a simulation draws by the million."""
    word: int = _WORD.unpack(blake2b(_PLACE.pack(seed, purpose, worker, index), digest_size=8).digest())[0]
    return ((word >> 12) + 0.5) * 2.0**-52
