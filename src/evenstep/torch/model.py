"""The model that `prepare` returns: the same wrapper for every scheme and number of workers."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, Self, final
from weakref import WeakKeyDictionary

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import JoinHook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from evenstep.core.errors import ConfigError
from evenstep.launch.c10d import GradBucket, of_communication
from evenstep.torch.engines.collective import CollectiveEngine, CommHook
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.summing_group import SummingGroup
from evenstep.torch.processes.workers import Workers
from evenstep.worker.hand_outs import HandedOut

_PREPARED = "_evenstep_prepared"
_IGNORED: Final = "_ddp_params_and_buffers_to_ignore"


@final
class PreparedModel(DistributedDataParallel):
    """Calls the user's model, `module`, so that its gradients are synchronised.

    Its `state_dict` has DistributedDataParallel's keys (`module.` before each), even with one worker. A forward pass
    without gradients involves no other worker, so a single worker may evaluate. A copied or unpickled one is only the
    user's model and synchronises nothing.

    It subclasses DistributedDataParallel so that other libraries do not wrap it again.

    Attributes:
        strayed: Whether it has had a forward pass for training before the session started.
    """

    module: torch.nn.Module
    strayed = False
    _compiled = False
    # The rest is of one run, and is not copied or pickled.
    _replica: DistributedDataParallel | None = None
    _engine: Engine | None = None
    _index = 0
    _batch: HandedOut | None = None
    _leave: Sequence[Callable[[], object]] = ()
    _released = False

    def __init__(self, module: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.module = module
        self.training = module.training

    def bind(self, model: torch.nn.Module, engine: Engine, index: int, *, comm_hook: CommHook | None) -> None:
        """Synchronise the gradients of the script's model through this engine from now on.

        If several workers sum gradients, this is done by DistributedDataParallel, the script's own if it gave one.

        Raises:
            ConfigError: The model already has a communication hook.
        """
        module, replica = self.module, None
        if isinstance(engine, CollectiveEngine) and is_sharded(module):
            from evenstep.torch.engines.sharded import weigh_shards

            weigh_shards(module, engine, index, engine.workers)
        elif isinstance(engine, CollectiveEngine) and engine.workers.count > 1:
            replica = model if isinstance(model, DistributedDataParallel) else _replica(module, engine.workers)
            _reduce_by(engine, index, replica, comm_hook)
            if not self._leave:
                replica.train(self.training)  # type: ignore[no-untyped-call]
        module.__dict__[_PREPARED] = id(module)
        # `_replica` is not registered as a submodule: the state dict must hold the parameters once.
        self.__dict__.update(
            _replica=replica,
            _engine=engine,
            _index=index,
            _compiled=is_compiled(module),
        )

    def follow(self, replica: DistributedDataParallel) -> None:
        """Follow the script's own DistributedDataParallel, which the script calls and which is not changed."""
        own = {"zero_grad": self.zero_grad, "register_comm_hook": self.register_comm_hook}
        replica.__dict__.update({_IGNORED: _RefusesWrapping(), **own})
        self._leave = (
            replica.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove,
            replica.register_forward_hook(self._after_forward).remove,
            lambda: [replica.__dict__.pop(each, None) for each in (_IGNORED, *own)],
        )

    def release(self) -> None:
        """Only call the user's model from now on, with a warning at the first forward pass for training."""
        for leave in self._leave:
            leave()
        self.__dict__.update(_replica=None, _engine=None, _leave=(), _released=True)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_RUN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        return list(_RefusesWrapping())

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the user's model."""
        if self._engine is None or not torch.is_grad_enabled():
            self.strayed |= torch.is_grad_enabled()
            if self._released and self.training and torch.is_grad_enabled():  # Warn once.
                self._released = False
                warnings.warn(
                    "this model is of a run that was closed, so evenstep no longer synchronises its gradients: call"
                    " prepare again, or train your own model",
                    stacklevel=5,  # Above torch's frames, whose number varies.
                )
            return self.module(*args, **kwargs)
        self._before_forward(self, args, kwargs)
        batch = self._batch
        try:
            outputs = (self._replica or self.module)(*args, **kwargs)
        except RuntimeError as error:
            # DistributedDataParallel and models that are split communicate here, too.
            if not of_communication(error):
                raise
            raise self._engine.explained(error) from error
        self._engine.forward_ends(self._index, batch, outputs)
        return outputs

    # `skip` excludes a hook from compilation, and `set_eval_frame` what it calls. `torch.compiler.disable` does both,
    # with a dozen checks even if nothing is compiled.

    @torch._dynamo.decorators.skip
    def _before_forward(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward pass: note its batch, and whether its backward sums gradients or waits for micro-batches."""
        engine, batch, compiler = self._engine, None, set_eval_frame(None)
        try:
            if engine is None:
                self.strayed |= torch.is_grad_enabled()
            elif torch.is_grad_enabled():
                batch = engine.forward_begins(self._index, (args, kwargs) if kwargs else args)
                if self._compiled and batch is not None:
                    _mark_dynamic((args, kwargs), length=len(batch.piece.positions))
                reduces = self._replica is None or self._replica.require_backward_grad_sync
                if engine.accumulates:
                    reduces = engine.synchronises  # Whatever the script's no_sync says.
                    if self._replica is not None:
                        self._replica.require_backward_grad_sync = reduces
                engine.reduction_begins(self._index, synchronises=reduces)
            self.__dict__["_batch"] = batch  # Setting an attribute of a Module is slow.
        finally:
            set_eval_frame(compiler)

    @torch._dynamo.decorators.skip
    def _after_forward(self, _: torch.nn.Module, __: tuple[Any, ...], outputs: Any) -> None:
        compiler = set_eval_frame(None)
        try:
            if self._engine is not None:
                self._engine.forward_ends(self._index, self._batch, outputs, communicates=True)
        finally:
            set_eval_frame(compiler)

    def backward_begins(self, called: torch.nn.Module) -> None:
        """Like `Session.backward_begins`; the script calls `called`, this model or its own DistributedDataParallel."""
        if self._engine is not None:
            self._engine.reduction_begins(self._index, synchronises=bool(called.require_backward_grad_sync))

    def train(self, mode: bool = True) -> Self:
        torch.nn.Module.train(self, mode)
        if self._replica is not None:
            self._replica.train(mode)  # type: ignore[no-untyped-call]
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like `torch.nn.Module.zero_grad`; does nothing while gradients wait for more micro-batches and a step."""
        batch = None if self._engine is None else self._engine.hand_outs.in_hand
        if batch is None or not batch.accumulates:
            torch.nn.Module.zero_grad(self, set_to_none=set_to_none)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Like `DistributedDataParallel`'s, for scripts that set it instead of using `no_sync`."""
        return self._replica is None or self._replica.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        if self._replica is not None:
            self._replica.require_backward_grad_sync = wanted

    def __getattr__(self, name: str) -> Any:
        try:
            return torch.nn.Module.__getattr__(self, name)
        except AttributeError:
            if name != "module" and hasattr(self.module, name):
                raise AttributeError(
                    f"{name!r} is an attribute of your own model: write model.module.{name} (a forward pass is"
                    " synchronised through model(...) alone)"
                ) from None
            raise

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Inside, backward only accumulates local gradients, like `DistributedDataParallel.no_sync`."""
        return nullcontext() if self._replica is None else self._replica.no_sync()

    def join(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Do nothing: every worker takes the same number of iterations."""
        return nullcontext()

    def join_hook(self, **_: Any) -> JoinHook:
        """Like `join`, for `torch.distributed.algorithms.Join`."""
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return device_of(self.module)

    @property
    def join_process_group(self) -> Any:
        """The default group, in which workers that have left a loop count each other."""
        return torch.distributed.group.WORLD

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Not possible: evenstep's own hook weighs the gradients.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "evenstep uses the model's communication hook itself: give yours as prepare(..., comm_hook=(state, hook))"
        )


_OF_RUN: Final = frozenset({"_replica", "_engine", "_index", "_batch", "_leave", "_released"})


@final
class _RefusesWrapping:
    """Stored where DistributedDataParallel looks up which parameters of a given model to ignore."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigError(
            "what prepare returned was wrapped in DistributedDataParallel, which would sum its gradients a second time:"
            " pass the model to the loop as it is (docs/training-scripts.md)"
        )

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tuple, ()  # A copy synchronises nothing, so it may be wrapped.


def forget(model: torch.nn.Module) -> None:
    """Allow the model to be prepared again."""
    unwrapped(model).__dict__.pop(_PREPARED, None)
    if isinstance(model, DistributedDataParallel) and (reduction := _REDUCTIONS.get(model)) is not None:
        reduction.stop(model)


@final
class _Reduction:
    """How a DistributedDataParallel sums gradients: by its hook, which cannot be removed, or on hosts in a group."""

    def __init__(self, replica: DistributedDataParallel) -> None:
        self.by: Callable[[torch.Tensor, GradBucket], Any] | None = None
        """The action of the hook; None: as without it."""
        self.group: SummingGroup | None = None
        self.hook(replica)

    def stop(self, replica: DistributedDataParallel) -> None:
        """Sum as without evenstep."""
        self.by = None
        if self.group is not None:
            self.group.group, self.group.sum = replica.process_group, None

    def hook(self, replica: DistributedDataParallel) -> None:
        """Give the replica a hook.

        Raises:
            ConfigError: It has one.
        """
        group = replica.process_group

        # DDP insists on these names and annotations.
        def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            return allreduce_hook(group, bucket) if self.by is None else self.by(bucket.buffer(), bucket)

        try:
            DistributedDataParallel.register_comm_hook(replica, None, hook)  # `follow` has replaced the replica's own.
        except RuntimeError as error:
            raise ConfigError(
                "the model has a communication hook already, which would undo evenstep's weights: do not register it,"
                " give it as prepare(..., comm_hook=(state, hook))"
            ) from error
        replica._comm_hooks.clear()  # A copy would copy it, which it cannot.


_REDUCTIONS: Final[WeakKeyDictionary[DistributedDataParallel, _Reduction]] = WeakKeyDictionary()


def _reduce_by(
    engine: CollectiveEngine, index: int, replica: DistributedDataParallel, comm_hook: CommHook | None
) -> None:
    """Let the engine sum the replica's gradients.

    Raises:
        ConfigError: It would not sum all of them, or has a communication hook.
    """
    trained = (name for name, each in replica.module.named_parameters() if each.requires_grad)
    if (left := next((name for name in trained if name in replica.parameters_to_ignore), None)) is not None:
        raise ConfigError(
            f"DistributedDataParallel is told not to sum the gradient of {left}, so that each worker would train it on"
            " its own samples: freeze it, or leave it out of _ddp_params_and_buffers_to_ignore and of"
            " delay_all_reduce_named_params"
        )
    if (reduction := _REDUCTIONS.get(replica)) is None:
        reduction = _REDUCTIONS[replica] = _Reduction(replica)
    reduction.by = partial(engine.communicate, index, comm_hook)
    if engine.on_host:
        group = engine.workers.device_group if comm_hook is None else None
        reduction.group = SummingGroup.for_reducer(replica, group)
        if reduction.group is None:
            reduction.hook(replica)
        else:
            engine.sum_in(reduction.group, index)


def _replica(module: torch.nn.Module, workers: Workers) -> DistributedDataParallel:
    device = device_of(module)
    replica = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=workers.device_group,
    )
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    if set(module.buffers()) <= {buffer for norm in norms for buffer in norm.buffers(recurse=False)}:
        # They are averaged over all workers, so worker 0's need not replace them in every forward pass.
        replica.broadcast_buffers = False
    return replica


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a DistributedDataParallel, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def was_prepared(model: torch.nn.Module) -> bool:
    """True if `prepare` has wrapped the model; a deep copy of a prepared model does not count."""
    module = unwrapped(model)
    return bool(module.__dict__.get(_PREPARED) == id(module))


def is_sharded(model: torch.nn.Module) -> bool:
    """True if FSDP2's `fully_shard` was applied to the model or any part of it."""
    # Importing this takes a second, and a script with a sharded model has already imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in model.modules())


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the model's parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def needed_batch(model: torch.nn.Module) -> int:
    """The smallest batch for training: BatchNorm refuses 1, and a compiled model makes a separate graph for 1."""
    return 2 if is_compiled(model) or any(isinstance(module, _BatchNorm) for module in model.modules()) else 1


def is_compiled(model: torch.nn.Module) -> bool:
    """True if the model or a part of it is compiled, by `torch.compile(model)` or `model.compile()`."""
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


def _mark_dynamic(inputs: Any, *, length: int) -> None:
    """Tell the compiler that the first axis of tensors in a batch of this length will change.

    By itself the compiler only notices after it has compiled for the first size, and not at all with `dynamic=False`.
    """
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == length:
            torch._dynamo.maybe_mark_dynamic(leaf, 0)
