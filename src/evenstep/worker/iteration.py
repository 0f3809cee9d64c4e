"""One iteration as one worker sees it: its samples, its times, and its event for the log."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import msgspec

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Share
from evenstep.core.shown import shown
from evenstep.core.values import Basis, Factors, Reports, State
from evenstep.telemetry.events import IterationDone

if TYPE_CHECKING:
    from evenstep.protocol.messages import Grant


@final
class Iteration(msgspec.Struct, eq=False, kw_only=True):
    """The current iteration: what this worker has computed since the workers last synchronised.

    Attributes:
        number: Counts the worker's iterations, from 0.
        loader: The loader of the session that handed out the batch.
        piece: The current micro-batch of `share`.
        batch_sizes: The size of each batch, copies of samples included; `samples` counts the real ones of all.
        costs: The cost of each batch, in average samples; None if samples do not differ in cost.
        padding: The part of the costs that is padding, in average samples; None if batches are not padded.
        load: The measure for its speed: the amounts of all batches, with the time of their samples.
        passes: The number of shares; more than 1 if gradients accumulate.
        entered: When the script asked for the first batch. Times are seconds of the tracker's clock.
        script_seconds: The script's own work between the synchronisation before and the first batch.
        paused: When this worker finished its part of the latest synchronisation; None before.
        synchronised_seconds: The duration of the synchronisation by the host's clock.
        device_synchronised_seconds: The same by the device's clock, of the iteration that is reported with this one;
            None if the host's clock measures it.
        ended: When the script asked for the next batch.
        observed: Whether it has been measured.
        factors: The driving factors before the measured compute.
        forecaster_before: The forecaster's state without it, if it may be measured again.
    """

    number: int
    epoch: int
    loader: int = 0
    share: Share
    piece: Share
    batch_sizes: list[int]
    samples: int
    load: float
    costs: list[float] | None = None
    padding: float | None = None
    passes: int
    entered: float
    input_seconds: float
    script_seconds: float = 0.0
    basis: Basis = "speed"
    paused: float | None = None
    synchronised_seconds: float = 0.0
    device_synchronised_seconds: float | None = None
    ended: float | None = None
    observed: bool = False
    factors: Factors = Factors()
    forecaster_before: State | None = None

    def continue_from(self, before: "Iteration") -> None:
        """Add what was computed in `before`, which did not synchronise."""
        self.costs = None if self.costs is None and before.costs is None else [*before.amounts, *self.amounts]
        if before.padding is not None:
            self.padding = before.padding + (self.padding or 0.0)
        self.batch_sizes = before.batch_sizes + self.batch_sizes
        self.samples += before.samples
        self.load += before.load
        self.passes += before.passes
        self.entered = before.entered
        self.input_seconds += before.input_seconds
        self.script_seconds = before.script_seconds

    @property
    def amounts(self) -> Sequence[float]:
        """The measure for its memory: the cost of each batch, or else its size."""
        return self.batch_sizes if self.costs is None else self.costs

    @property
    def seconds_since_meeting(self) -> float:
        """Return the time from the end of the synchronisation before to the end of this one."""
        assert self.paused is not None
        return self.script_seconds + self.paused + self.synchronised_seconds - self.entered

    def event(self, reports: Reports, worker: int, ended: float) -> IterationDone:
        """Return the log event of a synchronised iteration: its parts in seconds, and this worker's report."""
        compute = int(reports.compute_microseconds[worker]) * self.passes / 1e6
        slowest = int(reports.compute_microseconds.max()) * self.passes / 1e6
        # The slowest worker may have started earlier, so waiting is at most the measured synchronisation.
        by_device = self.device_synchronised_seconds
        synchronised = self.synchronised_seconds if by_device is None else by_device
        return self._event(worker, reports.row(worker), ended, compute, synchronised, slowest - compute)

    def served_event(self, worker: int, row: list[int], told: "Grant") -> IterationDone:
        """Like `event`, for an iteration whose push had this answer; `row` is this worker's report."""
        assert self.ended is not None
        compute = row[1] * self.passes / 1e6
        return msgspec.structs.replace(
            self._event(worker, row, self.ended, compute, self.synchronised_seconds, told.held),
            staleness=told.staleness,
            behind=told.behind,
            share=told.share,
            lead=told.lead,
            bound=told.bound,
        )

    def _event(
        self, worker: int, row: list[int], ended: float, compute: float, synchronised: float, held: float
    ) -> IterationDone:
        waited = min(held, synchronised)
        return IterationDone(
            worker=worker,
            iteration=self.number,
            epoch=self.epoch,
            at=self.entered,
            samples=self.samples,
            cost=None if self.costs is None else sum(self.costs),
            padding=self.padding,
            basis=self.basis,
            iteration_seconds=ended - self.entered,
            input_seconds=self.input_seconds,
            compute_seconds=compute,
            wait_seconds=waited,
            comm_seconds=synchronised - waited,
            row=row,
            factors=(self.factors.cpu_availability, self.factors.memory_availability),
        )


def units_of(share: Share | None, count: Any) -> float:
    """Return the units that a script counted in this worker's batch; 0 if the worker has no samples of its own.

    Raises:
        ConfigError: The count is negative or not a number, or there is no batch yet.
    """
    if share is None:
        raise ConfigError("weigh_by was called before the loader handed out a batch: call it inside the loop")
    try:
        units = math.nan if isinstance(count, str) else float(count)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements.
        units = math.nan
    if not 0 <= units <= 2**53:  # A float holds each whole number up to this one.
        raise ConfigError(f"weigh_by takes a number of units (tokens, pixels) or weights >= 0, not {shown(count)}")
    # A batch below the minimum repeats its samples, and a unit counts once.
    return units * share.samples / len(share.positions)
