"""How much slower a worker is made for a while: what is told of a disturbance, beside what it does."""

from dataclasses import dataclass
from typing import Final, final

_ALIKE: Final = 1.05


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """`factor` times the seconds that an iteration would take (below 1: faster), and `extra_seconds` >= 0 more."""

    factor: float = 1.0
    extra_seconds: float = 0.0

    def then(self, *, factor: float, extra_seconds: float = 0.0) -> "Slowness":
        """This, and another on top of it."""
        return Slowness(factor=self.factor * factor, extra_seconds=self.extra_seconds * factor + extra_seconds)

    def is_like(self, other: "Slowness") -> bool:
        """Whether nobody would tell the two apart: within five per cent."""
        return _alike(self.factor, other.factor) and _alike(self.extra_seconds, other.extra_seconds)


NO_SLOWNESS: Final = Slowness()


def _alike(first: float, second: float) -> bool:
    return max(first, second) <= _ALIKE * min(first, second)
