"""Plain DistributedDataParallel on emulated devices: the baseline that evenstep is measured against.

It holds a worker as the runtime does and otherwise does what DDP does, so that a difference between the two is the
difference of their batch sizes. It knows nothing of schemes and decides nothing; the sizes are those set by hand.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # PyTorch keeps it out of its list
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from evenstep.cluster.slowness import Disturbance
from evenstep.core.samples import Ledger

__all__ = ["DeviceHold", "PlainDDP", "SlicedSampler", "plain_loader"]


@final
@dataclass(slots=True, kw_only=True)
class DeviceHold:
    """Holds worker `worker` until its emulated compute, counted from the hand-out of its batch, is over.

    Attributes:
        disturbance: How long the compute takes.
        worker: Whose compute it is.
        clock: Seconds that only rise.
        wait: Waits for so many seconds.
        iterations: Iterations held so far.
        overruns: Those among them whose real work took longer than the emulated time: they could not be emulated.
    """

    disturbance: Disturbance
    worker: int
    clock: Callable[[], float] = time.perf_counter
    wait: Callable[[float], None] = time.sleep
    iterations: int = 0
    overruns: int = 0
    _handed_out: tuple[float, int] | None = field(init=False, default=None)

    def handed_out(self, batch_size: int) -> None:
        """A batch of this many samples is in hand: its compute begins."""
        self._handed_out = (self.clock(), batch_size)

    def until_due(self) -> None:
        """Wait until the emulated compute of the batch in hand is over.

        Raises:
            RuntimeError: No batch was handed out since the last time.
        """
        if self._handed_out is None:
            raise RuntimeError("backward came without a batch: call handed_out(batch_size) when the batch is in hand")
        (began, batch_size), self._handed_out = self._handed_out, None
        elapsed = self.clock() - began
        due = self.disturbance.seconds(
            worker=self.worker,
            iteration=self.iterations,
            batch_size=batch_size,
            natural_seconds=elapsed,
        )
        self.iterations += 1
        if due > elapsed:
            self.wait(due - elapsed)
        elif elapsed - due > 1e-6:
            self.overruns += 1


@final
class PlainDDP:
    """A model in plain DistributedDataParallel, on a device that `hold` emulates.

    The earlier gradient buckets leave before the hold, as under evenstep: what is emulated is when the worker's
    gradient is complete. Every backward synchronises; `no_sync` is not supported.

        plain = PlainDDP(model, hold=DeviceHold(disturbance=cluster.disturbance(), worker=rank))
        for x, y in loader:
            plain.handed_out(len(x))
            loss = criterion(plain.model(x), y)
            ...

    Args:
        module: The model.
        hold: The emulated device; None leaves the real one.
        weight: This worker's part of the union batch, x_i / X, where sizes are set by hand; None is DDP's own 1 / N.
        process_group: Whom to synchronise with; None: everyone.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        hold: DeviceHold | None = None,
        weight: float | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model = DistributedDataParallel(module, process_group=process_group)
        self.hold = hold
        self._group = process_group
        self._weight = 1.0 / dist.get_world_size(process_group) if weight is None else weight

        # DDP insists on these names and annotations.
        def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            return self._communicate(bucket)

        self.model.register_comm_hook(None, hook)

    def handed_out(self, batch_size: int) -> None:
        """A batch of this many samples is in hand: its compute begins."""
        if self.hold is not None:
            self.hold.handed_out(batch_size)

    def _communicate(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last() and self.hold is not None:
            self.hold.until_due()
        # Scaled before the sum, as DDP does without a hook, so that the weights are the same bit for bit.
        buffer = bucket.buffer().mul_(self._weight)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
        return summed


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor


@final
class SlicedSampler(Sampler[list[int]]):
    """This worker's consecutive part of each slice of an epoch's order, with sizes set by hand.

    The order is that of evenstep's loader (and DistributedSampler): `torch.randperm` seeded with seed + epoch. So the
    union batch of every iteration has the same samples as under evenstep. A last slice that is shorter than the others
    is left out, because the weights would not be those set by hand.

    Args:
        length: Samples in the dataset.
        sizes: Everybody's batch sizes.
        worker: Whose part this is.
        seed: Draws the order, with the epoch.
        shuffle: Whether there is an order to draw.
    """

    def __init__(self, *, length: int, sizes: Sequence[int], worker: int, seed: int = 0, shuffle: bool = True) -> None:
        self._ledger = Ledger(length=length, global_batch_size=sum(sizes), drop_last=True)
        self._first = sum(sizes[:worker])
        self._size = sizes[worker]
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0

    def __len__(self) -> int:
        """Iterations in an epoch."""
        return self._ledger.iterations

    def set_epoch(self, epoch: int) -> None:
        """The next loop is this epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self._ledger.length)
        if self._shuffle:
            generator = torch.Generator()
            generator.manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._ledger.length, generator=generator).numpy()
        for iteration in range(len(self)):
            cut = self._ledger.slice(iteration)
            assert cut is not None
            first = cut.start + self._first
            yield order[first : first + self._size].tolist()


def plain_loader(
    dataset: Dataset[Any],
    *,
    sizes: Sequence[int],
    worker: int,
    seed: int = 0,
    shuffle: bool = True,
    num_workers: int = 0,
) -> DataLoader[Any]:
    """A DataLoader over this worker's part of each iteration, with everybody's `sizes` set by hand."""
    length = len(dataset)  # type: ignore[arg-type]
    sampler = SlicedSampler(length=length, sizes=sizes, worker=worker, seed=seed, shuffle=shuffle)
    return DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
