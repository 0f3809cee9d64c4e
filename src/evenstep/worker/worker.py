"""One process of a run among the others."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """This process among the workers of a run: `rank` is 0 to `count` - 1, `timeout_seconds` its longest wait."""

    rank: int
    count: int
    host: str
    timeout_seconds: float
