"""Gathers rows of batches with different sizes, for losses that compare samples of all workers."""

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from typing import Any, Final, cast, final

import torch
import torch.distributed as dist

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.torch.engines.engine import Engine
from evenstep.torch.processes.liveness import explaining
from evenstep.torch.processes.workers import gather, rows_of_all

_GATHERS: Final = ("all_gather", "all_gather_into_tensor")
_OF_BUFFERS: Final = "_broadcast_coalesced"
"""Called by DistributedDataParallel in the first forward pass of a step, which all workers have."""
_COLLECTIVES: Final = (
    *_GATHERS,
    *("all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    _OF_BUFFERS,
)
"""Collectives that a step may wait in. evenstep's own use separate groups."""


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all workers' tensors, differentiable, for contrastive losses. All workers must call it together.

    With it, a loss over all rows, or the mean over a worker's own rows of a loss against all rows, trains as on the
    union batch, for any sizes. A worker's rows begin at `loader.current.sizes[:rank].sum()`.

    Args:
        tensor: Shape [rows, ...] of this worker's batch, such as the features of its samples, or of two views of each.

    Returns:
        Shape [rows of all workers, ...], in the order of the workers. Copies of other workers' samples are left out.

    Raises:
        ConfigError: There is no current batch of a prepared loader, workers do not wait for each other in each
            iteration, or their rows differ in shape or dtype.
    """
    engine = next(reversed(_engines()), None)
    batch = None if engine is None else engine.hand_outs.in_hand
    if engine is None or batch is None or (batch.weight is None and engine.workers.count > 1):
        raise ConfigError(
            "all_gather is for a batch of a prepared loader, under a scheme whose workers wait for each other in each"
            " iteration: call it in a loop over that loader"
        )
    if not getattr(tensor, "ndim", 0) or not torch.is_tensor(tensor):
        raise ConfigError(f"all_gather takes a tensor with a first axis of rows, not {shown(tensor)}")
    own = tensor if batch.piece.samples else tensor[:0]
    if engine.workers.count == 1:
        return own
    return cast("torch.Tensor", _Rows.apply(own, engine, batch.weight))  # type: ignore[no-untyped-call]


@final
class _Rows(torch.autograd.Function):
    """A gather whose backward weighs each worker's gradient at a row by the weight of that worker's loss.

    Worker i's loss L_i has weight w_i, so the gradient at a row of worker j is the sum of w_i dL_i. Worker j's gradient
    is multiplied by w_j later, so it is divided by w_j here.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, engine: Engine, weight: float) -> torch.Tensor:
        with engine.meeting():
            rows = rows_of_all(engine.workers, own)
        start = sum(map(len, rows[: engine.workers.rank]))
        ctx.of = engine, weight, slice(start, start + len(own))
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        engine, weight, mine = ctx.of
        total = gradient * weight
        with engine.meeting():
            dist.all_reduce(total, group=engine.workers.device_group)
        return total[mine] / (weight or 1.0), None, None


@final
class ScriptCollectives:
    """Wraps the script's own collectives during runs, so that waiting in them does not count as compute.

    A gather of tensors whose shapes differ between workers is refused, because on hosts PyTorch would abort the process
    without a message. Workers compare shapes only in iterations with unequal sizes, and where all of them gather.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        _runs.append(self._engine)
        for name in _COLLECTIVES:
            if name not in _usual:
                _usual[name] = getattr(dist, name)
                setattr(dist, name, _guarded(_usual[name]))

    def remove(self) -> None:
        """End the wrappers with the last run. Those that the script has wrapped in turn stay, without effect."""
        _runs.remove(self._engine)
        if not _engines():
            for name, usual in _usual.items():
                if getattr(getattr(dist, name), "__wrapped__", None) is usual:
                    setattr(dist, name, usual)
            _usual.clear()


_runs: Final[list[weakref.ref[Engine]]] = []
"""The engines of the runs, the newest last."""
_usual: Final[dict[str, Callable[..., Any]]] = {}
"""PyTorch's own collectives, by name, where wrappers are in their place."""


def _engines() -> list[Engine]:
    return [engine for run in _runs if (engine := run()) is not None]


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        engines, group = _engines(), kwargs.get("group", 0)
        if any(group in (each.workers.host_group, each.workers.device_group) for each in engines):
            return function(*args, **kwargs)
        for engine in engines:
            if function.__name__ != _OF_BUFFERS:
                engine.require_common_place()
            if function.__name__ in _GATHERS:
                _require_alike(engine, signature(function).bind_partial(*args, **kwargs).arguments)
        if kwargs.get("async_op") or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)  # The script computes meanwhile.
        with ExitStack() as waits:
            for engine in engines:
                waits.enter_context(engine.tracker.interrupted())
                waits.enter_context(explaining(engine.liveness))
            return function(*args, **kwargs)

    return called


def _require_alike(engine: Engine, given: Mapping[str, Any]) -> None:
    batch, workers, tensor = engine.hand_outs.in_hand, engine.workers, given.get("tensor", given.get("input_tensor"))
    if given.get("group") not in (None, dist.group.WORLD) or not isinstance(tensor, torch.Tensor):
        return
    if batch is None or batch.closed or len(set(batch.share.sizes.tolist())) == 1:
        return
    if workers.given_group is not None or workers.count != dist.get_world_size():
        return
    shapes = [each["shape"] for each in gather(workers, {"shape": list(tensor.shape)})]
    if any(each != shapes[0] for each in shapes):
        raise ConfigError(
            f"the script gathers tensors of shape {' and '.join(map(str, shapes[:3]))} from workers whose batches"
            " differ in size, which torch.distributed cannot: use evenstep.torch.all_gather(tensor), which takes any"
            " number of rows and is differentiable, and begin this worker's labels at loader.current.sizes[:rank].sum()"
        )
