"""The loader that comes back from `prepare`: this worker's right batch for each iteration."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast, final

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Ledger, Share, Shares, micro_batches
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED, IntArray
from evenstep.torch.arguments import whole_number
from evenstep.torch.data.fetch import InlineFetcher, ProcessFetcher, Requests, inner_loader
from evenstep.torch.data.loader_state import checked_state
from evenstep.torch.data.metrics import Value, mean_over_workers
from evenstep.torch.data.order import EpochOrder
from evenstep.torch.engines.engine import Engine

if TYPE_CHECKING:
    from pathlib import Path


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatistics:
    """Counts of one worker, over all epochs of this process.

    `iterations`: iterations handed out. `misses`: samples that a change of sizes made it fetch out of turn (with worker
    processes). `overruns`: iterations whose real work took longer than the time to be emulated. `skipped`: pushes to
    parameter servers that held a NaN or an infinity and were left out.
    """

    iterations: int
    misses: int
    overruns: int
    skipped: int = 0


@final
class PreparedLoader:
    """Iterates over this worker's batches; every worker takes the same number of iterations.

    Each position of an epoch counts exactly once over all workers. The size of a batch is decided right before it is
    handed out, with worker processes and prefetching too.

    Attributes:
        current: This worker's `Share` of the present iteration. Where `current.samples` is 0, the batch is a copy of
            another worker's sample whose gradient counts nothing; leave it out of metrics.
        iteration: How many iterations have been handed out whole, over all epochs of this process: batches, or, where a
            worker computes on several micro-batches in an iteration, what to count instead of them.
        scheme: The name of the scheme.
        unstepped: How many iterations have been handed out since the optimizer last stepped.
        profiled: Whether `evenstep profile` only measures the device here: nothing is to be saved or restored.
        checkpoints: By folder, the number of the newest checkpoint that this run has saved or restored; 0 for none.
    """

    def __init__(
        self,
        source: DataLoader[Any],
        *,
        order: EpochOrder,
        engine: Engine,
        global_batch_size: int,
        depth: int,
        scheme: str,
        shares: Callable[..., Shares],
        micro_batch: int | None = None,
        profiled: bool = False,
    ) -> None:
        self.scheme = scheme
        self.profiled = profiled
        self._shares = shares
        self._source = source
        self._order = order
        self._engine = engine
        self._balancer = engine.balancer
        self._depth = depth
        self._micro_batch = micro_batch
        self._global_batch_size = global_batch_size
        self._epoch = 0
        self._next_epoch = 0
        self._looping = False
        self._done = 0
        self._loops = 0
        self._resume: int | None = None
        self._drawn: IntArray | None = None
        self._sampler_epoch = getattr(source.sampler, "epoch", None)
        self._requests = Requests(source)
        self._inner = inner_loader(source, order.seed, self._requests) if source.num_workers else None
        self.current: Share | None = None
        self.iteration = 0
        self.unstepped = 0
        self.checkpoints: dict[Path, int] = {}
        self._misses = 0
        self._ledger(0)

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self._source.dataset

    @property
    def sampler(self) -> Any:
        """The user's sampler; `set_epoch` on a DistributedSampler is heeded."""
        return self._source.sampler

    @property
    def batch_sizes(self) -> list[int]:
        """Everybody's sizes in the present iteration, or planned for the first."""
        sizes = self._balancer.planned_sizes() if self.current is None else self.current.sizes
        return cast("list[int]", sizes.tolist())

    @property
    def global_batch_size(self) -> int:
        """The samples of one iteration over all workers."""
        return self._global_batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the loop under way; outside one, that of the next loop."""
        return self._epoch if self._looping else self._next_epoch

    @property
    def engine(self) -> Engine:
        """What keeps this worker in step with the others; for evenstep's own parts."""
        return self._engine

    def stepped(self) -> None:
        """The optimizer has stepped on what was handed out."""
        self.unstepped = 0

    def _ledger(self, iteration: int) -> Ledger:
        return Ledger(
            length=self._order.length,
            global_batch_size=self._global_batch_size,
            drop_last=self._source.drop_last,
            iteration=iteration,
        )

    def __len__(self) -> int:
        """Iterations in an epoch, the same on every worker."""
        return self._ledger(0).iterations

    @property
    def synchronises(self) -> bool:
        """Whether the optimizer steps on the batch in hand; of several micro-batches, on the last one alone."""
        return self._engine.synchronises

    def statistics(self) -> LoaderStatistics:
        """What this worker's loader has been through so far."""
        return LoaderStatistics(
            iterations=self.iteration,
            misses=self._misses,
            overruns=self._balancer.overruns,
            skipped=self._balancer.skipped,
        )

    def settle(self) -> None:
        """Average the models now, under local SGD, where they have gone apart since the last average; else nothing.

        For a script that evaluates or saves in mid-epoch, or has left a loop with `break`. Every worker must call it.
        """
        self._engine.settle()

    def close(self) -> None:
        """End what `prepare` started, on every worker; nothing prepared can be used afterwards.

        Not needed in a script that ends anyway; for processes that prepare several times.
        """
        self._requests.end()
        self._inner = None
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def set_epoch(self, epoch: int) -> None:
        """The next loop is this epoch; without it, epochs count up by themselves.

        Raises:
            ConfigError: The epoch is no whole number >= 0.
        """
        try:
            epoch = whole_number(epoch, 0, UNLIMITED)
        except (TypeError, ValueError):
            raise ConfigError(f"an epoch is a whole number from 0 to {UNLIMITED}, not {shown(epoch)}") from None
        if epoch != self._next_epoch:
            self._resume = None
        self._next_epoch = epoch

    def weigh_by(self, count: int) -> None:
        """Weigh this batch by `count` units (tokens, pixels) over all workers' instead of by samples.

        For a loss that is a mean over such units: the summed gradient is then that of the mean over the union batch.
        Call it in every iteration, on every worker, between the hand-out and backward.

        Raises:
            ConfigError: The count is negative or not whole, or no batch is in hand.
        """
        self._engine.weigh_by(count)

    def note(self, **values: float | torch.Tensor) -> None:
        """Write values down in the run's event log, where there is one: `loader.note(loss=loss)`.

        `evenstep report` draws each name over time and over samples. What several workers note in the same iteration is
        averaged, weighted by their samples: with a mean loss on each, that is the loss of the union batch. A tensor on
        a device is fetched, which waits for the device: note now and then there.

        Raises:
            ConfigError: A value is no number.
        """
        self._balancer.note({name: _number(name, value) for name, value in values.items()})

    def mean_over_workers(self, value: Value, count: float) -> Value:
        """The mean of everybody's `value`, weighted by `count`: of a loss or an accuracy over uneven shares.

        Every worker must call it, at the same place; all get the same bits, so that they can decide on it alike (to
        stop, or to lower the learning rate). A number gives a number, a tensor a tensor of means. With a `count` of 0
        a worker's value does not matter: `loader.current.samples` is the count of a training batch. Under parameter
        servers nobody waits for the others: each gets its own value, and a warning.

        Raises:
            ConfigError: A count is negative, or nobody counted anything.
            WorkerLostError: A worker died or stopped, or did not call it; the message names it.
        """
        try:
            with self._balancer.activity.waiting():
                return mean_over_workers(self._engine.workers, value, count)
        except RuntimeError as error:
            raise self._engine.explained(error) from error

    def __iter__(self) -> Iterator[Any]:
        self._loops += 1
        loop = self._loops
        self._adopt_sampler_epoch()
        self._epoch = self._next_epoch
        self._next_epoch = self._epoch + 1
        ledger = self._ledger(self._resume or 0)
        resuming, self._resume = self._resume is not None, None
        self._done = ledger.iteration
        if not self._engine.synchronises:
            raise ConfigError(
                "a loop over micro-batches was left in the middle of an iteration, where the other workers may wait for"
                " this one: leave it where loader.synchronises is True"
            )
        self._engine.enter_loader()
        order = self._draw(resuming=resuming)
        shares = self._shares(ledger, epoch=self._epoch, depth=self._depth)
        fetcher = self._fetcher(shares, order)
        misses = self._misses
        self._looping = True
        try:
            while (share := shares.share()) is not None:
                for piece in micro_batches(share, self._micro_batch):
                    batch = fetcher.fetch(share.iteration, piece.positions, last=piece.last)
                    if piece.last:
                        shares.advance()
                        self._done = ledger.iteration
                    self.current = share
                    self.iteration += piece.last
                    self.unstepped += piece.last
                    self._engine.begin(share, piece, self._epoch)
                    yield batch
                    if loop != self._loops:
                        raise ConfigError(
                            "another loop over the prepared loader began before this one ended: finish or leave one"
                            " first"
                        )
                    self._engine.enter_loader()
                shares.replan()
                self._misses = misses + shares.misses
            self._done = ledger.iterations
        finally:
            if loop == self._loops:
                self._looping = False
                self._engine.leave_loop()
            # Left early or not: nothing may keep the data workers of this epoch alive.
            if loop == self._loops:
                self._requests.end()

    def _draw(self, *, resuming: bool) -> IntArray:
        """This epoch's order; a sampler of the user's own may not draw the same again, so its order is kept."""
        if resuming and self._drawn is not None:
            return self._drawn
        workers = self._engine.workers
        # Worker 0 draws from a sampler of the user's own, and the others wait for that.
        with self._balancer.activity.waiting() if workers.rank else nullcontext():
            order = self._order.draw(self._epoch, workers)
        self._drawn = None if self._order.sampler is None else order
        return order

    def _fetcher(self, shares: Shares, order: IntArray) -> InlineFetcher | ProcessFetcher:
        if self._inner is None:
            return InlineFetcher(self._source, self._order.seed, self._epoch, order)

        def chunk_size() -> int:
            return max(
                1, -(-int(self._balancer.planned_sizes()[self._engine.workers.rank]) // self._source.num_workers)
            )

        self._requests.begin(shares, self._epoch, order, chunk_size)
        collate = None if self._source.collate_fn is default_collate else self._source.collate_fn
        return ProcessFetcher(self._inner, self._requests, collate, self._source.pin_memory)

    def _adopt_sampler_epoch(self) -> None:
        """Heed `sampler.set_epoch`, which scripts for DistributedSampler call."""
        sampler = self._source.sampler
        if isinstance(sampler, DistributedSampler) and sampler.epoch != self._sampler_epoch:
            self.set_epoch(sampler.epoch)
            self._sampler_epoch = sampler.epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, at this point of the loop; resumes in mid-epoch, on any number of workers.

        Plain numbers, lists and strings. The state of any one worker serves all of them; under local SGD that holds
        between epochs and right after `settle`, and a warning says so elsewhere.
        """
        if self._engine.unsettled is not None:
            warnings.warn(self._engine.unsettled, stacklevel=2)
        return {
            "version": 1,
            "seed": self._order.seed,
            "epoch": self._epoch,
            "iteration": self._done,
            "looping": self._looping,
            "length": self._order.length,
            "global_batch_size": self._global_batch_size,
            "order": None if self._drawn is None else self._drawn.tolist(),
            "load": self._balancer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; the checkpoint's global batch size and seed win, with a notice.

        Where that was in the loop's last iteration, the next loop has no batch: what the script does between loops
        is still to be done.

        Raises:
            ConfigError: The state is of another dataset or version, or is damaged, or its global batch cannot be shared
                out here.
        """
        state = checked_state(state)
        if state["length"] != self._order.length:
            raise ConfigError(
                f"this loader state is of {state['length']} samples but the dataset gives {self._order.length}:"
                " resume with the dataset that it was taken on"
            )
        if state["global_batch_size"] != self._global_batch_size:
            self._balancer.set_global_batch_size(state["global_batch_size"])
            warnings.warn(
                f"the checkpoint's global batch size {state['global_batch_size']} replaces {self._global_batch_size}",
                stacklevel=2,
            )
            self._global_batch_size = state["global_batch_size"]
        if state["seed"] != self._order.seed:
            warnings.warn(f"the checkpoint's seed {state['seed']} replaces {self._order.seed}", stacklevel=2)
            self._reseed(state["seed"])
        self._load_speeds(state["load"])
        over = state["iteration"] >= len(self) and not state.get("looping", False)
        self._epoch, self._done = state["epoch"], state["iteration"]
        self._next_epoch = state["epoch"] + 1 if over else state["epoch"]
        self._resume = None if over else state["iteration"]
        self._drawn = None if over or state["order"] is None else np.array(state["order"], dtype=np.int64)

    def _load_speeds(self, state: dict[str, Any]) -> None:
        try:
            self._balancer.load_state_dict(state)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"what this loader state says of sizes and speeds is damaged ({type(error).__name__}: {error}): give"
                " what a loader's state_dict() returned"
            ) from error

    def _reseed(self, seed: int) -> None:
        self._order = replace(self._order, seed=seed)
        self._inner = inner_loader(self._source, seed, self._requests) if self._source.num_workers else None


def require_preparable(loader: object) -> DataLoader[Any]:
    """Check that the loader can be prepared, and return it as what it is.

    Raises:
        ConfigError: It is no map-style DataLoader with a batch size, or was prepared before.
    """
    if isinstance(loader, PreparedLoader):
        raise ConfigError("this loader was prepared already: call prepare once and use what it returned")
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"the loader must be a torch DataLoader, not {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "the loader's dataset is an IterableDataset, whose samples cannot be shared out: give a map-style one, or"
            " read its files through evenstep.ShardedDataset"
        )
    if loader.batch_size is None:
        raise ConfigError(
            "the loader has its own batch_sampler, or none: give batch_size (and a sampler, if you need one) instead"
        )
    if not isinstance(loader.batch_sampler, torch.utils.data.BatchSampler):
        raise ConfigError("the loader's batch_sampler was replaced: give batch_size and a sampler instead")
    return loader


def _number(name: str, value: object) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(f"note takes numbers and tensors of one element, not {shown(value)} for {name!r}") from None
