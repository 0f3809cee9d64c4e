"""Refuses models, loaders and optimizers that cannot be trained, and arguments that do not fit the scheme."""

from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from evenstep.core.errors import ConfigError
from evenstep.schemes import Scheme, in_batches, parse_scheme
from evenstep.torch.data.loader import PreparedLoader
from evenstep.torch.data.order import EpochOrder
from evenstep.torch.data.sampling import Positions, Sampling
from evenstep.torch.model import PreparedModel, device_of, is_sharded, was_prepared
from evenstep.torch.optimizers import is_initialised
from evenstep.torch.processes.workers import Workers
from evenstep.torch.request import RunRequest

_FOREIGN: Final = ("FullyShardedDataParallel", "ReplicateModule", "DeepSpeedEngine")
_LOOPS: Final = ("__iter__", "_get_iterator")
_TWICE: Final = "was prepared already: call prepare once and use what it returned"


def require_trainable(request: RunRequest, workers: Workers, scheme: Scheme) -> None:
    """Check this worker's request.

    Raises:
        ConfigError: It cannot be trained, or not under this scheme.
    """
    for model in request.models:
        _require_model(model, workers)
        _require_sums_between(model, workers)
    require_loader(request.loader, streams=True)
    _require_optimizers(request, workers)
    if scheme.accumulates:
        _require_one_pass_a_batch(request)
    if scheme.served is not None:
        _require_servable(scheme, request)
    if any(is_sharded(model) for model in request.models):
        _require_goes_with_shards(scheme, request)
    if request.weights != "samples" and (scheme.served is not None or scheme.period is not None):
        raise ConfigError(
            f"weights goes with schemes that sum gradients behind a barrier, and {scheme.name!r} is none: leave out"
            " weights, or use lb-bsp, dbs or bsp"
        )
    tensors = sum(len(group["params"]) for each in request.optimizers for group in each.param_groups)
    if scheme.fragments > tensors:
        raise ConfigError(
            f"{tensors} parameter tensors cannot be cut into {scheme.fragments} fragments: use {tensors} or fewer"
        )
    if scheme.period is not None and any(hasattr(each, "consolidate_state_dict") for each in request.optimizers):
        raise ConfigError(
            f"under the scheme {scheme.name!r} each worker steps the whole model on its own, and an optimizer that is"
            " split over the workers steps a part of it: give the plain optimizer, or use lb-bsp, dbs, bsp or"
            " batch_sizes"
        )
    if scheme.period is not None and request.comm_hook is not None:
        raise ConfigError(
            f"the scheme {scheme.name!r} sends no gradients for comm_hook to compress: leave out one of them"
        )


def _require_model(model: torch.nn.Module, workers: Workers) -> None:
    if isinstance(model, PreparedModel):
        raise ConfigError(f"this model {_TWICE}")
    _require_known_wrapper(model, workers)
    if device_of(model).type == "cpu" and any(isinstance(each, torch.nn.SyncBatchNorm) for each in model.modules()):
        raise ConfigError(
            "the model has SyncBatchNorm, which works on GPUs alone: on the CPU leave BatchNorm as it is, or use"
            " GroupNorm"
        )
    if any(isinstance(parameter, torch.nn.UninitializedParameter) for parameter in model.parameters()):
        raise ConfigError(
            "the model has lazy parameters, which have no shape yet: run a batch through it before prepare"
        )
    if was_prepared(model):
        raise ConfigError(f"this model {_TWICE}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to train")


def _require_sums_between(model: torch.nn.Module, workers: Workers) -> None:
    """Check that the gradients of a model that is split are summed between the right processes."""
    inside, peers = workers.inside, workers.peers
    if inside is not None:
        if inside.count > 1 and not is_sharded(model):
            raise ConfigError(
                f"nothing sums the gradients of the {inside.count} batches of a replica: apply fully_shard on the mesh"
                " of data_dims, or leave out data_dims, so that all processes of the replica get one batch"
            )
    elif peers is not None and isinstance(model, DistributedDataParallel):
        own = dist.get_process_group_ranks(model.process_group)
        if own != dist.get_process_group_ranks(workers.host_group):
            raise ConfigError(
                f"the model is in DistributedDataParallel over the ranks {own}, which are not those of its part of the"
                f" model along {list(peers.dims)}: give it the mesh of these alone, as device_mesh=mesh['dp']"
            )


def _require_known_wrapper(model: torch.nn.Module, workers: Workers) -> None:
    if isinstance(model, torch.nn.DataParallel):
        raise ConfigError("the model is wrapped in DataParallel: pass the plain model, one process per device")
    foreign = next((name for each in model.modules() if (name := type(each).__name__) in _FOREIGN), None)
    if foreign is not None:
        raise ConfigError(
            f"the model is wrapped by {foreign}, whose gradients evenstep cannot weigh: pass the plain model, or shard"
            " it with torch.distributed.fsdp.fully_shard"
        )
    if any(getattr(each, "gradient_as_bucket_view", False) for each in model.modules() if each is not model):
        raise ConfigError(
            "the model has a DistributedDataParallel with gradient_as_bucket_view=True inside, which divides the"
            " gradients by itself: pass the DistributedDataParallel, or the model without it"
        )
    if is_sharded(model):
        from evenstep.torch.engines.sharded import require_shardable

        require_shardable(model, workers.inside or workers)
    elif workers.inside is None and workers.count > 1:
        # DistributedDataParallel makes plain tensors of the parts, and a forward pass takes these from the module.
        parts = model._module_parameters if isinstance(model, DistributedDataParallel) else model.parameters()
        if any(hasattr(each, "device_mesh") or hasattr(each, "_st_info") for each in parts):
            raise ConfigError(
                "parameters of the model are split (DTensor), and without fully_shard each process would clip and save"
                " its own part of them as the whole: apply fully_shard(model, mesh=mesh['dp']) after"
                " parallelize_module, not DistributedDataParallel, and give prepare mesh and data_dims"
            )


def require_loader(loader: object, *, streams: bool = False) -> DataLoader[Any]:
    """Check that the loader can be prepared, and return it with its type; `streams`: it may be over an IterableDataset.

    Raises:
        ConfigError: It is not a map-style DataLoader with a batch size, or was prepared before.
    """
    if isinstance(loader, PreparedLoader):
        raise ConfigError(f"this loader {_TWICE}")
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"the loader must be a torch DataLoader, not {type(loader).__name__}")
    if streams and isinstance(loader.dataset, IterableDataset):
        return loader  # It is iterated over as it is.
    own = [name for name in _LOOPS if getattr(type(loader), name) is not getattr(DataLoader, name)]
    if own:
        raise ConfigError(
            f"the loader {type(loader).__name__} has its own {own[0]}, which evenstep would not call: give prepare a"
            " plain DataLoader over the same dataset, with what it does in the dataset or in collate_fn"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "the loader's dataset is an IterableDataset, whose samples cannot be divided: give a map-style one, or"
            " read its files through evenstep.ShardedDataset"
        )
    if loader.batch_sampler is None:
        raise ConfigError("the loader makes no batches (batch_size=None): give it a batch_size, or a batch_sampler")
    return loader


def _require_optimizers(request: RunRequest, workers: Workers) -> None:
    trained = {id(parameter) for model in request.models for parameter in model.parameters()}
    for optimizer in request.optimizers:
        if not is_initialised(optimizer):
            raise ConfigError(
                f"the optimizer {type(optimizer).__name__} does not call the __init__ of torch.optim.Optimizer, so that"
                " nothing tells when it steps: call it there, or give prepare the optimizer that it is around"
            )
        if not any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError("the optimizer has no parameter of the model: build it from model.parameters()")
        if isinstance(optimizer, torch.optim.LBFGS) and workers.count > 1:
            raise ConfigError(
                "LBFGS calls its closure as often as this worker's own loss tells it to, so the workers would part: use"
                " another optimizer, or one process"
            )


def require_servable_loader(scheme: Scheme, loader: DataLoader[Any]) -> None:
    """Check that servers can divide the loader's samples.

    Raises:
        ConfigError: It has its own batch sampler, which gives lists.
    """
    if Sampling.of(loader).lists:
        raise ConfigError(
            f"under the scheme {scheme.name!r} workers take samples from servers one part after another, which does not"
            " keep the lists of the loader's batch sampler together: give batch_size and a sampler, or use a scheme"
            " without servers"
        )


def require_private_possible(request: RunRequest, scheme: Scheme, order: EpochOrder) -> None:
    """Check that each worker can train on its own dataset, if private datasets are requested.

    Raises:
        ConfigError: The scheme or this loader does not allow it.
    """
    if request.streams and request.partition == "common":
        raise ConfigError(
            "the loader's dataset is an IterableDataset, which each worker reads by itself, so that its samples cannot"
            ' be divided among all: leave out partition="common", or read files through evenstep.ShardedDataset'
        )
    if not request.private:
        if request.uneven != "continue":
            raise ConfigError(
                "uneven says when an epoch ends in which workers have data of their own, and these share a dataset:"
                ' leave it out, or give partition="private"'
            )
        return
    if scheme.served is not None or (scheme.period is not None and scheme.load.follows_speed):
        what = "an IterableDataset" if request.streams else 'partition="private"'
        raise ConfigError(
            f"{what} keeps samples with their workers, and {scheme.name!r} shares them out by iteration:"
            " use lb-bsp, dbs, bsp or batch_sizes, or local-sgd with equal sizes, such as local-sgd:period=8"
        )
    _require_own_possible(request, scheme)
    if request.streams:
        return
    if order.sampler is not None or isinstance(request.loader.dataset, Positions):
        raise ConfigError(
            'partition="private" draws each worker\'s order from the seed: give a loader with shuffle=True, or without'
            " a sampler"
        )
    if not order.length:
        raise ConfigError(
            'partition="private" needs a sample on each worker, and this one has none: look at its part of the data'
        )


def _require_own_possible(request: RunRequest, scheme: Scheme) -> None:
    if request.empty == "shrink":
        raise ConfigError(
            "partition=\"private\" takes datasets of any length, and empty='shrink' cannot share out their last"
            " samples: leave out empty"
        )
    if scheme.period is not None:
        if request.streams or request.uneven != "continue":
            raise ConfigError(
                f"the scheme {scheme.name!r} spreads each worker's samples over an epoch of as many iterations, so"
                " their number must be known: give loaders over map-style datasets and leave out uneven, or use lb-bsp,"
                " dbs or bsp"
            )
        return
    if scheme.micro_batch is not None:
        raise ConfigError(
            "accumulation and micro_batch cut slices of a dataset that all workers have, and here each has data of its"
            " own: leave them out"
        )
    if request.cost is not None:
        raise ConfigError(
            "cost= divides slices of a dataset that all workers have, and here each has data of its own: leave it out"
        )


def _require_servable(scheme: Scheme, request: RunRequest) -> None:
    require_servable_loader(scheme, request.loader)
    if len(request.models) > 1 or len(request.optimizers) > 1:
        raise ConfigError(
            f"the scheme {scheme.name!r} goes with one model and one optimizer, whose step is one push: train them one"
            " by one, or use a scheme without servers"
        )
    if request.comm_hook is not None:
        raise ConfigError(
            f"the scheme {scheme.name!r} sends gradients to servers, which a comm_hook never sees: leave out comm_hook"
        )
    if "__main__:" in scheme.name:
        raise ConfigError(
            f"the servers cannot import the recipe of {scheme.name!r} from the script that is run: move it to a module,"
            " and name the scheme as my_module:my_recipe"
        )
    named = parse_scheme(scheme.name)
    if scheme not in (named, in_batches(named, scheme.micro_batch or 1)):
        raise ConfigError(
            f"the servers know schemes by their strings, and {scheme.name!r} does not make this one: build it with a"
            " recipe such as evenstep.schemes.ssp"
        )


def _require_goes_with_shards(scheme: Scheme, request: RunRequest) -> None:
    """Refuse schemes and arguments for which one worker needs the whole model, or passes of its own."""
    if scheme.served is not None or scheme.period is not None:
        raise ConfigError(
            f"under the scheme {scheme.name!r} each worker has the whole model, and fully_shard leaves it a part: use"
            " lb-bsp, dbs, bsp or batch_sizes, or pass the plain model"
        )
    if request.comm_hook is not None:
        raise ConfigError("FSDP has no communication hook like DDP's: leave out comm_hook, or fully_shard")


def _require_one_pass_a_batch(request: RunRequest) -> None:
    """Refuse models whose passes involve other workers: with micro-batches, workers' numbers of passes differ."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in request.optimizers):
        raise ConfigError(
            "LBFGS calls its closure several times a step, and accumulation or micro_batch once: leave out one of them"
        )
    if len(request.models) > 1 or len(request.optimizers) > 1:
        raise ConfigError(
            "accumulation and micro_batch go with one model and one optimizer: leave them out, or train one by one"
        )
    norms = any(isinstance(module, torch.nn.SyncBatchNorm) for module in request.models[0].modules())
    if norms or is_sharded(request.models[0]):
        raise ConfigError(
            f"{'SyncBatchNorm' if norms else 'a model in fully_shard'} needs as many forward passes on every worker,"
            f" and accumulation or micro_batch gives each its own number: {'use GroupNorm, or ' * norms}leave them out"
        )
