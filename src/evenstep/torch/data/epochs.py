"""A loader's progress: its epochs, the order of their samples, the current iteration, and the state to save."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast, final

from torch.utils.data import DataLoader

from evenstep.core.disagreement import Field, require_agreement
from evenstep.core.errors import ConfigError
from evenstep.core.samples import Drawn, Ledger
from evenstep.core.shown import shown
from evenstep.torch.data.order import EpochOrder, order_of
from evenstep.torch.engines.engine import Engine
from evenstep.torch.processes.workers import exchange
from evenstep.worker.loader_state import LoaderState, Progress, load_speeds
from evenstep.worker.tracker import Tracker

if TYPE_CHECKING:
    from evenstep.torch.agree import Terms
    from evenstep.torch.data.own_data import OwnEpochs

_MUST_AGREE: Final = {
    "length": Field(phrase="an epoch of {} samples", then="change the loader on every worker alike"),
    "batch": Field(phrase="a global batch of {}", then="change the loader on every worker alike"),
}


@final
class Epochs:
    """The epochs of one loader, on the terms that the workers agreed on.

    A script may change the loader between epochs (a dataset that grows, the batch size of its batch sampler); each
    epoch uses the loader as it is at that time.

    Attributes:
        at: The current epoch and iteration.
        order: Draws the order of an epoch's samples.
        global_batch_size: Samples in one iteration, over all workers.
        drawn: The samples of the last epoch that began; None before.
    """

    def __init__(self, terms: "Terms", source: DataLoader[Any], engine: Engine, at: Progress) -> None:
        self.at = at
        self._source = source
        self._engine = engine
        self.order = terms.order
        self.global_batch_size = terms.global_batch_size
        self.drawn: Drawn | None = None
        self._even = terms.even
        self._lengths = None if terms.lengths is None else list(terms.lengths)
        self._costs = terms.costs is not None
        self._sampler_epoch = self.order.sampling.epoch()
        if at.chosen:
            self.set_next(at.next_epoch)
        elif self._sampler_epoch is not None and self._sampler_epoch > 0:  # The script has set it before the start.
            at.set_next(self._sampler_epoch)
        self._ledger(self.order, self.global_batch_size, 0)

    def _length_of(self, order: EpochOrder) -> int:
        """Samples in an epoch, over all workers."""
        return order.length if self._lengths is None else sum(self._lengths)

    def iterations(self, parts: int = 1) -> int:
        """Iterations in an epoch, each cut into `parts`; for a batch sampler, the length or last count of its lists."""
        if self.order.sampling.lists and self.drawn is None:
            return len(self.order.sampling.sampler)
        order, size = self._present()
        return self._ledger(order, max(size // parts, 1), 0).iterations

    def set_next(self, epoch: int) -> None:
        """Make the next loop this epoch."""
        self.at.set_next(epoch)
        self.order.sampling.set_epoch(epoch)
        self._sampler_epoch = self.order.sampling.epoch()

    def begin(self, *, again: bool) -> tuple[Drawn, Ledger]:
        """Begin the next loop, on the last loop's epoch `again` if the script has not chosen one.

        A new `epoch` of the user's sampler counts as chosen. What the sampler draws is kept, as it may not draw the
        same again. Returns the order of the epoch, and its slices from the first iteration of the loop on.

        Raises:
            ConfigError: The sampler's draws, or the changed loader, cannot be trained on.
            DisagreementError: The workers changed their loaders, or draw from their samplers, in different ways.
        """
        epoch, workers = self.order.sampling.epoch(), self._engine.workers
        if epoch is not None and epoch != self._sampler_epoch:
            self.set_next(epoch)
        resuming = self.at.begin(again=again)
        if not resuming:
            self._follow()
        drawn = self.at.drawn if resuming else None
        if drawn is None:
            drawn = self.order.draw(self.at.epoch, workers, self._exchange)
            if self._even and drawn.shortest < workers.count:
                raise ConfigError(
                    f"the batch sampler gave a list of {drawn.shortest} samples for {workers.count} workers, and"
                    " empty='shrink' leaves none without samples: give longer lists, or leave out empty"
                )
            self.at.drawn = None if self.order.sampler is None else drawn
        self.drawn = drawn
        return drawn, self._ledger(self.order, self.global_batch_size, self.at.done)

    def _present(self) -> tuple[EpochOrder, int]:
        """The order and the global batch size of the loader as it is now."""
        workers = self._engine.workers
        order = replace(order_of(self._source, workers, self.order.seed), seed=self.order.seed)
        before, now = (each.sampling.global_batch_size(workers.count) for each in (self.order, order))
        return order, now if now is not None and before == self.global_batch_size else self.global_batch_size

    def _exchange(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        with self._engine.meeting():
            return exchange(self._engine.workers, record)

    def _follow(self) -> None:
        """Adopt the loader as it is now, after agreement between all workers."""
        order, size = self._present()
        workers, changed = self._engine.workers, (order.length, size) != (self.order.length, self.global_batch_size)
        if workers.host_group is not None and self._lengths is None:
            require_agreement(self._exchange({"length": order.length, "batch": size}), _MUST_AGREE)
        if changed and (self._costs or self._lengths is not None or workers.meet is not None):
            raise ConfigError(
                f"the loader has {order.length} samples in global batches of {size} now, where it had"
                f" {self.order.length} in batches of {self.global_batch_size}, which parameter servers, cost= and"
                ' partition="private" do not follow: prepare a new one'
            )
        if size != self.global_batch_size:
            self._engine.tracker.set_global_batch_size(size)
        self.order, self.global_batch_size = order, size

    def _ledger(self, order: EpochOrder, global_batch_size: int, iteration: int) -> Ledger:
        ends = None if self.drawn is None else self.drawn.ends
        return Ledger(
            length=self._length_of(order) if ends is None else int(ends[-1]),
            global_batch_size=global_batch_size,
            drop_last=order.sampling.drop_last,
            iteration=iteration,
            ends=ends,
            even=self._even,
        )

    def state(self, done: int, tracker: Tracker) -> LoaderState:
        """The state after `done` iterations of the epoch."""
        drawn = self.at.drawn
        return LoaderState(
            seed=self.order.seed,
            epoch=self.at.epoch,
            iteration=done,
            looping=self.at.looping,
            length=self._length_of(self.order),
            lengths=self._lengths,
            global_batch_size=self.global_batch_size,
            order=None if drawn is None else cast("Any", drawn.indices).tolist(),
            ends=None if drawn is None or drawn.ends is None else drawn.ends.tolist(),
            load=tracker.state_dict(),
        )

    def restore(self, saved: LoaderState, tracker: Tracker) -> None:
        """Continue from a state. Its global batch size and seed win, with a warning.

        Raises:
            ConfigError: It is of another dataset, or its global batch size cannot be divided among these workers.
        """
        self.order, _ = self._present()
        if saved.lengths != self._lengths:
            raise ConfigError(
                f"this loader state is of {_described(saved.lengths)} but the run has {_described(self._lengths)}:"
                " resume with the partition, the workers and the datasets that it was taken on"
            )
        if saved.taken is not None or saved.length != self._length_of(self.order):
            raise ConfigError(
                f"this loader state is of {saved.length} samples but the dataset gives {self._length_of(self.order)}:"
                " resume with the dataset that it was taken on"
            )
        adopt(self, saved, tracker)
        self.at.restore(saved, self.iterations() if saved.ends is None else len(saved.ends))


def adopt(epochs: "Epochs | OwnEpochs", saved: LoaderState, tracker: Tracker) -> None:
    """Continue with the global batch size and the seed of a state, with a warning if they are others, and its speeds.

    Raises:
        ConfigError: Its global batch size cannot be divided among these workers.
    """
    if saved.global_batch_size != epochs.global_batch_size:
        tracker.set_global_batch_size(saved.global_batch_size)
        _warn(f"global batch size {saved.global_batch_size}", epochs.global_batch_size)
        epochs.global_batch_size = saved.global_batch_size
    if saved.seed != epochs.order.seed:
        _warn(f"seed {saved.seed}", epochs.order.seed)
        epochs.order = replace(epochs.order, seed=saved.seed)
    load_speeds(tracker, saved.load)


def _described(lengths: list[int] | None) -> str:
    return "a common dataset" if lengths is None else f"private datasets of {shown(lengths)} samples"


def _warn(saved: str, replaced: Any) -> None:
    warnings.warn(f"the checkpoint's {saved} replaces {replaced}", stacklevel=5)
