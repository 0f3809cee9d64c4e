"""Gathers rows of batches whose sizes differ, for losses that compare samples of all workers."""

import weakref
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, Final, cast, final

import torch
import torch.distributed as dist

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.torch.data.metrics import rows_of_all
from evenstep.torch.engines.engine import Engine
from evenstep.torch.processes.workers import Workers, gather

_GATHERS: Final = ("all_gather", "all_gather_into_tensor")


def _nothing() -> Engine | None:
    """What runs before anything does."""
    return None


_running: Callable[[], Engine | None] = _nothing


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all workers' tensors, differentiable, for contrastive losses. All workers must call it together.

    With it a loss over all rows, or the mean over a worker's own rows of a loss against all, trains as on the union
    batch, whatever the sizes are. A worker's rows begin at `loader.current.sizes[:rank].sum()`.

    Args:
        tensor: Shape [rows, ...] of this worker's batch, such as the features of its samples, or of two views of each.

    Returns:
        Shape [rows of all workers, ...], in the order of the workers. Copies of other workers' samples are left out.

    Raises:
        ConfigError: No batch of a prepared loader is in hand, workers do not wait for each other in each iteration, or
            their rows differ in shape or dtype.
    """
    engine = _running()
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
    return cast("torch.Tensor", _Rows.apply(own, engine.workers, batch.weight))  # type: ignore[no-untyped-call]


@final
class _Rows(torch.autograd.Function):
    """A gather whose backward weighs what workers' losses ask of a row as their gradients are weighed.

    The workers' losses L_i count w_i, so the gradient at a row of worker j is the sum of w_i dL_i. Its own gradient
    counts w_j in the end, so it is divided by that.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, workers: Workers, weight: float) -> torch.Tensor:
        rows = rows_of_all(workers, own)
        start = sum(map(len, rows[: workers.rank]))
        ctx.of = workers, weight, slice(start, start + len(own))
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        workers, weight, mine = ctx.of
        total = gradient * weight
        dist.all_reduce(total, group=workers.device_group)
        return total[mine] / (weight or 1.0), None, None


@final
class GatherGuard:
    """While a run goes on, refuses a script's own gather of tensors whose shapes differ between workers.

    PyTorch ends the process for it on hosts, without a sentence. Workers compare shapes in iterations with unlike sizes
    alone, and where all of them gather.
    """

    def __init__(self, engine: Engine) -> None:
        global _running
        self._engine: Callable[[], Engine | None] = weakref.ref(engine)
        _running = self._engine
        self._usual = {name: getattr(dist, name) for name in _GATHERS}
        for name, function in self._usual.items():
            setattr(dist, name, self._guarded(function))

    def remove(self) -> None:
        """From now on gathers are PyTorch's own, also where another guard was put on top of this one."""
        self._engine = _nothing
        for name, function in self._usual.items():
            if getattr(getattr(dist, name), "__wrapped__", None) is function:
                setattr(dist, name, function)

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            engine, given = self._engine(), signature(function).bind_partial(*args, **kwargs).arguments
            tensor = given.get("tensor", given.get("input_tensor"))
            of_all = given.get("group") in (None, dist.group.WORLD)
            if engine is not None and of_all and isinstance(tensor, torch.Tensor):
                _require_alike(engine, tensor)
            return function(*args, **kwargs)

        return gathered


def _require_alike(engine: Engine, tensor: torch.Tensor) -> None:
    batch, workers = engine.hand_outs.in_hand, engine.workers
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
