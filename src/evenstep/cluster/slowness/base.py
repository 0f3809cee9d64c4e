"""The interfaces of injected slowness and emulated devices; nothing else."""

from typing import Protocol

from evenstep.cluster.slowness.slowness import Slowness


class Disturbance(Protocol):
    """How long a worker's compute takes, given how long it would naturally take.

    A pure function of its arguments and of the values that the member was made of: asking twice, in another order or in
    another process gives the same answer, so that a run in real time and its replay in virtual time agree.
    """

    def seconds(self, *, worker: int, iteration: int, batch_size: int, natural_seconds: float, now: float) -> float:
        """The seconds (>= 0) that the compute of this iteration takes in total, the natural part included.

        Args:
            worker: The worker's id, from 0.
            iteration: The worker's own count of iterations, from 0.
            batch_size: Samples of this iteration, from 0.
            natural_seconds: The compute as it would be undisturbed, >= 0.
            now: Seconds since the run began, >= 0, for members that follow a trace in time.
        """

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """How much slower the worker is in this iteration, `before` being what others have made of it already.

        What is new in every iteration (jitter) does not count, and neither does what a device takes by itself.
        """


class Curve(Protocol):
    """The compute time of a device as a function of the batch size."""

    def seconds(self, batch_size: int) -> float:
        """The seconds (> 0) of one iteration with `batch_size` samples, from 0."""
