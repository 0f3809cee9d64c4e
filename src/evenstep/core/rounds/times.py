"""Bounds on the times that nodes report, and the deadline of a round."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import final

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown


@final
class RoundTimes:
    """Bounds the seconds that a node reports by the time between its message and its reply, which the server sees.

    A node computes at most as long as it was away, and at least as long as it was away less `allowed` times the usual
    rest (messages, start of the app). The usual rest is the median over the nodes of their medians, which a minority of
    them cannot move. Time beyond that on a slow link counts as compute; the predictor learns its fixed part. The paper
    does not treat nodes that report wrong times; this bound is ours.

    Args:
        kept: A node's seconds besides compute are the median over this many of its rounds.
        allowed: A node may need at most this many times the usual seconds besides compute.
        needed: The usual seconds count as known from this many nodes on.
    """

    def __init__(self, *, kept: int = 5, allowed: int = 4, needed: int = 3) -> None:
        self._kept, self._allowed, self._needed = kept, allowed, needed
        self._rests: dict[int, deque[float]] = {}
        self._own: dict[int, float] = {}  # The median of each node.
        self._usual: float | None = None

    def observe(self, seconds: Mapping[int, tuple[float, float]]) -> None:
        """Record the seconds of compute that each node reports and how long it was away, all above 0."""
        for node, (said, away) in seconds.items():
            rests = self._rests.setdefault(node, deque(maxlen=self._kept))
            rests.append(max(away - said, 0.0))
            self._own[node] = median(rests)
        if len(self._own) >= self._needed:
            self._usual = median(self._own.values())

    def bounded(self, said: float, away: float | None) -> float:
        """The seconds that count, given those that a node reports and how long it was away (None: not known)."""
        if away is None:
            return said
        least = 0.0 if self._usual is None else away - self._allowed * self._usual
        return min(max(said, least), away)

    def deadline(self, predicted: Mapping[int, float], patience: float | None) -> float | None:
        """The seconds that a round of these nodes waits: `patience` times the longest predicted compute and rest.

        None, for no limit, if `patience` is None or no time is known yet.
        """
        if patience is None or not predicted or not self._own:
            return None
        most = math.inf if self._usual is None else self._allowed * self._usual
        rests = {node: min(self._own.get(node, self._usual or 0.0), most) for node in predicted}
        return patience * max(seconds + rests[node] for node, seconds in predicted.items())


def required_patience(patience: float | None) -> float | None:
    """Return the patience if it is valid.

    Raises:
        ConfigError: It is not a number of at least 1.
    """
    if patience is None:
        return None
    if type(patience) not in (int, float) or not 1.0 <= patience < math.inf:
        raise ConfigError(
            f"a round cannot wait {shown(patience)} times as long as it is predicted to take: use a patience of at"
            " least 1, or None to wait for all"
        )
    return patience
