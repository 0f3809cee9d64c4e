"""One worker in virtual time: how long it computes, and what it tells of itself."""

from typing import Final, final

from evenstep.cluster import ClusterWorker
from evenstep.cluster.slowness.device_memory import DeviceMemory
from evenstep.cluster.slowness.news import SlownessNews
from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load
from evenstep.core.load.equal import Equal
from evenstep.core.load.memory import MemoryModel
from evenstep.core.load.pairwise import Pairwise
from evenstep.core.load.per_epoch import PerEpoch
from evenstep.core.load.static import Static
from evenstep.core.values import UNLIMITED, Factors
from evenstep.schemes import Scheme

_FACTORS: Final = Factors()
"""What a machine has to give says nothing of a device that it emulates, so the runtime gives these too."""


def rests_on_estimates(load: Load) -> bool:
    """Whether any size rests on the workers' estimates of their speeds; elsewhere they are only shown."""
    return not isinstance(load, Equal | Static | PerEpoch | Pairwise)


@final
class VirtualWorker:
    """Does for a described worker what `Balancer` and `Hold` of the runtime do for a real one, and rounds as they do.

    Args:
        spec: Its device and what disturbs it.
        number: Its rank, by which its randomness is drawn.
        scheme: Whose estimator it has.
        estimates: Whether it tells its estimates; without, they are 0, as long as nothing is known.

    Attributes:
        news: When there is something to tell of its slowness.
    """

    __slots__ = (
        "_curve",
        "_disturbances",
        "_estimator",
        "_fits",
        "_memory",
        "_memory_model",
        "_micro_batch",
        "_natural",
        "_number",
        "_size",
        "news",
    )

    def __init__(self, spec: ClusterWorker, number: int, scheme: Scheme, *, estimates: bool) -> None:
        device = spec.device
        assert device is not None
        self._number = number
        self._curve = device.curve
        self._disturbances = tuple(part.seconds for part in spec.disturbances)
        self._micro_batch = scheme.micro_batch
        memory = device.memory
        self._fits = device.largest_batch if memory is None else min(device.largest_batch, memory.largest_batch)
        self._memory: DeviceMemory | None = None if scheme.micro_batch else memory
        self._memory_model = None if self._memory is None else _model_of(self._memory)
        self._estimator = scheme.load.estimator() if estimates else None
        self._size, self._natural = 0, 0.0
        self.news = SlownessNews(spec.disturbance(), number)

    def seconds(self, iteration: int, batch_size: int, now: float) -> float:
        """The compute of this worker's iteration of that number, which begins now.

        Raises:
            ConfigError: The device does not hold the batch.
        """
        if batch_size != self._size:
            if self._micro_batch is not None and batch_size > self._micro_batch:
                return self._in_micro_batches(iteration, batch_size, self._micro_batch, now)
            self._look_up(batch_size)
        seconds = self._natural
        for disturbed in self._disturbances:
            seconds = disturbed(
                worker=self._number, iteration=iteration, batch_size=batch_size, natural_seconds=seconds, now=now
            )
        return seconds

    def _in_micro_batches(self, iteration: int, batch_size: int, micro_batch: int, now: float) -> float:
        """As the runtime's emulation: each of them is a pass that the device and the disturbances see by itself."""
        whole, rest = divmod(batch_size, micro_batch)
        sizes = [micro_batch] * whole + [rest] * (rest > 0)
        return sum(self.seconds(iteration, size, now) for size in sizes)

    def _look_up(self, batch_size: int) -> None:
        if batch_size > self._fits:
            raise ConfigError(
                f"worker {self._number} was given {batch_size} samples but its device holds at most {self._fits}:"
                " lower the batch size or choose a scheme that minds memory, such as lb-bsp"
            )
        self._size, self._natural = batch_size, self._curve.seconds(batch_size)

    def row(self, samples: int, compute_seconds: float, largest_pass: int, *, learns: bool = True) -> tuple[int, ...]:
        """What this worker tells the others of an iteration of so many samples and seconds: a row of `Reports`.

        `largest_pass` is the largest batch that it computed on at once. The estimator is fed with what is reported and
        no more digits; it is left as it is unless it `learns` from this iteration.
        """
        microseconds = round(compute_seconds * 1e6)
        largest = UNLIMITED
        if self._memory_model is not None and self._memory is not None:
            self._memory_model.observe(largest_pass, self._memory.peak_bytes(largest_pass))
            largest = self._memory_model.largest_size()
        if self._estimator is None:
            return (samples, microseconds, 0, 0, 0, 0, largest)
        if learns:
            self._estimator.observe(samples, microseconds / 1e6, _FACTORS)
        return (samples, microseconds, *self._estimator.estimate(_FACTORS), largest)

    @property
    def learns_its_limit(self) -> bool:
        """Whether its memory's limit is learnt from what its batches take."""
        return self._memory_model is not None


def batch_of(samples: int, minimum: int) -> int:
    """What a worker with so many samples computes on: copies, where it has none or fewer than the minimum."""
    own = samples or 1
    return own if own >= minimum else own * -(-minimum // own)


def _model_of(memory: DeviceMemory) -> MemoryModel:
    return MemoryModel(capacity_bytes=memory.capacity_bytes, base_bytes=memory.fixed_bytes, rounding_bytes=0)
