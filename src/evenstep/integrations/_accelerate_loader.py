"""Accelerate's loaders, which hand out evenstep's shares while a model trains."""

import copy
from collections.abc import Iterator, MutableMapping
from itertools import islice
from typing import Any, Final, final

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Share
from evenstep.torch.data.loader import PreparedLoader
from evenstep.torch.processes.workers import rows_of_all
from evenstep.worker.hand_outs import HandedOut

_IGNORED: Final = -100  # The label that cross_entropy ignores.


@final
class TrainingEpochs:
    """The training epochs of one loader, which all views of it share.

    Attributes:
        session: The session of the models that were prepared with the loader or before it.
        prepared: The session's loader; None before the first training loop.
        accumulation: How many batches of a worker make a step if sizes are numbers of them, or 1.
        number: The epoch of the next loop, as Accelerate counts them.
        trains: Whether every loop is for training, in any mode of the models.
        sampler: The sampler that Accelerate draws from; None if there is none.
    """

    def __init__(self, accelerator: Any, source: DataLoader[Any], plain: DataLoaderShard) -> None:
        self.accelerator = accelerator
        self.session = accelerator.session
        self.prepared: PreparedLoader | None = None
        self.accumulation = 1
        self.number = 0
        self.trains = False
        self._source = source
        given = plain.batch_sampler
        self._lists = given.batch_sampler if isinstance(given, BatchSamplerShard) else None
        self.sampler = getattr(self._lists, "sampler", None)
        self._state: dict[str, Any] | None = None
        self._gathered_in: HandedOut | None = None
        self._gathers = 0
        self._waiting: list[torch.Tensor] = []

    def shares(self) -> PreparedLoader:
        """The session's loader."""
        if self.prepared is None:
            self.accumulation = self.accelerator.accumulation_of(self)
            if self.accumulation > 1:
                self.session.accumulate(self.accumulation)
            self.prepared = self.session.loader(self._even_source())
        return self.prepared

    def begin(self, skip: int) -> PreparedLoader:
        """Return the session's loader; its next loop is the current epoch without the first `skip` batches."""
        shares, state, self._state = self.shares(), self._state, None
        if state is not None:
            if (saved := state.get("accumulation", 1)) != self.accumulation:
                raise ConfigError(
                    f"this checkpoint was saved with {saved} whole batches of a worker in a step, and the run has"
                    f" {self.accumulation}: resume with the gradient_accumulation_steps and whole_batches that it was"
                    " saved with (whole_batches=False for one where batches were divided)"
                )
            shares.load_state_dict(state["shares"])
            if skip and self.accumulation > 1:
                return shares  # The script may have counted its own worker's batches, and the state counts steps.
        shares.set_epoch(self.number)
        if skip or state is not None:
            shares.start_at(skip // self.accumulation)  # A script for Accelerate itself says where to continue.
        return shares

    @property
    def newest(self) -> Share:
        """This worker's part of the global batch that was handed out last."""
        newest = self.shares().newest
        assert newest is not None
        return newest

    @property
    def computed(self) -> HandedOut:
        """The batch that this worker computes."""
        now = self.shares().engine.hand_outs.in_hand
        assert now is not None
        return now

    def gather_in_steps(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all workers, which have different numbers of batches in a step; a scalar is a row.

        Rows of this worker come at once, those of all batches of the others with the last of this worker's.
        """
        engine, now = self.shares().engine, self.computed
        if now is not self._gathered_in:
            self._gathered_in, self._gathers = now, 0
            self._waiting = [] if now.piece.first else self._waiting
        rows = (rows if rows.ndim else rows[None]).detach()
        number, self._gathers = self._gathers, self._gathers + 1  # The script gathers the same values in each batch.
        own = torch.cat([*self._waiting[number : number + 1], rows])
        if not now.piece.last:
            self._waiting[number : number + 1] = [own]
            return rows
        with engine.meeting():
            parts = rows_of_all(engine.workers, own)
        parts[engine.workers.rank] = rows
        return torch.cat(parts)

    @property
    def batch_size(self) -> int | None:
        """The batch size of a worker; None if batches are lists of a sampler of the script, or leave samples out."""
        source = self._source
        if source.batch_size is None or self.sampler is None or source.drop_last:
            return None
        whole = self.accelerator.split_batches
        return source.batch_size // self.accelerator.num_processes if whole else source.batch_size

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        shares = self.shares().state_dict()
        over = shares["epoch"] == self.number and shares["iteration"] >= len(self.shares())
        generator = getattr(self.sampler, "generator", None)
        return {
            "epoch": self.number + over,
            "shares": shares,
            "accumulation": self.accumulation,
            "generator": None if generator is None else generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, with its speeds, its epoch and the order of that epoch."""
        self.number, self._state = state["epoch"], state
        generator = getattr(self.sampler, "generator", None)
        if generator is not None and state["generator"] is not None:
            generator.set_state(state["generator"])

    def _even_source(self) -> DataLoader[Any]:
        """The script's loader with the sample order and the global batches of Accelerate."""
        source, workers = copy.copy(self._source), self.accelerator.num_processes
        sampler, size, whole = self.sampler, source.batch_size, self.accelerator.split_batches
        changed: dict[str, Any] = {}
        if type(sampler) is RandomSampler:
            sampler = _Drawn(sampler, before_epochs=source.generator is sampler.generator)
        if size is not None and sampler is not None:
            size = size // workers if whole else size
            lists = BatchSampler(sampler, size, source.drop_last)
            changed = {"sampler": sampler, "batch_size": size, "batch_sampler": lists}
        elif self._lists is not None and type(self._lists) is not BatchSampler and not whole:
            changed = {"batch_sampler": _Joined(self._lists, workers)}
        vars(source).update(changed)
        return source


@final
class _Drawn(RandomSampler):
    """A subclass, so that evenstep lets worker 0 draw, from the sampler's generator, like Accelerate.

    `before_epochs`: the loader draws a number from the same generator before each epoch.
    """

    def __init__(self, sampler: RandomSampler, *, before_epochs: bool) -> None:
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples, sampler.generator)
        self._before_epochs = before_epochs

    def __iter__(self) -> Iterator[int]:
        if self._before_epochs:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return super().__iter__()


@final
class _Joined:
    """Joins one list of a batch sampler per process into a global batch; plain Accelerate gives each process one."""

    def __init__(self, lists: Any, workers: int) -> None:
        self.batch_sampler, self._workers = lists, workers
        longest = getattr(lists, "batch_size", None) or max(map(len, lists))
        self.batch_size = workers * longest

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // self._workers)

    def __iter__(self) -> Iterator[list[int]]:
        given = iter(self.batch_sampler)
        while some := list(islice(given, self._workers)):
            yield [index for each in some for index in each]


@final
class EvenLoader(DataLoaderShard):
    """Accelerate's loader, handing out evenstep's shares while a model trains.

    Attributes:
        epochs: The training epochs, shared by all views of the loader.
        trains: Whether the current loop is over evenstep's shares.
    """

    epochs: TrainingEpochs
    trains: bool
    _skipped: int

    @classmethod
    def of(cls, plain: DataLoaderShard, epochs: TrainingEpochs, skipped: int = 0) -> "EvenLoader":
        """Wrap a loader of Accelerate, with these epochs in training."""
        loader = cls.__new__(cls)
        loader.__dict__.update({name: value for name, value in plain.__dict__.items() if name != "iteration"})
        loader.epochs, loader.trains, loader._skipped = epochs, False, skipped
        return loader

    @property
    def iteration(self) -> int:
        """The epoch of the next loop, in training and in evaluation."""
        return self.epochs.number

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.epochs.number = epoch

    def __iter__(self) -> Iterator[Any]:
        accelerator = self.epochs.accelerator
        models = (accelerator.unwrap_model(each, keep_torch_compile=False) for each in accelerator._models)
        self.trains = self.epochs.trains or any(each.training for each in models)
        try:
            yield from self._shares() if self.trains else super().__iter__()
        finally:
            self.trains = False
            self.end()  # Also after a break, so that later steps are not attributed to this loop.

    def _shares(self) -> Iterator[Any]:
        self.begin()
        self.set_epoch(self.iteration)
        shares = self.epochs.begin(self._skipped)
        for batch in shares:
            share = self.epochs.newest
            self.end_of_dataloader = share.ends_epoch and share.last
            if not self.epochs.accelerator.weighs_by_samples:
                _ignore_copies(batch, share)
            yield batch if self.device is None else send_to_device(batch, self.device, non_blocking=self._non_blocking)
        self.iteration += 1


def _ignore_copies(batch: Any, share: Share) -> None:
    """Mask copies of samples in a batch, for a script that itself counts the divisor of its loss.

    The rows from `share.samples` on are copies; they have no weight where evenstep weighs by samples.
    """
    if share.sizes.all() and len(share.positions) == share.samples:
        return
    for name in ("labels", "shift_labels"):
        labels = batch.get(name) if isinstance(batch, MutableMapping) else None
        if isinstance(labels, torch.Tensor) and len(labels) == len(share.positions):
            batch[name] = labels.clone()  # The collator may have returned the inputs themselves as labels.
            batch[name][share.samples :] = _IGNORED
            return
    raise ConfigError(
        "the last global batch of the epoch has too few samples for all workers, so some get copies, which a script"
        " with weights='script' would count: set drop_last=True on the loader, or hand out batches with labels,"
        f" where those of copies are {_IGNORED} (see docs/integrations/accelerate.md)"
    )
