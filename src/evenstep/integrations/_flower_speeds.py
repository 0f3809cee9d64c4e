"""Learns the nodes' speeds from their replies, and logs the nodes whose times are not plausible."""

import logging
import math
from typing import final

from evenstep.core.load.base import Load
from evenstep.core.rounds import Mode, RoundTimes, RoundWork, Work
from evenstep.core.shown import shown
from evenstep.integrations._flower_records import SECONDS

_log = logging.getLogger("flwr")


@final
class Speeds:
    """The work of the nodes, from the seconds that they report and the server measures.

    Raises:
        ConfigError: As `RoundWork`.
    """

    def __init__(self, load: Load, mode: Mode) -> None:
        self.work = RoundWork(load, mode)
        self.times = RoundTimes()
        self._silent: set[int] = set()
        self._flat = False

    def plan(self, nodes: list[int], mean: Work) -> dict[int, Work]:
        """The work of these nodes. If the time of some does not follow it, the log says so once."""
        plan = self.work.plan(nodes, mean.batch_size, mean.steps)
        if self.work.flat and not self._flat:
            self._flat = True
            _log.warning(
                "the time of %s does not follow the %s, so such nodes get at least the mean: a client must take `steps`"
                " steps of `batch-size` samples, and not go through all of its data",
                ", ".join(f"node {node}" for node in sorted(self.work.flat)),
                "steps" if self.work.mode == "steps" else "batch size",
            )
        return plan

    def observe(self, node: int, seconds: float, away: float | None) -> None:
        """Record how long a node was away. Call it for all nodes of a round before `learn`, which needs the median."""
        if away is not None and away > 0.0 and seconds > 0.0:
            self.times.observe(node, seconds, away)

    def learn(self, node: int, work: Work, seconds: object, away: float | None) -> None:
        """Learn from the seconds that a node reports for its work."""
        if seconds is None:
            if node not in self._silent:
                self._silent.add(node)
                _log.warning("node %d sends no %s: give its ClientApp mods=[measured]", node, SECONDS)
            return
        if not isinstance(seconds, int | float) or not 0.0 < seconds < math.inf:
            _log.warning("node %d says that it has trained for %s seconds, which is left out", node, shown(seconds))
            return
        believed = self.times.believe(node, float(seconds), away)
        if believed.reason is not None:
            counted = believed.seconds
            _log.warning("node %d says %.3g s, which count as %.3g: %s", node, seconds, counted, believed.reason)
        self.work.observe(node, work, believed.seconds)
