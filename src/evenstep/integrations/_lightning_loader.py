"""The prepared loader as Lightning's Trainer sees it, and how whole batches of a worker are laid over its places."""

import copy
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final, final

import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    ThroughputMonitor,
)

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Share, whole_batches
from evenstep.schemes import Scheme
from evenstep.torch.data.loader import PreparedLoader

PAGE: Final = "(docs/integrations/lightning.md)"
_HOOKS: Final = ("on_train_batch_start", "on_train_batch_end")
"""Called at each place; those of a script may look into batches, which workers have unlike numbers of."""


@final
class TrainLoader:
    """The prepared loader as Lightning's Trainer sees it. The Trainer sets the epoch on its `sampler`.

    With `accumulation` batches of each worker in a step on average, the Trainer sees a step as so many places on every
    worker. A worker has one batch at each of the first places, none at some (a copy of its last batch stands there) if
    it has fewer batches, and all that are left at the last place, where the workers sum gradients. It continues from
    the `saved` state. The Trainer fetches from loaders without length before training starts.

    Attributes:
        prepared: The session's loader.
        accumulation: How many batches of a worker make a step if sizes are numbers of them, or 1.
        idle: Whether this worker has no batch at the current place.
        computes: Whether one of several batches of a step is computed.
    """

    def __init__(self, prepared: PreparedLoader, trainer: Any, accumulation: int, saved: dict[str, Any] | None) -> None:
        self.prepared, self._trainer, self._saved = prepared, trainer, saved
        self.accumulation, self.idle, self.computes = accumulation, False, False
        self._batches: Any = iter(())
        self._values: list[torch.Tensor] = []
        self._logged = 0

    def __iter__(self) -> Iterator[Any]:
        self.restore()
        if self.accumulation == 1:
            yield from self.prepared
            return
        with closing(iter(self.prepared)) as self._batches:  # type: ignore[type-var]
            for batch in self._batches:
                self.leave()
                for _ in range(self.place, self.accumulation - 1) if self.newest.last else ():
                    self.idle = True
                    yield copy.deepcopy(batch)  # Hooks may change it.
                self.idle = False
                yield batch

    def restore(self) -> None:
        """Continue from the saved state, once."""
        saved, self._saved = self._saved, None
        if saved is not None:
            self.prepared.load_state_dict(saved)

    def __len__(self) -> int:
        return len(self.prepared) * self.accumulation

    def __getattr__(self, name: str) -> Any:
        return getattr(self.prepared, name)

    @property
    def sampler(self) -> "TrainLoader":
        return self

    @property
    def place(self) -> int:
        """The number of places of the current step that are behind the Trainer."""
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready) % self.accumulation

    @property
    def newest(self) -> Share:
        """The batch that was handed out last."""
        assert self.prepared.newest is not None
        return self.prepared.newest

    def rest(self) -> Iterator[Any]:
        """The further batches at the current place, after its first."""
        while self.place == 0 and not self.newest.last:
            yield next(self._batches)

    def enter(self) -> None:
        """Note that a batch is computed, of which workers have unlike numbers.

        Raises:
            ConfigError: The Trainer counts other steps than before.
        """
        if (now := self._trainer.accumulate_grad_batches) != self.accumulation:
            raise ConfigError(
                f"accumulate_grad_batches is {now} now and was {self.accumulation}, by which gradients are weighed:"
                f" leave it, or set whole_batches=False {PAGE}"
            )
        self.prepared.engine.together, self.computes, self._logged = False, True, 0
        if self.newest.first:
            self._values = []

    def leave(self) -> None:
        """Note that the script computes no batch: all workers come to what follows equally often."""
        self.prepared.engine.together, self.computes = True, False
        self.prepared.engine.tracker.stopwatch.pause()

    def of_step(self, value: torch.Tensor, operation: str) -> torch.Tensor | None:
        """This worker's part of a value that is logged in each batch of a step; None before the last batch."""
        share, number = self.newest, self._logged  # In each batch the same values are logged in the same order.
        if operation == "mean":
            value = value * (share.samples / int(share.sizes.sum()))
        if number < len(self._values):
            joined = {"max": torch.maximum, "min": torch.minimum}.get(operation, torch.add)
            value = joined(self._values[number], value)
        self._values[number : number + 1] = [value]
        self._logged += 1
        return value if share.last else None

    def state_dict(self) -> dict[str, Any]:
        """The state, of the last step that is complete."""
        begun = self.accumulation > 1 and self.place > 0 and self.newest.last
        return {**self.prepared.state_before(int(begun)), "accumulation": self.accumulation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the strategy does this, because Lightning skips it in some cases."""


def accumulation_of(trainer: Any, loader: Any, scheme: Scheme | None, asked: bool | None) -> int:
    """The number of batches of a worker in a step if sizes are numbers of them; 1 if each batch is divided.

    Raises:
        ConfigError: `asked` says that they are, and this training does not allow it.
    """
    steps, module, limit = trainer.accumulate_grad_batches, trainer.lightning_module, trainer.limit_train_batches
    if steps == 1 or asked is False:
        return 1
    size = None if getattr(loader, "drop_last", True) else loader.batch_size
    changing = (GradientAccumulationScheduler, StochasticWeightAveraging, ThroughputMonitor)
    if (
        size is None
        or scheme is None
        or scheme.load.given_sizes is not None
        or (limit % steps if isinstance(limit, int) else limit != 1)
        or any(isinstance(each, changing) for each in trainer.callbacks)
        or any(isinstance(each, torch.nn.SyncBatchNorm) for each in trainer.strategy.model.modules())
    ):
        if asked:
            raise ConfigError(
                "whole_batches=True does not go with batch_sizes, SyncBatchNorm, drop_last, a"
                " batch sampler, a limit_train_batches that is not a multiple of accumulate_grad_batches,"
                " GradientAccumulationScheduler, StochasticWeightAveraging or ThroughputMonitor: leave it out, and each"
                f" batch is divided {PAGE}"
            )
        return 1
    parts = [module, trainer.datamodule, *trainer.callbacks]
    own = [kind for each in parts for kind in type(each).__mro__ if not kind.__module__.startswith("lightning.")]
    hooked = any(name in vars(kind) for kind in own for name in _HOOKS)
    return steps if asked or (not hooked and whole_batches(size, steps)) else 1
