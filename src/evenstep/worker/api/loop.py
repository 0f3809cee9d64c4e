"""The common part of `Balancer` and `Client`: shares of an epoch, the time of compute, notes and the state."""

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Ledger, Shares
from evenstep.core.samples import Share as Part
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED, require_whole
from evenstep.worker.activity import Activity
from evenstep.worker.agreement import Agreed
from evenstep.worker.api.setup import Asked
from evenstep.worker.api.share import Share
from evenstep.worker.loader_state import LoaderState, Progress, load_speeds, read_state
from evenstep.worker.meter import HostStopwatch
from evenstep.worker.opening import open_tracker, run_event
from evenstep.worker.worker import Worker


class Loop(ABC):
    """One worker's epochs."""

    def __init__(self, asked: Asked, agreed: Agreed, worker: Worker, activity: Activity) -> None:
        self._asked = asked
        self._worker = worker
        self._stopwatch = HostStopwatch(time.perf_counter)
        self._tracker = open_tracker(
            agreed,
            worker,
            self._stopwatch,
            activity,
            launched=asked.launched,
            folder=asked.events_dir,
        )
        self._tracker.recorder.record(
            run_event(agreed, worker.rank, iterations=asked.ledger(0).iterations, seed=asked.seed)
        )
        self._at = Progress()
        self._loops = 0
        self._is_finalizing = sys.is_finalizing  # At exit `sys` may be None here when a generator is closed.
        self.share: Share | None = None
        """The last share handed out; after its compute a `Balancer` settles its weights, as by `weigh_by`."""
        self.scheme = agreed.scheme
        """The scheme on which all workers have agreed."""

    @property
    def next_epoch(self) -> int:
        """The epoch with which to begin or continue: `for epoch in range(balancer.next_epoch, epochs)`."""
        return self._at.next_epoch

    @property
    def sizes(self) -> list[int]:
        """The samples of each worker in an iteration, as last planned."""
        sizes: list[int] = self._tracker.planned_sizes().tolist()
        return sizes

    @property
    def iterations(self) -> int:
        """The iterations of an epoch."""
        return self._asked.ledger(0).iterations

    def note(self, **values: float) -> None:
        """Record values in the event log, if there is one: `balancer.note(loss=loss)`; `evenstep report` plots them."""
        try:
            numbers = {name: float(value) for name, value in values.items()}
        except (TypeError, ValueError, OverflowError):
            raise ConfigError("note takes numbers, such as note(loss=0.5)") from None
        self._tracker.note(numbers)

    def close(self) -> None:
        """End the record of this worker. Only needed in processes that train several times."""
        self._tracker.close()

    def epoch(self, epoch: int | None = None) -> Iterator[Share]:
        """Yield this worker's shares of the epoch, or of the next one; after `load_state_dict`, the remaining shares.

        Raises:
            ConfigError: The epoch is not a whole number >= 0, or the run was closed.
        """
        if epoch is not None:
            self._at.set_next(require_whole("epoch", epoch, 0, UNLIMITED))
        return self._epoch()

    def _require_unclosed(self) -> None:
        if self._tracker.closed:
            raise ConfigError("this run was closed: start another one")

    def _epoch(self) -> Iterator[Share]:
        self._require_unclosed()
        self._loops += 1
        loop = self._loops
        self._at.begin()
        ledger = self._asked.ledger(self._at.done)
        self._order = self._asked.order(self._at.epoch)
        self._enter()
        shares = self._shares(ledger)
        self._at.looping = True
        try:
            while (part := shares.share()) is not None:
                shares.advance()
                self._at.done = ledger.iteration
                self._begin(part)
                self.share = self._share_of(part)
                yield self.share
                if loop != self._loops:
                    raise ConfigError("another loop over an epoch began before this one ended: finish one first")
                self._require_unclosed()
                self._finish()
                self._enter()
                shares.replan()
            self._at.done = ledger.iterations
        finally:
            if loop == self._loops and not self._is_finalizing():
                self._at.looping = False
                self._leave()

    def _share_of(self, part: Part) -> Share:
        positions = np.array(part.positions, dtype=np.int64)
        return Share(
            iteration=part.iteration,
            positions=positions,
            indices=self._order[positions],
            samples=part.samples,
            weight=1.0,
            sizes=part.sizes,
        )

    def _begin(self, part: Part) -> None:
        """Called when a share is handed out."""
        self._tracker.begin(part, part, self._at.epoch)

    @abstractmethod
    def _finish(self) -> None:
        """Called when the script is finished with its share; ConfigError if it did not do what it has to."""

    @abstractmethod
    def _enter(self) -> None:
        """Called when the script asks for the next share."""

    @abstractmethod
    def _shares(self, ledger: Ledger) -> Shares:
        """Return this worker's shares of the current epoch, which starts at the ledger's position."""

    def _leave(self) -> None:
        """Called when the script has left the epoch, at its end or before."""
        self._tracker.leave_loop()

    def state_dict(self) -> dict[str, Any]:
        """Return the run's position in the loop and the basis of the sizes: plain numbers, lists and dicts.

        The state of any one worker serves all of them.
        """
        asked = self._asked
        state = LoaderState(
            seed=asked.seed,
            epoch=self._at.epoch,
            iteration=self._at.done,
            looping=self._at.looping,
            length=asked.length,
            global_batch_size=asked.global_batch_size,
            order=None,
            load=self._tracker.state_dict(),
        )
        return msgspec.structs.asdict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was called, also with another number of workers.

        Raises:
            ConfigError: The state is damaged, or of another length, global batch size or seed.
        """
        saved = read_state(state)
        for name in ("length", "global_batch_size", "seed"):
            mine, theirs = getattr(self._asked, name), getattr(saved, name)
            if mine != theirs:
                raise ConfigError(f"this state has the {name} {theirs} and not {mine}: resume with the same")
        load_speeds(self._tracker, saved.load)
        self._at.restore(saved, self._asked.ledger(0).iterations)


def seconds_of(value: object) -> float:
    """Return a time that a caller reports; ConfigError unless it is a number of seconds from 0 to 1e6."""
    try:
        seconds = math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= 1e6:  # Times of many samples and workers are added up as integers.
        raise ConfigError(
            f"report takes the seconds that the share took to compute, a number from 0 to 1e+06, not {shown(value)}"
        )
    return seconds
