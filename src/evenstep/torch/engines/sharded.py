"""Models sharded by FSDP2 (`fully_shard`): weighs gradients in FSDP's own reduce-scatter, and times compute around it.

Every layer's all-gather waits for the slowest worker, so compute is the time between the communications.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Final, Protocol, final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_leaves

from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.launch.c10d import all_gather_single, reduce_scatter_single
from evenstep.torch.processes.workers import Workers
from evenstep.worker.tracker import Tracker

_REPLICATES: Final = ([False], [True, False])
"""Whether parameters are replicated along each dimension of workers, under FSDP2 and HSDP."""


def require_shardable(module: torch.nn.Module, workers: Workers) -> None:
    """Check that the gradients of a sharded model can be weighed.

    Raises:
        ConfigError: It is not sharded by FSDP2 or HSDP over all workers.
    """
    if not isinstance(module, FSDPModule):
        raise ConfigError(
            "parts of the model are sharded by fully_shard and the whole is not: apply it to the model too"
        )
    sizes = set()
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            placements, lengths = _over_workers(parameter, workers)
            sizes.add(size := prod(lengths))
            if [each.is_replicate() for each in placements] not in _REPLICATES or not _has_all(parameter, workers):
                raise ConfigError(
                    f"the parameter {name!r} is sharded as {placements} over {size} processes of {workers.count}"
                    " workers, and evenstep goes with fully_shard over all workers, on a mesh of one dimension or"
                    " (HSDP) two: if the model is split further, give prepare the mesh, and as data_dims the dimensions"
                    " that fully_shard was given, and no others"
                )
        elif parameter.requires_grad:
            raise ConfigError(
                f"the parameter {name!r} is left out of fully_shard, so nothing sums its gradient: leave out"
                " ignored_params, or freeze it"
            )
    if len(sizes) > 1:
        raise ConfigError(
            f"the gradients of some parameters are summed over {min(sizes)} processes and those of others over"
            f" {max(sizes)}, as of experts, and are weighed alike: apply fully_shard on one mesh to the whole model"
        )


def _over_workers(parameter: DTensor, workers: Workers) -> tuple[list[Placement], list[int]]:
    """The placements along the dimensions over which gradients are summed, and the processes along each.

    Those may have peers, too, as in context parallelism, where the mesh flattens both into a dimension of another name,
    or has peers in its first dimension.
    """
    mesh, split = parameter.device_mesh, () if workers.peers is None else workers.peers.others
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    # The dimensions of fully_shard come first.
    dims = range(max((each + 1 for each, name in enumerate(names) if name not in split), default=0))
    return [parameter.placements[each] for each in dims], [mesh.size(each) for each in dims]


def _has_all(parameter: DTensor, workers: Workers) -> bool:
    """True if the mesh of the parameter has equally many processes of each worker."""
    mesh, peers = parameter.device_mesh, workers.peers
    if peers is None:
        return bool(mesh.size() == workers.count)
    counts = np.isin(peers.ranks.reshape(peers.count, -1), mesh.mesh.numpy()).sum(axis=1)
    return bool(counts[0] > 0 and (counts == counts[0]).all())


class SumsShards(Protocol):
    """An engine that sums the gradients of sharded models."""

    tracker: Tracker

    def weigh_sharded(self, model: int, gradients: torch.Tensor) -> None:
        """Weigh gradients of this model in place, before they are summed."""

    def backward_ends(self, model: int) -> None:
        """A backward of this model is over."""

    def explained(self, cause: Exception) -> EvenstepError:
        """The error to raise after a collective failed."""


def weigh_shards(module: torch.nn.Module, engine: SumsShards, index: int, workers: Workers) -> None:
    """Make every backward sum the gradients of these workers by their weights."""
    over = [_over_workers(each, workers) for each in module.parameters() if isinstance(each, DTensor)]
    hybrid = any(len(placements) == 2 for placements, _ in over)
    # Peers that have a part of each sample each have a mean over that part, and the mean of these counts.
    parts = max(prod(lengths) for _, lengths in over) // workers.count
    alone = all(lengths[-1] == 1 for _, lengths in over)
    end = BackwardEnd(engine, index)
    for each in module.modules():
        if not isinstance(each, FSDPModule):
            continue
        # A divide factor that differs between workers would be applied after the sum, and give wrong gradients.
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)
        each.set_custom_reduce_scatter(
            _WeightedReduceScatter(end, hybrid=hybrid, alone=alone, parts=parts)  # type: ignore[arg-type]
        )
        each.set_custom_all_gather(_AllGather(engine))  # type: ignore[arg-type]
        if hybrid:
            each.set_all_reduce_hook(lambda _: engine.tracker.stopwatch.run())
        # Gradients kept for a later backward would get the weight of its batch. They add up in shards instead, each
        # with the weight of its own batch.
        each.set_requires_gradient_sync = _synchronise_always  # type: ignore[method-assign]
        _interrupt(each, engine.tracker)


def _synchronise_always(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Replaces FSDP's own method: the sum does not depend on when it is taken."""


@final
class BackwardEnd:
    """Tells the engine when a backward of its model of this index is over."""

    def __init__(self, engine: SumsShards, index: int) -> None:
        self.engine, self.index = engine, index
        self._awaited: object = self

    def await_once(self) -> None:
        """Called in a backward, any number of times."""
        if self._awaited is not self.engine.tracker.iteration:
            self._awaited = self.engine.tracker.iteration
            # FSDP queues its last step of a backward in the same way, but earlier.
            torch.autograd.Variable._execution_engine.queue_callback(self._reached)

    def _reached(self) -> None:
        self._awaited = self
        self.engine.backward_ends(self.index)


@final
class _AllGather:
    """FSDP's all-gather, with errors that name the missing worker."""

    def __init__(self, engine: SumsShards) -> None:
        self._engine = engine

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        try:
            work: dist.Work | None = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        except RuntimeError as error:
            raise self._engine.explained(error) from error
        return work


@final
class _WeightedReduceScatter:
    """Sums weighted gradients over all workers, or the means of so many `parts` of each worker's gradient.

    `hybrid`: FSDP sums them over the replicas afterwards; compute continues then. `alone`: each replica has one shard.
    """

    def __init__(self, end: BackwardEnd, *, hybrid: bool, alone: bool, parts: int) -> None:
        self._engine, self._end = end.engine, end
        self._hybrid, self._alone, self._parts = hybrid, alone, parts
        self._input: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # FSDP allocates the input in the compute stream, and then leaves that stream.
        self._engine.tracker.compute_pauses()
        allocated = torch.empty(*size, dtype=dtype, device=device)
        if self._alone:
            # FSDP copies the input to the output and calls nothing here in between. The input is filled by then.
            filled, self._input = self._input, allocated if self._input is None else None
            if filled is not None:
                self._weigh(filled)
        return allocated

    def _weigh(self, gradients: torch.Tensor) -> None:
        self._engine.weigh_sharded(self._end.index, gradients)
        if self._parts > 1:
            gradients.div_(self._parts)
        self._end.await_once()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM
        try:
            if not self._alone:
                self._weigh(input_tensor)
            work: dist.Work | None = reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        except RuntimeError as error:
            raise self._engine.explained(error) from error
        if not self._hybrid:
            self._engine.tracker.stopwatch.run()
        return work


def _interrupt(module: torch.nn.Module, tracker: Tracker) -> None:
    """Stop the clock of compute while FSDP gathers this module's parameters, in forward and backward.

    FSDP has registered hooks for it on the module and on its outputs; these hooks run right before and right after.
    """
    ran, gathers = False, list[torch.Tensor]()

    def begin(*_: Any) -> None:
        nonlocal ran
        ran = tracker.stopwatch.running
        tracker.compute_pauses()

    def end(*_: Any) -> None:
        if ran:
            tracker.stopwatch.run()

    def before_hooks(_module: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
        gathers[:] = (each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad)
        for each in gathers:
            each.register_hook(begin)  # type: ignore[no-untyped-call]

    def after_hooks(*_: Any) -> None:
        for each in gathers:
            each.register_hook(end)  # type: ignore[no-untyped-call]
        gathers.clear()

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_pre_hook(end)
    module.register_forward_hook(before_hooks, prepend=True)
    module.register_forward_hook(after_hooks)
