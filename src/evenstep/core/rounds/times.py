"""Bounds on the times that nodes report, and the deadline of a round."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final, NamedTuple, final

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown

_KEPT: Final = 5
"""The rounds of a node over which its median of seconds beside compute is taken."""
_ALLOWED: Final = 4
"""A node may need at most this many times the usual seconds beside compute."""
_NAMED: Final = 2.0
"""If the bounds change a time by more than this factor, there is a reason to log."""
_NEEDED: Final = 2
"""The usual seconds are known from at least this many other nodes."""


class Believed(NamedTuple):
    """The seconds of compute that count, and in one clause why they differ from the reported ones, if they do."""

    seconds: float
    reason: str | None = None


@final
class RoundTimes:
    """Bounds the seconds that a node reports by the time between its message and its reply, which the server sees.

    A node computes at most as long as it was away, and at least as long as it was away less four times the usual rest
    (messages, start of the app). The usual rest is the median over the other nodes of their medians, which a minority
    of nodes cannot move. Time beyond that on a slow link counts as compute; the predictor learns its fixed part.
    The paper does not treat nodes that report wrong times; this bound is ours.
    """

    def __init__(self) -> None:
        self._rests: dict[int, deque[float]] = {}
        self._own: dict[int, float] = {}  # The median of each node.
        self._sorted: list[float] = []  # All medians.

    def observe(self, node: int, said: float, away: float) -> None:
        """Record the seconds of compute that a node reports and how long it was away.

        Call it for all nodes of a round before `believe`.

        Raises:
            ValueError: The seconds are not finite and positive.
        """
        if not 0.0 < said < math.inf or not 0.0 < away < math.inf:
            raise ValueError(f"a node cannot compute for {said} of {away} seconds")
        self._note(node, max(away - said, 0.0))

    def believe(self, node: int, said: float, away: float | None) -> Believed:
        """The seconds that count, given those that the node reports and how long it was away (None: not known)."""
        if away is None:
            return Believed(said)
        usual = self._usual(node)
        least = 0.0 if usual is None else away - _ALLOWED * usual
        counted = min(max(said, least), away)
        if 1.0 / _NAMED <= counted / said <= _NAMED:
            return Believed(counted)
        beside = "" if said > away else f", and the others need {usual:.3g} s beside compute"
        return Believed(counted, f"it was away for {away:.3g} s{beside}")

    def deadline(self, predicted: Mapping[int, float], patience: float | None) -> float | None:
        """How long a round of these nodes waits: `patience` times the longest predicted time of compute and rest.

        None, for no limit, if `patience` is None and before any time is known.
        """
        if patience is None or not predicted or not self._rests:
            return None
        return patience * max(seconds + self._rest(node) for node, seconds in predicted.items())

    def _note(self, node: int, rest: float) -> None:
        rests = self._rests.setdefault(node, deque(maxlen=_KEPT))
        if rests:
            del self._sorted[bisect_left(self._sorted, self._own[node])]
        rests.append(rest)
        self._own[node] = median(rests)
        insort(self._sorted, self._own[node])

    def _rest(self, node: int) -> float:
        """The seconds of a node beside compute: its median, bounded, or the usual ones."""
        usual = self._usual(node)
        if node not in self._own:
            return usual or 0.0
        return self._own[node] if usual is None else min(self._own[node], _ALLOWED * usual)

    def _usual(self, node: int) -> float | None:
        """The median over the other nodes; None if too few are known."""
        among = len(self._sorted)
        left_out = bisect_left(self._sorted, self._own[node]) if node in self._own else among
        others = among - (left_out < among)
        if others < _NEEDED:
            return None
        middle = [(others - 1) // 2, others // 2]
        return sum(self._sorted[place + (place >= left_out)] for place in middle) / 2


def required_patience(patience: float | None) -> float | None:
    """The patience itself.

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
