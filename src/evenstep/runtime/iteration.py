"""One iteration as one worker sees it: what it computes on, when, and what is written down of it."""

import hashlib
from dataclasses import dataclass
from typing import final

from evenstep.core.samples import Share
from evenstep.core.values import Reports, State


@final
@dataclass(slots=True, kw_only=True)
class Iteration:
    """The iteration under way, as this worker sees it."""

    number: int
    epoch: int
    share: Share
    batch_sizes: list[int]
    """What was computed on since the last synchronised backward, this batch included."""
    samples: int
    """The real samples among them."""
    began: float
    input_seconds: float
    paused: float | None = None
    """When its (latest) synchronising backward had its last gradient ready."""
    synchronised_seconds: float = 0.0
    observed: bool = False
    estimator_before: State | None = None

    def fingerprint(self, *, weighed: bool) -> int:
        """63 bits of everything that must be the same on all workers in this iteration."""
        plan = f"{self.epoch} {self.number} {self.share.iteration} {weighed}".encode()
        digest = hashlib.blake2b(plan + self.share.sizes.tobytes(), digest_size=8).digest()
        return int.from_bytes(digest) >> 1

    def event(self, reports: Reports, worker: int, ended: float) -> dict[str, object]:
        """What is recorded of an iteration that synchronised: its parts in seconds, and this worker's report."""
        passes = len(self.batch_sizes)
        compute = int(reports.compute_microseconds[worker]) * passes / 1e6
        slowest = int(reports.compute_microseconds.max()) * passes / 1e6
        # Never more than it really stood: the slowest one's compute may have begun before this worker's.
        waited = min(slowest - compute, self.synchronised_seconds)
        return {
            "event": "iteration",
            "iteration": self.number,
            "epoch": self.epoch,
            "samples": self.samples,
            "iteration_seconds": self.input_seconds + ended - self.began,
            "input_seconds": self.input_seconds,
            "compute_seconds": compute,
            "wait_seconds": waited,
            "comm_seconds": self.synchronised_seconds - waited,
            "report": reports.row(worker),
        }
