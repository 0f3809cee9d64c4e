"""Hugging Face Transformers: a `Trainer` whose workers share each global batch according to their speeds.

from evenstep.integrations.transformers import EvenstepTrainer, attach
"""

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self, final

import torch
import transformers
from transformers import trainer as trainers

from evenstep.core.errors import ConfigError
from evenstep.core.samples import whole_batches
from evenstep.integrations._accelerate_loader import EvenLoader, TrainingEpochs
from evenstep.integrations.accelerate import Accelerator

_PAGE: Final = "see docs/integrations/transformers.md"


class EvenstepTrainer(transformers.Trainer):
    """The `Trainer` of Transformers for workers of different speeds.

    It trains to the same weights as one process with the same global batch. The arguments are those of `Trainer`, and:

    Args:
        evenstep: Settings, like keyword arguments of `evenstep.Session`: `scheme`, `batch_sizes`, `seed`, `timeout`,
            `run_dir`, `emulate`. Omitted ones come from the environment. And `whole_batches`: with
            `gradient_accumulation_steps`, whether workers compute different numbers of batches for a step (True), or
            parts of each batch (False). Default: different numbers if these are finer, and no method of the trainer
            was overridden that may communicate or look into batches.

    Raises:
        ConfigError: The trainer is configured in a way that cannot work; on every worker, before any weight changes.
    """

    accelerator: Any
    _evenstep: dict[str, Any]
    _averages: bool
    _scaled = False
    _divisor: torch.Tensor | None = None
    _returns_mean = False
    _trained: EvenLoader | None = None
    _tr_loss: torch.Tensor

    def __init__(self, *args: Any, evenstep: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._evenstep = dict(evenstep or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Like `Trainer`'s, with evenstep's Accelerator."""
        super().create_accelerator_and_postprocess()
        self.adopt_accelerator()

    def adopt_accelerator(self) -> None:
        """Turn the trainer's Accelerator into evenstep's; for evenstep's own use."""
        self.accelerator = _Accelerator.of(self.accelerator, self, dict(self._evenstep))
        # A divisor that each worker computes alone would depend on its part of the batch.
        self._averages, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, True

    @property
    def divides_by_all(self) -> bool:
        """True if losses are divided by the tokens of all workers instead of those in a worker's batch."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        loader = self._trained
        if loader is None or loader.epochs.accumulation == 1:
            found = super().get_batch_samples(epoch_iterator, num_batches, device)
        else:
            batches, parts = list[Any](), list[float]()
            for batch in epoch_iterator:
                share = loader.epochs.newest
                batches.append(batch)
                parts.append(share.samples / int(share.sizes.sum()))
                if share.last:
                    break
            counted, items = super().get_batch_samples(iter(batches), len(batches), device)
            found = _places([*zip(counted, parts, strict=True)], num_batches), items
        self._scaled, (given, items) = False, found
        if isinstance(items, torch.Tensor):  # Autograd then knows whether a loss is divided by it.
            self._divisor = items.detach().requires_grad_(items.is_floating_point())
            items = self._divisor.clone()
        return given, items

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like `Trainer`'s, also for a place in a step that has several batches, or none."""
        if not isinstance(inputs, _Place):
            return super().training_step(model, inputs, *args, **kwargs)
        total = torch.zeros((), device=self.args.device)
        for batch, part in inputs:
            loss = super().training_step(model, batch, *args, **kwargs)
            # What is logged is the mean over workers of the sum over places: of a mean, each batch's part in it.
            places = self.current_gradient_accumulation_steps * self.accelerator.num_processes
            total = total + (loss if self.divides_by_all else loss * part * places)
        return total

    def compute_loss(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Like `Trainer`'s; a mean that a model of Transformers returns becomes what `Trainer` takes it for.

        Models such as `BertForSequenceClassification` take `num_items_in_batch` and do not use it. Their mean over the
        labels of a batch, times these labels' part in all workers', is the sum divided by `num_items_in_batch`.
        """
        labels, items = inputs.get("labels"), kwargs.get("num_items_in_batch")
        found = super().compute_loss(model, inputs, *args, **kwargs)
        loss, *outputs = found if isinstance(found, tuple) else (found,)
        if self._divisor is not None and loss.requires_grad and not self._returns_mean:
            own = self.loss_is_scaled_for_ga is not None or self.compute_loss_func is not None
            known = _without_adapters(self.model).__module__.startswith("transformers.models.")
            self._returns_mean = self._scaled and known and not own and not _depends(loss, self._divisor)
        if self._returns_mean and labels is not None and items is not None:
            own_items = labels.ne(-100).sum()  # None in copies of samples, whose mean is NaN.
            if not loss.requires_grad or _is_mean_over(own_items, loss):  # Otherwise `require_known_scale` refuses it.
                loss = torch.where(own_items > 0, loss * (own_items / items.double()).to(loss.dtype), 0.0)
        return (loss, *outputs) if outputs else loss

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Like `Trainer`'s, whose last loss is a worker's own part of it, not the mean over workers."""
        self._tr_loss = trainers.nested_gather(self._tr_loss, self.args.parallel_mode).mean()
        return super()._finalize_training(*args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Like `Trainer`'s, of all batches at a place in a step."""
        if not isinstance(inputs, _Place):
            return int(super().floating_point_ops(inputs))
        return sum(int(super(EvenstepTrainer, self).floating_point_ops(batch)) for batch, _ in inputs)

    def accumulation_of(self, epochs: TrainingEpochs, asked: bool | None) -> int:
        """The number of batches of a worker in a step if sizes are numbers of them, or 1."""
        steps, size, scheme = int(self.args.gradient_accumulation_steps), epochs.batch_size, epochs.session.scheme
        if steps == 1 or asked is False:
            return 1
        divided = (
            size is None
            or scheme is None
            or scheme.load.given_sizes is not None
            or self.args.include_num_input_tokens_seen not in (False, "no")
            or any(isinstance(each, torch.nn.SyncBatchNorm) for each in self.model.modules())
        )
        if asked and divided:
            raise ConfigError(
                "whole_batches=True does not go with batch_sizes, SyncBatchNorm, include_num_input_tokens_seen,"
                f" dataloader_drop_last or an own batch sampler: leave it out, and each batch is divided ({_PAGE})"
            )
        trl = sys.modules.get("trl.trainer.sft_trainer")  # Its trainers' methods only gather metrics.
        known = EvenstepTrainer.__mro__ if trl is None else (*EvenstepTrainer.__mro__, trl.SFTTrainer)
        own = [kind for kind in type(self).__mro__ if kind not in known]
        overridden = any(name in vars(kind) for kind in own for name in _LOOK_INTO_BATCHES)
        if size is None or divided or (not asked and (overridden or not whole_batches(size, steps))):
            return 1
        return steps

    def get_tp_size(self) -> int:
        """Like `Trainer`'s; `compute_loss` calls this where it divides by the tokens of all workers."""
        self._scaled = True
        return int(super().get_tp_size())

    def require_known_scale(self, loss: torch.Tensor) -> None:
        """Called before each backward: refuse a loss whose divisor cannot be known, or is not the one it was given."""
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
        if scaled and not own and self._divisor is not None and not _depends(loss, self._divisor):
            raise ConfigError(
                f"the loss of {type(self.model).__name__} does not depend on the num_items_in_batch that it is given,"
                " and Trainer takes it for a sum that was divided by this: let the model or compute_loss_func divide"
                " by it, set trainer.model_accepts_loss_kwargs = False for a model's mean over samples, or"
                f" loss_is_scaled_for_ga = True where a loss is divided by its item() ({_PAGE})"
            )

    def of_whole_steps(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it is in a whole step, from one that `Trainer` has divided by the batches of a short last one."""
        loader = self._trained
        if loader is None or loader.epochs.accumulation == 1 or self.divides_by_all:
            return loss
        return loss * (self.current_gradient_accumulation_steps / loader.epochs.accumulation)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if not self.accelerator._models:  # In a second training it is already wrapped.
            self.accelerator.prepare_model(model)
        return model, loader

    def _run_epoch(self, model: Any, epoch: int, train_dataloader: Any, **kwargs: Any) -> None:
        if isinstance(train_dataloader, EvenLoader):
            sampler = type(train_dataloader.epochs.sampler).__name__
            if sampler == "RepeatSampler" and self.accelerator.num_processes > 1:
                raise ConfigError(
                    f"{type(self).__name__} compares several completions of a prompt, at places that it expects in"
                    f" equal batches: train it without evenstep ({_PAGE})"
                )
            train_dataloader.epochs.trains = True  # The first batches are fetched before model.train() is called.
            train_dataloader.epochs.shares()  # The first step is fetched by what is decided here.
            self._trained = train_dataloader
        skip, trainers.skip_first_batches = trainers.skip_first_batches, self.accelerator.skip_first_batches
        try:
            super()._run_epoch(model=model, epoch=epoch, train_dataloader=train_dataloader, **kwargs)
        finally:
            trainers.skip_first_batches = skip

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Like `Trainer`'s; next to the loss, it logs batch sizes and the part of the time spent waiting."""
        if "loss" in logs and self._trained is not None:
            shares = self._trained.epochs.shares()
            logs["evenstep/smallest_batch"] = min(shares.batch_sizes)
            logs["evenstep/largest_batch"] = max(shares.batch_sizes)
            logs["evenstep/waiting"] = shares.statistics().waiting
        super().log(logs, *args, **kwargs)

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


@final
class _Place(list[tuple[Any, float]]):
    """The batches at one of the places that a trainer has for the batches of a step, each with its part of the step."""


def _places(batches: list[tuple[Any, float]], places: int) -> list[_Place]:
    """Divide a step's batches among the trainer's places, the last of which must not be empty."""
    if not batches:
        return []
    alone = min(places, len(batches)) - 1
    none = [_Place() for _ in range(places - 1 - alone)]
    return [*(_Place([each]) for each in batches[:alone]), *none, _Place(batches[alone:])]


def _without_adapters(model: torch.nn.Module) -> torch.nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _depends(loss: torch.Tensor, leaf: torch.Tensor) -> bool:
    """True if autograd computed the loss from this leaf; the divisor of a loss is close to it in the graph."""
    ahead, seen = deque([loss.grad_fn]), set[Any]()
    while ahead:
        if (node := ahead.popleft()) is None or node in seen:
            continue
        if getattr(node, "variable", None) is leaf:
            return True
        seen.add(node)
        ahead.extend(before for before, _ in node.next_functions)
    return False


def _is_mean_over(count: torch.Tensor, loss: torch.Tensor) -> bool:
    """True if a loss is PyTorch's mean over so many targets: not a sum, nor two losses, nor over fewer targets.

    A batch without targets is only copies. A compiled loss cannot be seen, and is taken for such a mean.
    """
    node, place = loss.grad_fn, loss.output_nr
    while node is not None and node.name() in ("MulBackward0", "ToCopyBackward0", "_DDPSinkBackward"):
        node, place = node.next_functions[place]
    if count == 0 or (node is not None and node.name() == "CompiledFunctionBackward"):
        return True
    if getattr(node, "_saved_reduction", None) != 1:
        return False
    weight = getattr(node, "_saved_total_weight", None)  # Of targets that are not ignored.
    return bool(count == (node._saved_self.numel() if weight is None else weight))  # type: ignore[union-attr]


_LOOK_INTO_BATCHES: Final = ("compute_loss", "training_step", "get_batch_samples", "floating_point_ops")
"""Methods that may read batches or communicate; overridden ones expect equal numbers of batches on all workers."""


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

    def accumulation_of(self, epochs: TrainingEpochs) -> int:
        """Like evenstep's Accelerator's, for a step of the trainer."""
        return self._trainer.accumulation_of(epochs, self._whole_batches)

    def _require_mean(self, *_: Any) -> None:
        """Do nothing: the trainer itself checks each loss."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if self.num_processes > 1:
            self._trainer.require_known_scale(loss)
            loss = self._trainer.of_whole_steps(loss)
        super().backward(loss, **kwargs)
