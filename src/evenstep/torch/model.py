"""The model that comes back from `prepare`: one wrapper, whatever the scheme and the number of workers."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, final

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from evenstep.core.errors import ConfigError
from evenstep.launch.c10d import GradBucket
from evenstep.torch.compiled import is_compiled, mark_dynamic
from evenstep.torch.engines.collective import CollectiveEngine, CommHook
from evenstep.torch.engines.engine import Engine
from evenstep.torch.processes.workers import Workers

_PREPARED = "_evenstep_prepared"
_FOREIGN = ("FullyShardedDataParallel", "ReplicateModule", "DeepSpeedEngine")


@final
class PreparedModel(torch.nn.Module):
    """Calls the user's model so that its gradients are synchronised; `module` is the user's own.

    Its `state_dict` has DistributedDataParallel's keys (`module.` before each), with one worker too.
    """

    module: torch.nn.Module

    def __init__(
        self,
        module: torch.nn.Module,
        replica: DistributedDataParallel | None,
        engine: Engine,
        index: int,
        accumulating: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.module = module
        # Kept out of the registry of submodules: the state dict must hold the parameters once.
        object.__setattr__(self, "_replica", replica)
        object.__setattr__(self, "_engine", engine)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_accumulating", accumulating)
        object.__setattr__(self, "_compiled", is_compiled(module))
        self.training = module.training

    _replica: DistributedDataParallel | None
    _engine: Engine | None
    _index: int
    _accumulating: Callable[[], bool] | None
    _compiled: bool

    def __getstate__(self) -> dict[str, Any]:
        """A copy (an average of the weights, a saved model) is the user's model alone: it synchronises nothing."""
        return {**self.__dict__, "_replica": None, "_engine": None, "_accumulating": None}

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's model's output."""
        if self._engine is None or not torch.is_grad_enabled():
            # Nothing that the other workers would have to take part in: one of them may evaluate alone.
            return self.module(*args, **kwargs)
        waits = self._begins(args, kwargs)
        outputs = self._computed(waits, args, kwargs)
        self._ends(outputs)
        return outputs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether backward waits for further micro-batches."""
        assert self._engine is not None
        now = self._engine.balancer.iteration
        if self._compiled and now is not None:
            mark_dynamic((args, kwargs), length=len(now.piece.positions))
        waits = not self._engine.synchronises
        self._engine.forward_begins(self._index, synchronises=self.require_backward_grad_sync and not waits)
        return waits

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ends(self, outputs: object) -> None:
        assert self._engine is not None
        self._engine.forward_ends(outputs)

    def _computed(self, waits: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._replica is None:
            return self.module(*args, **kwargs)
        with self._replica.no_sync() if waits else nullcontext():
            return self._replica(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """As `torch.nn.Module.train`."""
        super().train(mode)
        if self._replica is not None:
            self._replica.train(mode)  # type: ignore[no-untyped-call]
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.nn.Module.zero_grad`; does nothing while gradients wait for more micro-batches and a step."""
        if self._accumulating is None or not self._accumulating():
            super().zero_grad(set_to_none=set_to_none)

    @property
    def require_backward_grad_sync(self) -> bool:
        """As `DistributedDataParallel`'s, for scripts that set it instead of using `no_sync`."""
        return self._replica is None or self._replica.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        if self._replica is not None:
            self._replica.require_backward_grad_sync = wanted

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "module" and hasattr(self.module, name):
                raise AttributeError(
                    f"{name!r} is an attribute of your own model: write model.module.{name} (a forward pass is"
                    " synchronised through model(...) alone)"
                ) from None
            raise

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward accumulates local gradients only; as `DistributedDataParallel.no_sync`."""
        return nullcontext() if self._replica is None else self._replica.no_sync()

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Not possible: evenstep's own hook weighs the gradients.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "evenstep uses the model's communication hook itself: give yours as prepare(..., comm_hook=(state, hook))"
        )


def require_preparable(model: torch.nn.Module, workers: Workers) -> None:
    """Check that the model can be prepared.

    Raises:
        ConfigError: It was prepared before, is wrapped in a way that cannot work, or has nothing to train.
    """
    if isinstance(model, PreparedModel):
        raise ConfigError("this model was prepared already: call prepare once and use what it returned")
    _require_known_wrapper(model, workers)
    if isinstance(model, DistributedDataParallel):
        if workers.count == 1 and workers.host_group is None and not torch.distributed.is_initialized():
            raise ConfigError("the model is wrapped in DistributedDataParallel but no process group is initialised")
        if isinstance(model.module, PreparedModel):
            raise ConfigError(
                "the model was prepared and then wrapped: pass what prepare returned to the loop as it is"
            )
    _require_ready_layers(model)
    module = model.module if isinstance(model, DistributedDataParallel) else model
    # The mark is the module's own identity, so that a deep copy of a prepared model is a new one.
    if module.__dict__.get(_PREPARED) == id(module):
        raise ConfigError("this model was prepared already: call prepare once and use what it returned")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to train")


def _require_known_wrapper(model: torch.nn.Module, workers: Workers) -> None:
    if isinstance(model, torch.nn.DataParallel):
        raise ConfigError("the model is wrapped in DataParallel: pass the plain model, one process per device")
    foreign = next((name for each in model.modules() if (name := type(each).__name__) in _FOREIGN), None)
    if foreign is not None:
        raise ConfigError(
            f"the model is wrapped by {foreign}, whose gradients evenstep cannot weigh: pass the plain model, or shard"
            " it with torch.distributed.fsdp.fully_shard"
        )
    if is_sharded(model):
        from evenstep.torch.engines.sharded import require_shardable

        require_shardable(model, workers)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2's `fully_shard` was applied to it, or to anything in it."""
    # Whoever has sharded a model has imported this, which takes a second that nobody else need wait.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in model.modules())


def _require_ready_layers(model: torch.nn.Module) -> None:
    if device_of(model).type == "cpu" and any(isinstance(each, torch.nn.SyncBatchNorm) for each in model.modules()):
        raise ConfigError(
            "the model has SyncBatchNorm, which works on GPUs alone: on the CPU leave BatchNorm as it is, or use"
            " GroupNorm"
        )
    if any(isinstance(parameter, torch.nn.UninitializedParameter) for parameter in model.parameters()):
        raise ConfigError(
            "the model has lazy parameters, which have no shape yet: run a batch through it before prepare"
        )


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def smallest_batch(model: torch.nn.Module) -> int:
    """The fewest samples in training: BatchNorm refuses one, and a compiled model takes one for a shape of its own."""
    return 2 if is_compiled(model) or any(isinstance(module, _BatchNorm) for module in model.modules()) else 1


def replicate(
    model: torch.nn.Module,
    engine: Engine,
    index: int,
    *,
    comm_hook: CommHook | None,
    accumulating: Callable[[], bool],
) -> PreparedModel:
    """Wrap the model, over DistributedDataParallel where several workers sum gradients.

    `accumulating` says whether gradients wait for more micro-batches.

    Raises:
        ConfigError: The model carries a communication hook of somebody else's.
    """
    module = model.module if isinstance(model, DistributedDataParallel) else model
    replica = None
    if is_sharded(module):
        from evenstep.torch.engines.sharded import weigh_shards

        assert isinstance(engine, CollectiveEngine)
        weigh_shards(module, engine, index)
    elif isinstance(engine, CollectiveEngine) and engine.workers.count > 1:
        replica = model if isinstance(model, DistributedDataParallel) else _replica(module, engine.workers)
        _register_hook(replica, engine, index, comm_hook)
    module.__dict__[_PREPARED] = id(module)
    return PreparedModel(module, replica, engine, index, accumulating)


def _register_hook(
    replica: DistributedDataParallel, engine: CollectiveEngine, index: int, comm_hook: CommHook | None
) -> None:
    # DDP insists on these names and annotations.
    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return engine.communicate(index, comm_hook, bucket)

    try:
        replica.register_comm_hook(None, hook)
    except RuntimeError as error:
        raise ConfigError(
            "the model has a communication hook already, which would undo evenstep's weights: do not register it, give"
            " it as prepare(..., comm_hook=(state, hook))"
        ) from error


def _replica(module: torch.nn.Module, workers: Workers) -> DistributedDataParallel:
    device = device_of(module)
    replica = DistributedDataParallel(
        module, device_ids=[device] if device.type == "cuda" else None, process_group=workers.device_group
    )
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    if set(module.buffers()) <= {buffer for norm in norms for buffer in norm.buffers(recurse=False)}:
        # These are averages over all workers anyway, which worker 0's need not replace in every forward pass.
        replica.broadcast_buffers = False
    return replica
