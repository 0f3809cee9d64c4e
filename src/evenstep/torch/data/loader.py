"""The loader that comes back from `prepare`: this worker's batch of each iteration."""

from typing import TYPE_CHECKING, Any, final

from torch.utils.data import DataLoader

from evenstep.core.samples import Drawn, Shares
from evenstep.torch.data.batch_maker import BatchMaker
from evenstep.torch.data.batches import Batches
from evenstep.torch.data.fetch import Fetcher, InlineFetcher, ProcessFetcher, Requests, inner_loader, pins
from evenstep.torch.data.loop import Maker

if TYPE_CHECKING:
    from evenstep.torch.session import Session


@final
class PreparedLoader(Batches):
    """Iterates over this worker's batches; every worker takes the same number of iterations.

    Each sample of an epoch counts exactly once over all workers. The size of a batch is decided right before it is
    handed out, even with data workers and prefetching.

    Attributes:
        dataset: The user's dataset.
        sampler: The user's sampler, or batch sampler. A new `sampler.epoch`, as `set_epoch` of a DistributedSampler
            sets it, has the same effect as `set_epoch` of the loader.
        profiled: Whether `evenstep profile` measures the device here; nothing should be saved or restored then.
        checkpoints: The number of the newest checkpoint that this run has saved or restored, by folder; 0 for none.
    """

    def __init__(self, source: DataLoader[Any], session: "Session", number: int, cost: object = None) -> None:
        super().__init__(source, session, number, cost)
        self._requests = Requests()
        self._inner: DataLoader[Any] | None = None
        self._made: tuple[BatchMaker, int] | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def _attribute(self, name: str) -> Any:
        if name == "sampler" and self.bound:
            return self._epochs.order.sampling.sampler
        return getattr(self._source, name)

    def release(self) -> None:
        self._let_go()
        self._inner = None

    def _let_go(self) -> None:
        self._requests.end()

    def _maker(self, shares: Shares, drawn: Drawn) -> Maker:
        fetcher = self._fetcher(shares, drawn)
        return lambda share, piece: fetcher.fetch(share.iteration, piece.positions, last=piece.last)

    def _fetcher(self, shares: Shares, drawn: Drawn) -> Fetcher:
        source, seed, epoch = self._source, self._epochs.order.seed, self._at.epoch
        if self._made is None or self._made[1] != seed:  # A state that was loaded may have another seed.
            self._made, self._inner = (BatchMaker(source.dataset, seed, source.collate_fn), seed), None
        maker, _ = self._made
        if not source.num_workers:
            return InlineFetcher(maker, epoch, drawn.indices, pin=pins(source))
        if self._inner is None:
            self._inner = inner_loader(source, maker, seed, self._requests)
        limit = self._started.scheme.micro_batch
        self._requests.begin(shares, epoch, drawn.indices, limit=limit, by_rows=maker.by_rows)
        return ProcessFetcher(self._inner, self._requests, maker, epoch, pin=pins(source))


def _of_the_source(name: str) -> property:
    """An attribute of the user's loader, which refuses to set what PyTorch refuses."""

    def change(loader: PreparedLoader, value: object) -> None:
        setattr(loader._source, name, value)
        loader._made = loader._inner = None

    return property(lambda loader: loader._attribute(name), change)


for _name in (
    *("batch_sampler", "batch_size", "collate_fn", "dataset", "drop_last", "generator", "multiprocessing_context"),
    *("num_workers", "persistent_workers", "pin_memory", "pin_memory_device", "prefetch_factor", "sampler", "timeout"),
    "worker_init_fn",
):
    setattr(PreparedLoader, _name, _of_the_source(_name))
