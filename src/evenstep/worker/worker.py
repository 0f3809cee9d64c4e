"""One process of a run among the others."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """This process among the workers of a run.

    Attributes:
        rank: Its number, 0 to `count` - 1.
        count: How many workers the run has.
        host: The name of its host.
        timeout_seconds: How long it waits for the others.
    """

    rank: int
    count: int
    host: str
    timeout_seconds: float
