"""Lightning: `Trainer(strategy="evenstep")` and `Fabric(strategy="evenstep")`, once this module is imported.

    import evenstep.integrations.lightning

    trainer = Trainer(strategy="evenstep", devices=4)

docs/integrations/lightning.md describes the effect on common parts of Lightning scripts.
"""

import inspect
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final, final

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from evenstep.core.errors import ConfigError
from evenstep.schemes import Scheme
from evenstep.torch.data.loader import PreparedLoader
from evenstep.torch.model import is_sharded
from evenstep.torch.refusals import require_loader
from evenstep.torch.request import SessionOptions
from evenstep.torch.session import Session
from evenstep.worker.loader_state import read_state

_PAGE: Final = "(docs/integrations/lightning.md)"
_KEY: Final = "evenstep"  # The loader's state in Lightning's checkpoints.


class EvenstepStrategy(DDPStrategy):
    """Lightning's DDP strategy, with batch sizes that follow each worker's speed.

    Args:
        scheme: As in `evenstep.Session`.
        options: Options of `evenstep.Session`, with the same defaults except `seed`, from Lightning's
            `seed_everything`, and `empty`, which is "shrink" where workers share a dataset; and options of Lightning's
            DDPStrategy.

    Raises:
        ConfigError: From `Trainer.fit`: the scheme, the loader or the model cannot be trained on in Lightning.
    """

    def __init__(self, scheme: Scheme | str | None = None, **options: Any) -> None:
        self._asked, others = _options(scheme, options)
        super().__init__(**others)
        self._session: Session | None = None
        self._prepared: PreparedLoader | None = None
        self._loader: _TrainLoader | None = None
        self._saved: dict[str, Any] | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self.lightning_module.trainer
        self._prepared = self._saved = None
        if trainer.state.fn == TrainerFn.FITTING:
            self._session = _session(self._asked)
            _keep_training_samplers(trainer)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Like Lightning's; a continued fit knows its global batch size from here on."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._saved = checkpoint.get(_KEY)
        if self._saved is not None and self._session is not None and self._prepared is None:
            self._session = _session({**self._asked, "global_batch_size": read_state(self._saved).global_batch_size})
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Like Lightning's. The loader's state has a separate key, so that other strategies can load the rest."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if self._prepared is not None and (states := loop.pop("combined_loader", None)):
            checkpoint[_KEY] = states[0]
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def configure_ddp(self) -> None:
        _require_whole(self.model)
        super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        """Called by Lightning once the model is in DistributedDataParallel, whose only hook is evenstep's."""
        assert self._session is not None
        hook, wrap = self._ddp_comm_hook, self._ddp_comm_wrapper
        given = None if hook is None else (self._ddp_comm_state, hook if wrap is None else wrap(hook))
        self._session.model(self.model, comm_hook=given)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        assert self._session is not None
        for optimizer in self.optimizers:
            self._session.optimizer(optimizer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make a training loader hand out this worker's batches; other loaders stay as they are."""
        if self._session is None or not self.lightning_module.trainer.training:
            return dataloader
        saved = self._saved if self._prepared is None else None
        self._prepared = _loader(self._session, dataloader)
        self._loader = _TrainLoader(self._prepared, saved)
        return self._loader

    def on_train_start(self) -> None:
        fit_loop = self.lightning_module.trainer.fit_loop
        if (count := len(fit_loop._combined_loader.flattened)) > 1:
            raise ConfigError(
                f"this training has {count} loaders, and evenstep shares out the batches of one: give one loader over"
                f" a torch.utils.data.ConcatDataset or StackDataset {_PAGE}"
            )
        if "dataloader_iter" in inspect.signature(self.lightning_module.training_step).parameters:
            raise ConfigError(
                "training_step takes dataloader_iter, so that evenstep cannot tell which batch it computes: take the"
                f" batch {_PAGE}"
            )
        assert self._loader is not None
        self._loader.restore()
        begun = 0 < fit_loop.epoch_loop.batch_progress.current.ready < fit_loop.max_batches
        if self._saved is None and fit_loop.restarting and begun:
            raise ConfigError(
                "this checkpoint was saved in the middle of an epoch by another strategy, and does not say which"
                f" samples are left: continue from one of the end of an epoch {_PAGE}"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like Lightning's, which communicates before it where batches of a loader without length are fetched ahead."""
        if self._prepared is not None:
            self._prepared.engine.loss_begins()
        return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._session is not None and not self.lightning_module.automatic_optimization:
            self._session.backward_begins(self.model)  # training_step may be inside no_sync since its forward pass.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Like Lightning's; means of values logged for a training batch are weighted by the workers' samples."""
        if not isinstance(tensor, torch.Tensor) or str(reduce_op).lower() not in ("mean", "avg"):
            return super().reduce(tensor, group, reduce_op)
        if not tensor.is_floating_point():
            tensor = tensor.double()  # Lightning would truncate the mean of the workers' numbers of samples.
        weight = self._weight_of_batch() if group is None else None
        if weight is None:
            return super().reduce(tensor, group, reduce_op)
        return super().reduce(tensor * weight if weight else torch.zeros_like(tensor), group, "sum")

    def _weight_of_batch(self) -> float | None:
        """This worker's part of the samples in the current training batch; None outside of batches."""
        if self._prepared is None or not self.lightning_module.trainer.training:
            return None
        progress = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready == progress.completed or (share := self._prepared.current) is None:
            return None
        return share.samples / int(share.sizes.sum())

    def teardown(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None
        super().teardown()


class EvenstepFabricStrategy(FabricDDPStrategy):
    """Fabric's DDP strategy, with batch sizes that follow each worker's speed; arguments as for `EvenstepStrategy`."""

    def __init__(self, scheme: Scheme | str | None = None, **options: Any) -> None:
        self._asked, others = _options(scheme, options)
        super().__init__(**others)
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        """The session of the objects set up, for `mean_over_workers` and `close`; once closed, a new one."""
        if self._session is None or self._session.closed:
            self._session = _session(self._asked)
        return self._session

    @property
    def distributed_sampler_kwargs(self) -> None:
        """None, so that Fabric keeps the user's samplers."""

    def setup_module(self, module: Any) -> Any:
        _require_whole(module)
        return self.session.model(super().setup_module(module))

    def setup_optimizer(self, optimizer: Any) -> Any:
        return self.session.optimizer(optimizer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make every loader that is set up hand out this worker's batches."""
        return _loader(self.session, dataloader)


@final
class _TrainLoader:
    """The prepared loader as Lightning's Trainer sees it. The Trainer sets the epoch on its `sampler`.

    It continues from the `saved` state. The Trainer fetches from loaders without length before training starts.
    """

    def __init__(self, prepared: PreparedLoader, saved: dict[str, Any] | None) -> None:
        self._prepared = prepared
        self._saved = saved

    def __iter__(self) -> Iterator[Any]:
        self.restore()
        yield from self._prepared

    def restore(self) -> None:
        """Continue from the saved state, once."""
        saved, self._saved = self._saved, None
        if saved is not None:
            self._prepared.load_state_dict(saved)

    def __len__(self) -> int:
        return len(self._prepared)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared, name)

    @property
    def sampler(self) -> "_TrainLoader":
        return self

    def state_dict(self) -> dict[str, Any]:
        return self._prepared.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the strategy does this, because Lightning skips it in some cases."""


def _options(scheme: Scheme | str | None, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options into those of the session and those of Lightning's strategy."""
    given = {name: options.pop(name) for name in SessionOptions.__annotations__.keys() & options.keys()}
    asked = {"scheme": scheme, "empty": None, **given}
    if asked.get("timeout") is not None:
        options["timeout"] = timedelta(seconds=asked["timeout"])
    return asked, options


def _session(asked: dict[str, Any]) -> Session:
    session = Session(**{"seed": int(os.environ.get("PL_GLOBAL_SEED", "0")), **asked})
    session.require_summing("Lightning", _PAGE[1:-1])
    return session


def _require_whole(model: torch.nn.Module) -> None:
    if is_sharded(model):
        raise ConfigError(
            "fully_shard was applied to the model, which does not go with Lightning's DDP strategies: leave it out, or"
            f" write the loop with evenstep.prepare (docs/fsdp.md) {_PAGE}"
        )


def _loader(session: Session, loader: Any) -> PreparedLoader:
    try:
        return session.loader(require_loader(loader, streams=True))
    except ConfigError as error:
        raise ConfigError(f"{error} {_PAGE}") from None


def _keep_training_samplers(trainer: Any) -> None:
    """Keep Lightning from adding a DistributedSampler to training loaders: evenstep divides the user's own sampler."""
    connector = trainer._data_connector
    requires = type(connector)._requires_distributed_sampler
    connector._requires_distributed_sampler = lambda loader: not trainer.training and requires(connector, loader)


StrategyRegistry.register("evenstep", EvenstepStrategy, override=True)
STRATEGY_REGISTRY.register("evenstep", EvenstepFabricStrategy, override=True)
