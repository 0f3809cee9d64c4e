"""Bounds on the times that nodes report, and the deadline of a round."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple, final

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown


class Believed(NamedTuple):
    """The seconds of compute that count and, if they differ from the reported ones, the reason in one clause."""

    seconds: float
    reason: str | None = None


@final
class RoundTimes:
    """Bounds the seconds that a node reports by the time between its message and its reply, which the server sees.

    A node computes at most as long as it was away, and at least as long as it was away less four times the usual rest
    (messages, start of the app). The usual rest is the median over the other nodes of their medians, which a minority
    of nodes cannot move. Time beyond that on a slow link counts as compute; the predictor learns its fixed part.
    The paper does not treat nodes that report wrong times; this bound is ours.

    Args:
        kept: A node's seconds besides compute are the median over this many of its rounds.
        allowed: A node may need at most this many times the usual seconds besides compute.
        needed: The usual seconds count as known from this many other nodes on.
        named: If the bounds change a time by more than this factor, the reason is given, to be logged.
    """

    def __init__(self, *, kept: int = 5, allowed: int = 4, needed: int = 2, named: float = 2.0) -> None:
        self._kept, self._allowed, self._needed, self._named = kept, allowed, needed, named
        self._rests: dict[int, deque[float]] = {}
        self._own: dict[int, float] = {}  # The median of each node.
        self._sorted: list[float] = []  # All medians.

    def observe(self, node: int, said: float, away: float) -> None:
        """Record the seconds of compute that a node reports and how long it was away.

        Both are above 0. Call it for all nodes of a round before `believe`.
        """
        rests = self._rests.setdefault(node, deque(maxlen=self._kept))
        if rests:
            del self._sorted[bisect_left(self._sorted, self._own[node])]
        rests.append(max(away - said, 0.0))
        self._own[node] = median(rests)
        insort(self._sorted, self._own[node])

    def believe(self, node: int, said: float, away: float | None) -> Believed:
        """The seconds that count, given those that a node reports and how long it was away (None: not known)."""
        if away is None:
            return Believed(said)
        usual = self._usual(node)
        least = 0.0 if usual is None else away - self._allowed * usual
        counted = min(max(said, least), away)
        if 1.0 / self._named <= counted / said <= self._named:
            return Believed(counted)
        beside = "" if said > away else f", and the others need {usual:.3g} s besides compute"
        return Believed(counted, f"it was away for {away:.3g} s{beside}")

    def deadline(self, predicted: Mapping[int, float], patience: float | None) -> float | None:
        """The seconds that a round of these nodes waits: `patience` times the longest predicted compute and rest.

        None, for no limit, if `patience` is None or no time is known yet.
        """
        if patience is None or not predicted or not self._rests:
            return None
        return patience * max(seconds + self._rest(node) for node, seconds in predicted.items())

    def _rest(self, node: int) -> float:
        """The seconds of a node besides compute: its bounded median, or the usual ones."""
        usual = self._usual(node)
        if node not in self._own:
            return usual or 0.0
        return self._own[node] if usual is None else min(self._own[node], self._allowed * usual)

    def _usual(self, node: int) -> float | None:
        """The median over the other nodes; None if too few are known."""
        among = len(self._sorted)
        left_out = bisect_left(self._sorted, self._own[node]) if node in self._own else among
        others = among - (left_out < among)
        if others < self._needed:
            return None
        middle = [(others - 1) // 2, others // 2]
        return sum(self._sorted[place + (place >= left_out)] for place in middle) / 2


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
