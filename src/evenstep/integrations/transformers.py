"""Hugging Face Transformers: a `Trainer` whose workers share each global batch according to their speeds.

from evenstep.integrations.transformers import EvenstepTrainer, attach
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

import torch
import transformers
from transformers import trainer as trainers

from evenstep.core.errors import ConfigError
from evenstep.integrations._accelerate_loader import EvenLoader
from evenstep.integrations.accelerate import Accelerator

_PAGE: Final = "see docs/integrations/transformers.md"


class EvenstepTrainer(transformers.Trainer):
    """The `Trainer` of Transformers for workers of different speeds.

    It trains to the same weights as one process with the same global batch. The arguments are those of `Trainer`, and:

    Args:
        evenstep: Settings, like keyword arguments of `evenstep.Session`: `scheme`, `batch_sizes`, `seed`, `timeout`,
            `run_dir`, `emulate`. Omitted ones come from the environment.

    Raises:
        ConfigError: The trainer is configured in a way that cannot work; on every worker, before any weight changes.
    """

    accelerator: Any
    _evenstep: dict[str, Any]
    _averages: bool
    _scaled = False
    _trained: EvenLoader | None = None

    def __init__(self, *args: Any, evenstep: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._evenstep = dict(evenstep or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Like `Trainer`'s, with evenstep's Accelerator."""
        super().create_accelerator_and_postprocess()
        self.adopt_accelerator()

    def adopt_accelerator(self) -> None:
        """Turn the trainer's Accelerator into evenstep's; for evenstep's own use."""
        self.accelerator = _Accelerator.of(self.accelerator, self, self._evenstep)
        # A divisor that each worker computes alone would depend on its part of the batch.
        self._averages, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, True

    # The divisor of a loss.

    @property
    def divides_by_all(self) -> bool:
        """True if losses are divided by the tokens of all workers instead of those in a worker's batch."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Like `Trainer`'s."""
        found = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._scaled = False
        return found

    def get_tp_size(self) -> int:
        """Like `Trainer`'s; `compute_loss` calls this where it divides by the tokens of all workers."""
        self._scaled = True
        return int(super().get_tp_size())

    def require_known_scale(self) -> None:
        """Called before each backward: refuse a loss whose divisor cannot be known."""
        scaled, self._scaled = self._scaled, False
        own = bool(self.loss_is_scaled_for_ga) and self._averages
        if scaled if not self.divides_by_all else not (scaled or own):
            raise ConfigError(
                f"whether the loss of {type(self).__name__} is a mean over its batch or is divided by the"
                " num_items_in_batch of all workers cannot be known, since its compute_loss does not pass the latter to"
                " Trainer.compute_loss, or batches have no labels: set loss_is_scaled_for_ga = False on the trainer for"
                " a mean, or True (with average_tokens_across_devices) for a loss that is divided and multiplied by"
                f" the number of processes ({_PAGE})"
            )

    # Training.

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if not self.accelerator._models:  # In a second training it is already wrapped.
            self.accelerator.prepare_model(model)
        return model, loader

    def _run_epoch(self, model: Any, epoch: int, train_dataloader: Any, **kwargs: Any) -> None:
        if isinstance(train_dataloader, EvenLoader):
            self._require_single(train_dataloader.epochs.sampler)
            train_dataloader.epochs.trains = True  # The first batches are fetched before model.train() is called.
            self._trained = train_dataloader
        skip, trainers.skip_first_batches = trainers.skip_first_batches, self.accelerator.skip_first_batches
        try:
            super()._run_epoch(model=model, epoch=epoch, train_dataloader=train_dataloader, **kwargs)
        finally:
            trainers.skip_first_batches = skip

    def _require_single(self, sampler: Any) -> None:
        """Check that no samples need to stay together on a worker."""
        if type(sampler).__name__ == "RepeatSampler" and self.accelerator.num_processes > 1:
            raise ConfigError(
                f"{type(self).__name__} compares several completions of a prompt, at places that it expects in equal"
                f" batches: train it without evenstep ({_PAGE})"
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Like `Trainer`'s; next to the loss, it logs batch sizes and the part of the time spent waiting."""
        if "loss" in logs and self._trained is not None:
            shares = self._trained.epochs.shares()
            logs["evenstep/smallest_batch"] = min(shares.batch_sizes)
            logs["evenstep/largest_batch"] = max(shares.batch_sizes)
            logs["evenstep/waiting"] = shares.statistics().waiting
        super().log(logs, *args, **kwargs)

    # Checkpoints.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.accelerator.save_shares(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.accelerator.load_shares(checkpoint)


def attach(trainer: Any, **options: Any) -> Any:
    """Make an existing trainer, such as one of TRL's, train like an `EvenstepTrainer`; call it before `train`.

    Args:
        trainer: A `transformers.Trainer`, of any subclass.
        options: Settings, as for `EvenstepTrainer`.

    Returns:
        The same trainer.

    Raises:
        ConfigError: It is not a trainer, or was attached already.
    """
    kind = type(trainer)
    if not isinstance(trainer, transformers.Trainer) or isinstance(trainer, EvenstepTrainer):
        raise ConfigError(f"attach takes a transformers.Trainer that is not evenstep's already, not a {kind.__name__}")
    trainer.__class__ = type(kind.__name__, (EvenstepTrainer, kind), {"__module__": kind.__module__})
    trainer._evenstep = options
    trainer.adopt_accelerator()
    return trainer


class _Accelerator(Accelerator):
    """The Accelerator of a trainer."""

    _trainer: EvenstepTrainer

    @classmethod
    def of(cls, accelerator: Any, trainer: EvenstepTrainer, options: dict[str, Any]) -> Self:
        """Convert the trainer's Accelerator in place, because the trainer refers to it in other places."""
        accelerator.__class__, accelerator._trainer = cls, trainer
        accelerator._open(options)
        return accelerator

    def free_memory(self, *objects: Any) -> Any:
        """Like Accelerate's. A trainer calls it before each training."""
        self._options = {**self._options, "weights": "script" if self._trainer.divides_by_all else "samples"}
        return super().free_memory(*objects)

    def _require_mean(self, *_: Any) -> None:
        """Do nothing: the trainer itself checks each loss."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Like Accelerate's."""
        if self.num_processes > 1:
            self._trainer.require_known_scale()
        super().backward(loss, **kwargs)
