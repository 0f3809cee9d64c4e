"""One iteration as one worker sees it: what it computes on, when, and what is written down of it."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Final, final

from evenstep.core.errors import ConfigError
from evenstep.core.samples import MicroBatch, Share
from evenstep.core.shown import shown
from evenstep.core.values import Basis, Factors, Reports, State

_MAX_UNITS: Final = 2**53
"""Of a batch; a float holds each whole number up to it."""


@final
@dataclass(slots=True, kw_only=True)
class Iteration:
    """The iteration under way, as this worker sees it."""

    number: int
    epoch: int
    share: Share
    piece: MicroBatch
    """What is in hand of the share."""
    batch_sizes: list[int]
    """What was computed on since the workers last synchronised, this batch included."""
    samples: int
    """The real samples among them."""
    passes: int
    """The shares among them."""
    entered: float
    """When the script asked for the first of them."""
    input_seconds: float
    script_seconds: float = 0.0
    """What the script did for itself since the workers last synchronised."""
    basis: Basis = "speed"
    """Why it has its sizes."""
    paused: float | None = None
    """When this worker had done its part of the (latest) synchronisation; None as long as there was none."""
    synchronised_seconds: float = 0.0
    """What the synchronisation took by the host's clock."""
    device_synchronised_seconds: float | None = None
    """What it took by the device's, of the iteration whose compute is reported with this one; None: by the host's."""
    ended: float | None = None
    """When the script asked for the next batch."""
    observed: bool = False
    factors: Factors = field(default_factory=Factors)
    """Those known before what was measured of it."""
    estimator_before: State | None = None

    def go_on_from(self, before: "Iteration") -> None:
        """Count in what was computed on before, since the workers have not synchronised in between."""
        self.batch_sizes = before.batch_sizes + self.batch_sizes
        self.samples += before.samples
        self.passes += before.passes
        self.entered = before.entered
        self.input_seconds += before.input_seconds
        self.script_seconds = before.script_seconds

    @property
    def outside(self) -> list[int]:
        """Microseconds of waiting for input, and of the script's own, before its compute."""
        return [round(self.input_seconds * 1e6), round(self.script_seconds * 1e6)]

    def script_seconds_after(self) -> float:
        """What the script did for itself between the synchronisation and asking for the next batch."""
        if self.paused is None or self.ended is None:
            return 0.0
        return max(self.ended - self.paused - self.synchronised_seconds, 0.0)

    def fingerprint(self, *, weighed: bool, rates: Sequence[float] = ()) -> int:
        """63 bits of everything that must be the same on all workers in this iteration, learning rates too."""
        plan = f"{self.epoch} {self.number} {self.share.iteration} {weighed} {rates}".encode()
        digest = hashlib.blake2b(plan + self.share.sizes.tobytes(), digest_size=8).digest()
        return int.from_bytes(digest) >> 1

    def plan(self, *, weighed: bool, rates: Sequence[float] = ()) -> dict[str, Any]:
        """What the fingerprint is of, as JSON holds it."""
        return {
            "epoch": self.epoch,
            "iteration": self.number,
            "slice": self.share.iteration,
            "weighed": "units" if weighed else "samples",
            "sizes": self.share.sizes.tolist(),
            "rates": [float(rate) for rate in rates],
        }

    def event(self, reports: Reports, worker: int, ended: float) -> dict[str, object]:
        """What is recorded of an iteration that synchronised: its parts in seconds, and this worker's report."""
        compute = int(reports.compute_microseconds[worker]) * self.passes / 1e6
        slowest = int(reports.compute_microseconds.max()) * self.passes / 1e6
        # Never more than it really stood: the slowest one's compute may have begun before this worker's.
        by_device = self.device_synchronised_seconds
        synchronised = self.synchronised_seconds if by_device is None else by_device
        return self._parts(compute, min(slowest - compute, synchronised), synchronised, reports.row(worker), ended)

    def served_event(self, row: list[int], held_seconds: float) -> dict[str, object]:
        """As `event`, of an iteration whose push was held for so long; `row` is what this worker told of it."""
        assert self.ended is not None
        compute = row[1] * self.passes / 1e6
        synchronised = self.synchronised_seconds
        return self._parts(compute, min(held_seconds, synchronised), synchronised, row, self.ended)

    def _parts(
        self, compute: float, waited: float, synchronised: float, row: list[int], ended: float
    ) -> dict[str, object]:
        return {
            "event": "iteration",
            "iteration": self.number,
            "epoch": self.epoch,
            "at": self.entered,
            "samples": self.samples,
            "basis": self.basis,
            "iteration_seconds": ended - self.entered,
            "input_seconds": self.input_seconds,
            "compute_seconds": compute,
            "wait_seconds": waited,
            "comm_seconds": synchronised - waited,
            "report": row,
            "factors": list(astuple(self.factors)),
        }


def units_of(now: Iteration | None, count: Any) -> int:
    """The units that a script counted in this worker's batch, 0 where the batch is a copy of somebody else's sample.

    Raises:
        ConfigError: The count is negative or not whole, or no batch is in hand.
    """
    if now is None:
        raise ConfigError("weigh_by was called before the loader handed out a batch: call it inside the loop")
    try:
        units = math.nan if isinstance(count, str) else float(count)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # The last by a tensor of several elements.
        units = math.nan
    if not (0 <= units <= _MAX_UNITS and units == int(units)):
        raise ConfigError(f"weigh_by takes a whole number of units (tokens, pixels) >= 0, not {shown(count)}")
    return int(count) if now.share.samples else 0
