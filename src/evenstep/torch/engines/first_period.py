"""Times the first steps of a run, after which the workers divide the rest of their period by speed."""

from typing import Any, final

from evenstep.core.load.first_period import FIRST_STEPS, compares_first_steps, first_period_sizes
from evenstep.core.samples import Lookahead, Share
from evenstep.schemes import Scheme
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.reports import ReportExchange
from evenstep.worker.iteration import Iteration


@final
class FirstPeriod:
    """The first period of a run in which no speeds are known, where each worker has its own number of steps."""

    def __init__(self, engine: Engine, scheme: Scheme, exchange: ReportExchange) -> None:
        self._engine, self._scheme, self._exchange = engine, scheme, exchange
        self._slices: Lookahead | None = None
        self._seconds = 0.0

    def shares(self, *args: Any, **options: Any) -> Lookahead:
        """Like the tracker's; it is kept, to be divided anew."""
        self._slices = self._engine.tracker.shares(*args, **options)
        return self._slices

    def step_ends(self, now: Iteration) -> Share | None:
        """Note the end of a step. After the first ones compare times; returns this worker's share if it has changed."""
        tracker, steps = self._engine.tracker, len(now.batch_sizes)
        if steps > FIRST_STEPS or not self._compares(now):
            return None
        before, self._seconds = self._seconds, tracker.stopwatch.read()  # May wait for the device.
        if steps < FIRST_STEPS:
            return None
        microseconds = round((self._seconds - before) * 1e6)
        hand_outs = self._engine.hand_outs
        batch = hand_outs.in_hand
        assert batch is not None
        newest, taken = hand_outs.ahead[-1] if hand_outs.ahead else batch, now.share.samples
        if newest.share is now.share:
            taken = newest.share.positions.index(newest.piece.positions[-1]) + 1
        row = [taken, batch.piece.samples if batch.computed else 0, microseconds]
        with self._engine.waiting(tracker.waiting()):
            self._exchange.start(row)
            table = self._exchange.wait()
        assert table is not None
        policy = self._scheme.policy(len(table))
        sizes = first_period_sizes(policy, tracker.problem, now.share.sizes, *table.T)
        if sizes is now.share.sizes or self._slices is None:
            return None
        return self._slices.redivide(sizes, table[:, 0])

    def _compares(self, now: Iteration) -> bool:
        tracker, loader = self._engine.tracker, self._engine.looped
        if self._slices is None or loader is None or loader.number != now.loader:
            return False
        size, met = self._scheme.micro_batch or 1, tracker.latest is not None
        return compares_first_steps(tracker.problem, now.share.sizes, size, basis=now.basis, met=met)
