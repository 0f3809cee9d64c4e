"""Lightning: `Trainer(strategy="evenstep")` and `Fabric(strategy="evenstep")`, once this module is imported.

    import evenstep.integrations.lightning

    trainer = Trainer(strategy="evenstep", devices=4)

docs/integrations/lightning.md describes the effect on common parts of Lightning scripts.
"""

import inspect
import os
from datetime import timedelta
from typing import Any, Final

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import IterableDataset

from evenstep.core.errors import ConfigError
from evenstep.integrations._lightning_loader import PAGE, TrainLoader, accumulation_of
from evenstep.schemes import Scheme
from evenstep.torch.data.loader import PreparedLoader
from evenstep.torch.model import is_sharded
from evenstep.torch.refusals import require_loader
from evenstep.torch.request import SessionOptions
from evenstep.torch.session import Session
from evenstep.worker.loader_state import read_state

_KEY: Final = "evenstep"  # The loader's state in Lightning's checkpoints.


class EvenstepStrategy(DDPStrategy):
    """Lightning's DDP strategy, with batch sizes that follow each worker's speed.

    Args:
        scheme: As in `evenstep.Session`.
        whole_batches: With `accumulate_grad_batches`, whether workers compute different numbers of batches for a step
            (True), or parts of each batch (False). Default: different numbers if these are finer, and neither the
            module nor a callback of the script has a hook that may look into batches.
        options: Options of `evenstep.Session`, with the same defaults except `seed`, from Lightning's
            `seed_everything`, and `empty`, which is "shrink" where workers share a dataset; and options of Lightning's
            DDPStrategy.

    Raises:
        ConfigError: From `Trainer.fit`: the scheme, the loader or the model cannot be trained on in Lightning.
    """

    def __init__(
        self, scheme: Scheme | str | None = None, *, whole_batches: bool | None = None, **options: Any
    ) -> None:
        if "accumulation" in options:
            raise ConfigError(f"accumulation is for Fabric: the Trainer has accumulate_grad_batches {PAGE}")
        self._asked, others = _options(scheme, options)
        super().__init__(**others)
        counts_batches = not self._asked.keys() & {"global_batch_size", "weights"}
        self._whole_batches = whole_batches if counts_batches or whole_batches is not None else False
        self._session: Session | None = None
        self._loader: TrainLoader | None = None
        self._saved: dict[str, Any] | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self.lightning_module.trainer
        self._loader = self._saved = None
        if trainer.state.fn == TrainerFn.FITTING:
            self._session = _session(self._asked)
            # Lightning would add a DistributedSampler to training loaders, and evenstep divides the user's own sampler.
            connector = trainer._data_connector
            requires = type(connector)._requires_distributed_sampler
            connector._requires_distributed_sampler = lambda each: not trainer.training and requires(connector, each)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Like Lightning's; a continued fit knows its global batch size from here on."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._saved = checkpoint.get(_KEY)
        if self._saved is not None and self._session is not None and self._loader is None:
            self._session = _session({**self._asked, "global_batch_size": read_state(self._saved).global_batch_size})
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Like Lightning's. The loader's state has a separate key, so that other strategies can load the rest."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if self._loader is not None and (states := loop.pop("combined_loader", None)):
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
        trainer, asked = self.lightning_module.trainer, self._whole_batches
        saved = None if self._saved is None else self._saved.get("accumulation", 1)
        asked = saved > 1 if asked is None and saved is not None else asked
        own = self._asked.get("partition") == "private" or isinstance(
            getattr(dataloader, "dataset", None), IterableDataset
        )
        accumulation = 1 if own else accumulation_of(trainer, dataloader, self._session.scheme, asked)
        if saved not in (None, accumulation):
            raise ConfigError(
                f"this checkpoint was saved with {saved} whole batches of a worker in a step, and the run has"
                f" {accumulation}: resume with the accumulate_grad_batches and whole_batches that it was saved with"
                f" (whole_batches=False for one where batches were divided) {PAGE}"
            )
        self._session.accumulate(accumulation)
        first = self._saved if self._loader is None else None
        self._loader = TrainLoader(_loader(self._session, dataloader), trainer, accumulation, first)
        return self._loader

    def on_train_start(self) -> None:
        fit_loop, loader = self.lightning_module.trainer.fit_loop, self._loader
        if (count := len(fit_loop._combined_loader.flattened)) > 1:
            raise ConfigError(
                f"this training has {count} loaders, and evenstep shares out the batches of one: give one loader over"
                f" a torch.utils.data.ConcatDataset or StackDataset {PAGE}"
            )
        if "dataloader_iter" in inspect.signature(self.lightning_module.training_step).parameters:
            raise ConfigError(
                "training_step takes dataloader_iter, so that evenstep cannot tell which batch it computes: take the"
                f" batch {PAGE}"
            )
        assert loader is not None
        loader.restore()
        # Where Lightning asks before each batch if one got a SIGTERM, the workers would wait for each other.
        asks = type(fit_loop.epoch_loop)._broadcast_sigterm_tensor
        fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: loader.place or asks(fit_loop.epoch_loop)
        begun = 0 < fit_loop.epoch_loop.batch_progress.current.ready < fit_loop.max_batches
        if self._saved is None and fit_loop.restarting and begun:
            raise ConfigError(
                "this checkpoint was saved in the middle of an epoch by another strategy, and does not say which"
                f" samples are left: continue from one of the end of an epoch {PAGE}"
            )

    # A place of the Trainer: the first batch in `training_step`, if there is one, and the others in `backward`.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like Lightning's; nothing is computed at a place for which this worker has no batch."""
        loader = self._loader
        if loader is not None:  # Lightning communicates before it if batches of a loader without length are ahead.
            loader.prepared.engine.loss_begins()
        if loader is None or loader.accumulation == 1:
            return super().training_step(*args, **kwargs)
        self._arguments = args[1:], kwargs
        if loader.idle:
            return torch.zeros((), device=self.root_device)
        loader.enter()
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like Lightning's, of all batches of this worker at a place; the first has had its `training_step`."""
        loader = self._loader
        if loader is None or loader.accumulation == 1:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if loader.idle:
            return closure_loss
        module, (further, named) = self.lightning_module, self._arguments
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        for batch in loader.rest():
            moved = module._on_before_batch_transfer(self.precision_plugin.convert_input(batch), dataloader_idx=0)
            moved = call._call_strategy_hook(module.trainer, "batch_to_device", moved, dataloader_idx=0)
            module.trainer._logger_connector.on_batch_start(moved)
            result = module.trainer.fit_loop.epoch_loop.automatic_optimization._training_step(
                dict(enumerate((moved, *further))) | named
            )
            super().backward(result.closure_loss, optimizer, *args, **kwargs)
        loader.leave()
        return loss

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._session is not None and not self.lightning_module.automatic_optimization:
            self._session.backward_begins(self.model)  # training_step may be inside no_sync since its forward pass.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Like Lightning's; means of values logged for a training batch are weighted by the workers' samples.

        A value that is logged in each of several batches of a step is reduced with the last one.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        operation = str(reduce_op).lower().replace("avg", "mean")
        if operation == "mean" and not tensor.is_floating_point():
            tensor = tensor.double()  # Lightning would truncate the mean of the workers' numbers of samples.
        if self._loader is not None and self._loader.computes:
            total = self._loader.of_step(tensor, operation)
            return tensor if total is None else super().reduce(total, group, operation.replace("mean", "sum"))
        if operation != "mean":
            return super().reduce(tensor, group, reduce_op)
        weight = self._weight_of_batch() if group is None else None
        if weight is None:
            return super().reduce(tensor, group, reduce_op)
        return super().reduce(tensor * weight if weight else torch.zeros_like(tensor), group, "sum")

    def _weight_of_batch(self) -> float | None:
        """This worker's part of the samples in the current training batch; None outside of batches."""
        if self._loader is None or not self.lightning_module.trainer.training:
            return None
        progress = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready == progress.completed or (share := self._loader.prepared.current) is None:
            return None
        return share.samples / int(share.sizes.sum())

    def on_exception(self, exception: BaseException) -> None:
        """Like Lightning's; for parameters without a gradient the error names this strategy, not DDPStrategy."""
        asked = f"write strategy=EvenstepStrategy(find_unused_parameters=True) {PAGE}"
        if "Expected to have finished reduction in the prior iteration" in str(exception):
            exception.args = (f"a backward left parameters out: freeze what is never used, or {asked}",)
        given = "give prepare DistributedDataParallel(model, find_unused_parameters=True)"
        exception.args = tuple(each.replace(given, asked) if isinstance(each, str) else each for each in exception.args)

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


def _options(scheme: Scheme | str | None, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options into those of the session and those of Lightning's strategy."""
    given = {name: options.pop(name) for name in SessionOptions.__annotations__.keys() & options.keys()}
    asked = {"scheme": scheme, "empty": None, **given}
    if asked.get("timeout") is not None:
        options["timeout"] = timedelta(seconds=asked["timeout"])
    return asked, options


def _session(asked: dict[str, Any]) -> Session:
    session = Session(**{"seed": int(os.environ.get("PL_GLOBAL_SEED", "0")), **asked})
    session.require_summing("Lightning", PAGE[1:-1])
    return session


def _require_whole(model: torch.nn.Module) -> None:
    if is_sharded(model):
        raise ConfigError(
            "fully_shard was applied to the model, which does not go with Lightning's DDP strategies: leave it out, or"
            f" write the loop with evenstep.prepare (docs/fsdp.md) {PAGE}"
        )


def _loader(session: Session, loader: Any) -> PreparedLoader:
    try:
        return session.loader(require_loader(loader, streams=True))
    except ConfigError as error:
        raise ConfigError(f"{error} {PAGE}") from None


StrategyRegistry.register("evenstep", EvenstepStrategy, override=True)
STRATEGY_REGISTRY.register("evenstep", EvenstepFabricStrategy, override=True)
