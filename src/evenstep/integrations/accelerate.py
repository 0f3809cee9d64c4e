"""Hugging Face Accelerate: an `Accelerator` whose training loaders hand out evenstep's shares.

from evenstep.integrations.accelerate import Accelerator
"""

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import accelerate
import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DDPCommunicationHookType, DistributedType, gather_object
from accelerate.utils.operations import recursively_apply
from accelerate.utils.other import save
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from evenstep.core.errors import ConfigError
from evenstep.integrations._accelerate_loader import EvenLoader, TrainingEpochs
from evenstep.torch.session import Session

_PAGE: Final = "see docs/integrations/accelerate.md"
_STATE: Final = "evenstep.bin"
_OPTIONS: Final = ("scheme", "batch_sizes", "seed", "timeout", "run_dir", "emulate", "weights", "whole_batches")
_PLUGINS: Final = {"deepspeed": "DeepSpeed", "fsdp": "FSDP", "megatron_lm": "Megatron-LM"}


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator` for workers of different speeds.

    `prepare` returns objects of Accelerate's own classes. While a prepared model is in training mode, a loop over a
    prepared loader gives this worker its share of each global batch, as the scheme decides; the global batch is the
    same as in plain Accelerate, and each sample counts once. While all models are in evaluation mode, and with one
    process, everything works as in plain Accelerate.

    The arguments are Accelerate's and, by keyword, these of `evenstep.Session`, which default to the environment:
    `scheme`, `batch_sizes`, `seed`, `timeout`, `run_dir`, `emulate`, `weights`.

    With `whole_batches=True` and `gradient_accumulation_steps`, workers compute different numbers of batches for a
    step, each of the loader's own size, instead of parts of each batch. Steps are then under
    `accelerator.accumulate(model)`, and `gather` where `accelerator.sync_gradients` is true; `gather_for_metrics` works
    in every batch.

    Attributes:
        session: The `evenstep.Session` of the objects prepared last, for `session.mean_over_workers(value, count)`.

    Raises:
        ConfigError: Accelerate is configured in a way that cannot work.
    """

    session: Session
    ddp_handler: Any
    _options: dict[str, Any]
    _guards: list[Any]
    _whole_batches: bool | None
    _sessions: list[Session]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options: dict[str, Any] = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        _require_no_plugin(kwargs)
        super().__init__(*args, **kwargs)
        self._open(options)

    def _open(self, options: dict[str, Any]) -> None:
        _require_no_plugin({})
        if self.distributed_type == DistributedType.XLA:
            raise ConfigError(f"evenstep does not train on TPUs: use plain Accelerate there ({_PAGE})")
        if self.dispatch_batches:
            raise ConfigError(
                "with dispatch_batches=True process 0 makes the batches of all, which are equal: leave it out, since"
                f" each worker fetches its own share ({_PAGE})"
            )
        if self.use_stateful_dataloader:
            raise ConfigError(
                "use_stateful_dataloader=True would resume loaders twice: leave it out, since save_state and load_state"
                f" keep what evenstep needs, and skip_first_batches goes on within an epoch ({_PAGE})"
            )
        self._whole_batches = options.pop("whole_batches", None)
        self._options, self._sessions, self._guards = options, [], []
        self._begin()
        self.register_save_state_pre_hook(lambda _models, _weights, folder: self.save_shares(folder))
        self.register_load_state_pre_hook(lambda _models, folder: self.load_shares(folder))

    def _begin(self) -> None:
        """Begin a new run, for objects that are prepared from now on."""
        self.session = Session(**self._options)
        self._sessions.append(self.session)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Like Accelerate's. After the first batch, another model or optimizer begins a separate run."""
        new = [each for each in args if not getattr(each, "_is_accelerate_prepared", False)]
        if self.session.started and any(isinstance(each, torch.nn.Module | torch.optim.Optimizer) for each in new):
            self._begin()
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Like Accelerate's; gradients are weighed by the samples of each worker."""
        handler, hook = self.ddp_handler, None
        if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
            hooks: list[Any] = []
            taker = SimpleNamespace(register_comm_hook=lambda state, hook: hooks.append((state, hook)))
            handler.register_comm_hook(taker)
            hook = hooks[0]
            self.ddp_handler = copy.copy(handler)
            self.ddp_handler.comm_hook = DDPCommunicationHookType.NO
        try:
            prepared = super().prepare_model(model, device_placement, evaluation_mode)
        finally:
            self.ddp_handler = handler
        replica = getattr(prepared, "_orig_mod", prepared)  # Under torch.compile's wrapper.
        if not evaluation_mode and isinstance(replica, DistributedDataParallel) and replica not in self.session:
            self.session.require_summing("Accelerate", _PAGE)
            self.session.model(replica, comm_hook=hook)
            self._guards.append(replica.register_forward_pre_hook(self._require_mean, with_kwargs=True))
        return prepared

    def _require_mean(self, _model: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """Called before forward passes: refuse a loss that the script itself divides if evenstep weighs it."""
        if kwargs.get("num_items_in_batch") is not None and self.weighs_by_samples and torch.is_grad_enabled():
            raise ConfigError(
                "the model is given num_items_in_batch, by which it divides its loss, and evenstep would weigh it once"
                f" more: write Accelerator(..., weights='script') if it counts what all processes have ({_PAGE})"
            )

    @property
    def weighs_by_samples(self) -> bool:
        """True if evenstep, and not the script, divides losses."""
        return bool(self._options.get("weights", "samples") == "samples")

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Like Accelerate's; a step is checked before any weight changes."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        own = prepared.optimizer
        if self.num_processes > 1 and own not in self.session:
            self._guards.append(own.register_step_pre_hook(self._require_share))
            self.session.optimizer(own)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Like Accelerate's, with this worker's share of each global batch while a model trains."""
        source = copy.copy(data_loader)
        plain = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        divided = isinstance(plain, EvenLoader | DataLoaderDispatcher) or isinstance(source.dataset, IterableDataset)
        if self.num_processes == 1 or divided:
            return plain
        self._dataloaders[-1] = EvenLoader.of(plain, TrainingEpochs(self, source, plain))
        return self._dataloaders[-1]

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Like Accelerate's. In training it skips global batches."""
        plain = super().skip_first_batches(dataloader, num_batches)
        return EvenLoader.of(plain, dataloader.epochs, num_batches) if isinstance(dataloader, EvenLoader) else plain

    def free_memory(self, *objects: Any) -> Any:
        """Like Accelerate's; ends the runs, so that another training can begin."""
        for session in self._sessions:
            session.close()
        for guard in self._guards:
            guard.remove()
        self._sessions, self._guards = [], []
        self._begin()
        return super().free_memory(*objects)

    def _require_share(self, *_: Any) -> None:
        """Called before a step: refuse a step on batches that Accelerate has divided equally."""
        loader = self.gradient_state.active_dataloader
        if self._trained is not None and not self._trained.epochs.newest.last:
            raise ConfigError(
                "the optimizer was stepped between two batches of a step, of which each worker has its own number:"
                f" step under `with accelerator.accumulate(model):`, or leave out whole_batches ({_PAGE})"
            )
        if loader is None or loader is self._trained:
            return
        if isinstance(loader.dataset, IterableDataset) or not isinstance(loader, EvenLoader):
            raise ConfigError(
                "the optimizer was stepped in a loop over an IterableDataset, or over a loader that the Accelerator has"
                " not prepared, whose samples cannot be divided unevenly: prepare a DataLoader of a map-style"
                f" dataset or of an evenstep.ShardedDataset, and use accelerator.skip_first_batches ({_PAGE})"
            )
        raise ConfigError(
            "the optimizer was stepped in a loop that began with all models in evaluation mode, where workers get"
            f" equal batches: call model.train() before the loop ({_PAGE})"
        )

    @property
    def _trained(self) -> EvenLoader | None:
        """The loader that the script currently trains on."""
        loader = self.gradient_state.active_dataloader
        return loader if isinstance(loader, EvenLoader) and loader.trains else None

    def accumulation_of(self, epochs: TrainingEpochs) -> int:
        """The number of batches of a worker in a step if sizes are numbers of them; 1 if each batch is divided.

        Raises:
            ConfigError: That was asked for, and these batches do not allow it.
        """
        steps = int(self.gradient_accumulation_steps)
        if not self._whole_batches or steps == 1:
            return 1
        if epochs.batch_size is None or not self.gradient_state.sync_with_dataloader:
            raise ConfigError(
                "whole_batches goes with loaders that have a batch_size and no drop_last, and steps at the end of an"
                f" epoch: leave it out, and each batch is divided ({_PAGE})"
            )
        return steps

    def _do_sync(self) -> None:
        loader = self._trained
        if loader is None or loader.epochs.accumulation == 1:
            super()._do_sync()
            return
        if loader.epochs.shares().engine.hand_outs.ahead:
            raise ConfigError(
                "the script fetches the batches of a step by itself, or computes no gradient of one, and workers have"
                f" different numbers of them: leave out whole_batches ({_PAGE})"
            )
        if int(self.gradient_accumulation_steps) != loader.epochs.accumulation:
            raise ConfigError(
                f"gradient_accumulation_steps is {self.gradient_accumulation_steps} now and was"
                f" {loader.epochs.accumulation}, by which whole_batches weighs gradients: leave it, or leave out"
                f" whole_batches ({_PAGE})"
            )
        self.gradient_state._set_sync_gradients(loader.epochs.newest.last)

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """Like Accelerate's. Between the batches of a step it only returns the norm of this process's gradient."""
        if self._gradient_is_whole:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None], norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: Any) -> None:
        """Like Accelerate's. It does nothing between the batches of a step."""
        if self._gradient_is_whole:
            super().clip_grad_value_(parameters, clip_value)

    @property
    def _gradient_is_whole(self) -> bool:
        return self._trained is None or self.sync_gradients

    def gather(self, tensor: Any) -> Any:
        """Like Accelerate's. While training, workers may have different numbers of rows."""
        if self._trained is None:
            return super().gather(tensor)
        return recursively_apply(self._trained.epochs.session.gather, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like Accelerate's. While training, the rows of each worker's own samples, in the order of the workers.

        With `whole_batches`, those of the other workers come with the last of this worker's batches of a step.
        """
        if (loader := self._trained) is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        epochs = loader.epochs
        share = epochs.shares().current if epochs.accumulation == 1 else epochs.computed.piece
        assert share is not None

        def of_own(values: Any) -> Any:  # Of no samples, a single value is dropped.
            if isinstance(values, torch.Tensor) and not values.ndim:
                return values[None][: share.samples]
            return values[: share.samples] if len(values) == len(share.positions) else values

        try:
            data = recursively_apply(of_own, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object, data = True, of_own(input_data)
        if use_gather_object:
            return gather_object(data)
        return self.gather(data) if epochs.accumulation == 1 else recursively_apply(epochs.gather_in_steps, data)

    def save_shares(self, folder: Any) -> None:
        """Write the state for `load_shares` into a checkpoint; called by `save_state`."""
        loaders = [(n, each) for n, each in enumerate(self._dataloaders) if isinstance(each, EvenLoader)]
        states = {n: each.epochs.state() for n, each in loaders if each.epochs.prepared is not None}
        if states:
            save(states, Path(folder) / _STATE, save_on_each_node=self.project_configuration.save_on_each_node)

    def load_shares(self, folder: Any) -> None:
        """Continue with the speeds, the epochs and their order in a checkpoint; called by `load_state`."""
        path = Path(folder) / _STATE
        states = torch.load(path, weights_only=True) if path.exists() else {}
        for number, each in enumerate(self._dataloaders):
            if number in states and isinstance(each, EvenLoader):
                each.epochs.restore(states[number])


def _require_no_plugin(given: dict[str, Any]) -> None:
    """Check that only DistributedDataParallel sums gradients; `given`: arguments of the Accelerator."""
    for name, shown in _PLUGINS.items():
        launched = os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"
        if launched or given.get(f"{name}_plugin") is not None or given.get(f"{name}_plugins") is not None:
            raise ConfigError(
                f"evenstep weighs the gradients of DistributedDataParallel, and Accelerate is configured for {shown}:"
                f" leave that out, or use evenstep without Accelerate ({_PAGE})"
            )
