"""What workers tell each other whenever they synchronise: that they follow the same plan, and how fast they were."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from evenstep.core.disagreement import require_same_plan
from evenstep.core.values import IntArray, Reports
from evenstep.worker.iteration import Iteration
from evenstep.worker.tracker import Tracker

COLUMNS: Final = 3 + Reports.columns()
"""Of a row without extra ones."""


class Rows:
    """A row of integers from each worker: fingerprint of its plan, times outside compute, report, `extra`.

    It does not communicate: it makes this worker's row and takes in the rows of all workers.

    Args:
        balancer: Follows this worker's iterations.
        exchange_plans: Returns the plans of all workers for this worker's, by rank; all workers must call it together.
    """

    def __init__(
        self, balancer: Tracker, exchange_plans: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
    ) -> None:
        self._balancer = balancer
        self._exchange_plans = exchange_plans
        self._sent: tuple[Iteration, bool, Sequence[float], int] | None = None
        self._received: tuple[Reports, IntArray] | None = None

    def row(
        self,
        now: Iteration,
        *,
        weighed: bool = False,
        rates: Sequence[float] = (),
        steps: int = 0,
        extra: Sequence[int] = (),
    ) -> list[int]:
        """This worker's row for the iteration, `weighed` by units or not, stepped at these `rates` after `steps`."""
        self._sent = (now, weighed, rates, steps)
        fingerprint = now.fingerprint(weighed=weighed, rates=rates, steps=steps)
        return [fingerprint, *now.outside, *self._balancer.meter.row(now), *extra]

    def check(self, rows: IntArray) -> IntArray:
        """Check that all workers followed the same plan, and keep their reports; returns the extra columns.

        Raises:
            DisagreementError: They did not.
        """
        require_same_plan(self._plans, rows[:, 0])
        self._received = Reports.from_table(rows[:, 3:COLUMNS]), rows[:, 1:3]
        return rows[:, COLUMNS:]

    def _plans(self) -> Sequence[Mapping[str, Any]]:
        assert self._sent is not None
        now, weighed, rates, steps = self._sent
        return self._exchange_plans(now.plan(weighed=weighed, rates=rates, steps=steps))

    def learn(self) -> None:
        """Decide the next sizes from the reports received since the last call, if any."""
        if self._received is not None:
            self._balancer.learn(*self._received)
            self._received = None
