"""The loader that `prepare` returns, which yields this worker's batch of each iteration, and one of shares alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch
from torch.utils.data import DataLoader

from evenstep.core.samples import Drawn, Share, Shares
from evenstep.core.values import UNLIMITED, require_whole
from evenstep.torch.data.batch_maker import BatchMaker
from evenstep.torch.data.batches import Batches
from evenstep.torch.data.fetch import ProcessFetcher, Requests, WorkerDataset, as_made, inner_loader, pinned, pins
from evenstep.torch.data.loop import Maker
from evenstep.torch.data.own_data import OwnEpochs
from evenstep.torch.data.randomness import mixed
from evenstep.torch.data.sampling import MAX_LENGTH, Positions

if TYPE_CHECKING:
    from evenstep.torch.elastic.session import ElasticSession
    from evenstep.torch.session import Session


@final
class PreparedLoader(Batches):
    """Iterates over this worker's batches; every worker takes the same number of iterations.

    Each sample of an epoch counts exactly once over all workers. The size of a batch is decided right before it is
    handed out, even with data workers and prefetching.

    Attributes:
        dataset: The user's dataset.
        sampler: The user's sampler or batch sampler. A new `sampler.epoch`, as set by `set_epoch` of a
            DistributedSampler, has the same effect as `set_epoch` of the loader.
        surveyed: Whether `evenstep plan` measures the workers here; nothing should be saved or restored then.
    """

    def __init__(
        self, source: DataLoader[Any], session: "Session | ElasticSession", number: int, cost: object = None
    ) -> None:
        super().__init__(source, session, number, cost)
        self._requests = Requests()
        self._inner: DataLoader[Any] | None = None
        self._made: BatchMaker | None = None
        self._randomness = torch.Generator()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _attribute(self, name: str) -> Any:
        if name == "sampler" and self.bound:
            return self._epochs.order.sampling.sampler
        return getattr(self.source, name)

    def release(self) -> None:
        super().release()
        self._inner = None

    def _let_go(self) -> None:
        self._requests.end()
        if self.bound and isinstance(self._epochs, OwnEpochs):
            self._epochs.let_go()

    def _maker(self, shares: Shares, drawn: Drawn) -> Maker:
        source, order, pin = self.source, drawn.indices, pins(self.source)
        maker = self._made = self._made or BatchMaker(source.dataset, source.collate_fn)
        if not source.num_workers:
            make = (lambda indices: pinned(maker.batch(indices), pin)) if pin else maker.batch
            return lambda _, piece: make(order[np.array(piece.positions)].tolist())
        if self._inner is None:
            how = {
                "batch_sampler": self._requests,
                "collate_fn": as_made,
                "persistent_workers": source.persistent_workers,
            }
            self._inner = inner_loader(source, WorkerDataset(maker), self._randomness, **how)
        rank = self._started.engine.workers.rank
        self._randomness.manual_seed(mixed(self._epochs.order.seed, self.number, self._at.epoch, rank))
        self._requests.begin(shares, order, limit=self._started.scheme.micro_batch, by_rows=maker.by_rows)
        fetcher = ProcessFetcher(self._inner, self._requests, maker, pin=pin)
        return lambda share, piece: fetcher.fetch(share.iteration, piece.positions)


def _of_the_source(name: str) -> property:
    """An attribute of the user's loader; setting it fails where PyTorch refuses it."""

    def change(loader: PreparedLoader, value: object) -> None:
        setattr(loader.source, name, value)
        loader._made = loader._inner = None

    return property(lambda loader: loader._attribute(name), change)


for _name in (
    *("batch_sampler", "batch_size", "collate_fn", "dataset", "drop_last", "generator", "multiprocessing_context"),
    *("num_workers", "persistent_workers", "pin_memory", "pin_memory_device", "prefetch_factor", "sampler", "timeout"),
    "worker_init_fn",
):
    setattr(PreparedLoader, _name, _of_the_source(_name))


@final
class PreparedShares(Batches):
    """Iterates over this worker's `Share` of each iteration, with positions as int64 arrays; a loop is an epoch.

    Everything else works as with a loader: sizes follow the workers' speeds, `model` and `optimizer` weigh by them,
    and there are `set_epoch`, `state_dict`, `note`, `mean_over_workers`, `computes(share)` and so on.

    Args:
        length: The positions of an epoch, numbered from 0; None if it never ends.
        global_batch_size: Positions in one iteration, over all workers.
        session: The session.
        number: The number of this loader in the session.
        cost: As in `Session.shares`.

    Raises:
        ConfigError: A number is not an integer, or is out of range.
    """

    def __init__(
        self, length: int | None, global_batch_size: int, session: "Session", number: int, cost: object = None
    ) -> None:
        length = MAX_LENGTH if length is None else require_whole("length", length, 1, MAX_LENGTH)
        size = require_whole("global_batch_size", global_batch_size, 1, UNLIMITED)
        super().__init__(DataLoader(Positions(length), batch_size=size), session, number, cost)

    def __iter__(self) -> Iterator[Share]:
        return cast("Iterator[Share]", super().__iter__())

    def __len__(self) -> int:
        """Iterations in an epoch, the same on every worker.

        Raises:
            TypeError: The epoch never ends.
        """
        if len(self.source.dataset) == MAX_LENGTH:  # type: ignore[arg-type]
            raise TypeError("shares without a length never end")
        return super().__len__()

    def _let_go(self) -> None:
        """Nothing is fetched ahead."""

    def _maker(self, shares: Shares, drawn: Drawn) -> Maker:
        return _part


def _part(share: Share, piece: Share) -> Share:
    """This part of the share, with positions as an array that can index data."""
    positions = cast("tuple[int, ...]", np.array(piece.positions, dtype=np.int64))
    return replace(share, positions=positions, samples=piece.samples)
