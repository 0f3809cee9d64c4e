"""The model of a replica: its gradients are summed over the members of the quorum while backward computes."""

from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel
from torchft import DistributedDataParallel as OfTorchft
from torchft.process_group import ProcessGroupDummy

from evenstep.core.errors import ConfigError
from evenstep.launch.c10d import GradBucket
from evenstep.torch.engines.sharded import BackwardEnd, SumsShards, weigh_shards
from evenstep.torch.model import is_sharded, unwrapped
from evenstep.torch.processes.workers import Workers


def whole(model: torch.nn.Module, *, alone: bool) -> torch.nn.Module:
    """The user's model without a DistributedDataParallel around it; `alone`: the replica is one process.

    Raises:
        ConfigError: It is torchft's own, whose hook would divide the gradients by the number of members; or it is
            sharded over one process, or in DistributedDataParallel inside a replica.
    """
    if isinstance(model, OfTorchft):
        raise ConfigError(
            "the model is in torchft's DistributedDataParallel, which weighs all replicas alike: pass the plain model"
        )
    if alone and is_sharded(unwrapped(model)):
        raise ConfigError(
            "a replica is one process, which has all of the model: leave out fully_shard, or start replicas of several"
            " (evenstep run --nproc-per-replica)"
        )
    if not alone and isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "the gradients of a model that is split over the processes of a replica are summed here: pass it without"
            " DistributedDataParallel"
        )
    return unwrapped(model)


def summing(
    module: torch.nn.Module, reduce: Callable[[GradBucket], torch.futures.Future[torch.Tensor]]
) -> DistributedDataParallel:
    """Return the model in a DistributedDataParallel whose buckets `reduce` takes."""
    # As torchft does: the group is not used, and with unused parameters the buckets are never arranged anew, which
    # would be different on a replica that joins later.
    replica = DistributedDataParallel(module, process_group=ProcessGroupDummy(0, 1), find_unused_parameters=True)

    # DDP insists on these names and annotations.
    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return reduce(bucket)

    def no_sync() -> None:
        raise ConfigError(
            "every backward is summed while members come and go: leave out no_sync, and step on each batch"
        )

    replica.register_comm_hook(None, hook)
    replica.__dict__["no_sync"] = no_sync
    return replica


def sum_parts(module: torch.nn.Module, engine: SumsShards, index: int, inside: Workers) -> None:
    """Make every backward sum the gradients of a model that is split over the processes of a replica."""
    if is_sharded(module):
        weigh_shards(module, engine, index, inside)
        return
    end = BackwardEnd(engine, index)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: end.await_once())  # type: ignore[no-untyped-call]
