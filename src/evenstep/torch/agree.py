"""Agrees with the other workers on what to train and how, before anything is built."""

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.core.load.checked import load_policy
from evenstep.core.load.limits import DEFAULT_MINIMUM
from evenstep.core.memory import size_after_failure
from evenstep.core.samples import Costs
from evenstep.core.values import UNLIMITED
from evenstep.schemes import Scheme
from evenstep.torch.costs import costs_of
from evenstep.torch.data.common_data import checksum_of
from evenstep.torch.data.order import EpochOrder, order_of
from evenstep.torch.failure import read_failure
from evenstep.torch.model import needed_batch
from evenstep.torch.processes.workers import Workers, exchange, gather
from evenstep.torch.refusals import (
    require_loader,
    require_private_possible,
    require_servable_loader,
    require_trainable,
)
from evenstep.torch.request import RunRequest
from evenstep.worker import agreement
from evenstep.worker.activity import Activity
from evenstep.worker.agreement import Agreed, Exchange, Own, hold_of, record_of, require_same, tell
from evenstep.worker.common_data import require_alike

_ADVICE: Final = (
    'give all workers the same dataset; or, for data that stay with their workers, partition="private";'
    ' or partition="common" if the datasets are the same'
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnLoader:
    """A loader of this worker, and its record for the other workers; `costs` of the samples if they differ."""

    order: EpochOrder
    costs: Costs | None
    record: dict[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of one loader, on which all workers agree.

    `depth`: how many iterations to fetch ahead; `even`: whether every worker must get samples; `lengths`: the length of
    each worker's dataset if datasets are private (`order` is then this worker's own); `costs`: the costs of the samples
    if they differ; `own`: when an epoch ends (`uneven`) if each worker draws from data of its own, as its sizes say;
    `told_private`: whether the script said that data are the workers' own, so that their samples are not compared;
    `needed_batch`: the fewest samples that this worker's models can compute on; `alike`: whether peers' batches are
    compared.
    """

    order: EpochOrder
    global_batch_size: int
    depth: int
    even: bool
    lengths: tuple[int, ...] | None = None
    own: str | None = None
    told_private: bool = False
    needed_batch: int = 1
    costs: Costs | None = None
    alike: bool = False


def agree(request: RunRequest, workers: Workers, activity: Activity) -> tuple[Agreed, Terms]:
    """Check this worker's settings, and that all workers have the same ones; all workers must call it together.

    Raises:
        ConfigError: Something cannot work, on this worker or on another one; the message names the worker.
        DisagreementError: The workers were given different things.
    """
    loader = cache(lambda: _own_loader(request, workers, request.asked_scheme()))
    agreed = agreement.agree(
        lambda: _check(request, workers, loader),
        _exchange(workers, activity),
        size=lambda scheme: request.whole_batch_size(scheme, loader().order.sampling, workers.count),
        usual=DEFAULT_MINIMUM if request.accumulation == 1 else 1,  # Batches have the script's own size.
    )
    _require_common(request, loader(), agreed.workers, workers, activity)
    return agreed, _terms(request, loader(), agreed.scheme, agreed.problem.global_batch_size, agreed.workers)


def agree_on_loader(request: RunRequest, workers: Workers, agreed: Agreed, first: Terms, activity: Activity) -> Terms:
    """Check the request's loader, which is not the session's first; all workers must call it together.

    Raises:
        ConfigError: The loader cannot be trained on, on this worker or on another one; the message names the worker.
        DisagreementError: The workers were given different loaders.
    """
    scheme = agreed.scheme

    def check() -> tuple[_OwnLoader, dict[str, Any]]:
        require_loader(request.loader, streams=True)
        own = _own_loader(request, workers, scheme)
        order = own.order
        if scheme.served is not None:
            require_servable_loader(scheme, request.loader)
            size = request.whole_batch_size(scheme, order.sampling, workers.count)
            known = first.order.length, first.global_batch_size, first.order.sampling.drop_last
            if (order.length, size, order.sampling.drop_last) != known:
                raise ConfigError(
                    f"a further loader has {order.length} samples, a global batch size of {size} and"
                    f" drop_last={order.sampling.drop_last}, and the servers know those of the first:"
                    f" {known[0]}, {known[1]} and {known[2]}. Give it the same, or use a scheme without servers"
                )
        return own, own.record

    own, records = tell(check, _exchange(workers, activity))
    require_same(records)
    _require_common(request, own, records, workers, activity)
    whole = request.whole_batch_size(scheme, own.order.sampling, workers.count)
    load_policy(scheme.load, workers.count).allocate(replace(agreed.problem, global_batch_size=whole))
    return _terms(request, own, scheme, whole, records)


def _own_loader(request: RunRequest, workers: Workers, scheme: Scheme) -> _OwnLoader:
    """Check the request's loader, and describe it."""
    order = order_of(request.loader, workers, request.seed)
    require_private_possible(request, scheme, order)
    costs = costs_of(request, scheme, order)
    loader, sampling = request.loader, order.sampling
    compared = workers.count > 1 and request.partition is None and not request.private
    checksum = checksum_of(loader) if compared and request.checksum is None else request.checksum
    common = {"dataset": order.dataset_length, "length": order.length}
    record = {
        "batch_size": sampling.batch_size,
        "global_batch_size": request.global_batch_size,
        **({"own_length": order.length} if request.private else common),
        "sampler": None if order.sampler is None else type(order.sampler).__name__,
        "drawn": order.sketch(in_order=scheme.served is not None) if compared else None,
        "replacement": order.pieces is not None and order.pieces.replacement,
        "shuffle": order.shuffle,
        "seed": order.seed,
        "drop_last": sampling.drop_last,
        "partition": "private" if request.private else request.partition,
        "uneven": request.uneven,
        "accumulation": request.accumulation,
        "samples": checksum if compared else 0,
        "cost": None if costs is None else costs.checksum,
        "depth": loader.num_workers * (loader.prefetch_factor or 0),
    }
    return _OwnLoader(order=order, costs=costs, record=record)


def _terms(
    request: RunRequest,
    own: _OwnLoader,
    scheme: Scheme,
    global_batch_size: int,
    records: Sequence[Mapping[str, Any]],
) -> Terms:
    order = own.order
    if scheme.load.by_epoch and order.endless and not request.draws_own(scheme):
        raise ConfigError(
            f"the scheme {scheme.name!r} changes sizes between epochs, and shares without a length are one epoch that"
            " never ends: give shares a length, or use lb-bsp"
        )
    even = request.empty != "copy" and not request.private
    if even and len(records) > 1 and scheme.served is None:
        if global_batch_size < 2 * len(records):
            raise ConfigError(
                f"empty='shrink' needs a global batch of at least 2 samples for each worker, and {global_batch_size}"
                f" are fewer for {len(records)} workers: raise the batch size, or leave out empty"
            )
        if order.length < len(records):
            raise ConfigError(
                f"an epoch of {order.length} samples leaves some of {len(records)} workers without any, which"
                " empty='shrink' rules out: start fewer workers, or leave out empty"
            )
    draws_own = request.draws_own(scheme)
    lengths = None
    if request.private and not draws_own:
        lengths = tuple(record["own_length"] for record in records)
    length = order.length if lengths is None else sum(lengths)
    # With drop_last the loader raises an error for this.
    if global_batch_size > length and not draws_own and not order.sampling.drop_last:
        warnings.warn(
            f"the global batch size {global_batch_size} is more than the {length} samples of an epoch, which"
            " is then a single iteration: lower the batch size or start fewer workers",
            stacklevel=6,
        )
    depth = max(record["depth"] for record in records)
    return Terms(
        order=order,
        global_batch_size=global_batch_size,
        depth=depth,
        even=even,
        lengths=lengths,
        own=request.uneven if draws_own else None,
        told_private=request.partition == "private",
        needed_batch=max(map(needed_batch, request.models)),
        costs=own.costs,
        alike=request.peers is not None and request.partition is None,
    )


def _exchange(workers: Workers, activity: Activity) -> Exchange:
    """The function that exchanges this worker's record for the records of all workers."""

    def told(record: Mapping[str, Any]) -> list[dict[str, Any]]:
        with activity.waiting():
            return exchange(workers, record)

    return told


def _require_common(
    request: RunRequest, own: _OwnLoader, records: Sequence[Mapping[str, Any]], workers: Workers, activity: Activity
) -> None:
    """Check that all processes have the same samples."""
    require = partial(require_alike, again=lambda: checksum_of(request.loader), advice=_ADVICE)
    if workers.peers is None:
        require([each["samples"] for each in records], _exchange(workers, activity), workers.rank)
        return
    processes = workers.processes
    with activity.waiting(), workers.peers.naming():
        told = gather(processes, {"samples": own.record["samples"]})
        require([each["samples"] for each in told], partial(gather, processes), processes.rank)


def _check(request: RunRequest, workers: Workers, own_loader: Callable[[], _OwnLoader]) -> Own:
    """Make all checks that need no other worker."""
    if request.mistake is not None:
        raise ConfigError(request.mistake)
    scheme = request.asked_scheme()
    require_trainable(request, workers, scheme)
    loader = own_loader()
    hold, emulated = hold_of(request.emulate, request.launched, rank=workers.rank, workers=workers.count)
    folder, identity = request.events_dir, device_identity(request.device, workers)
    failed = None if folder is None else read_failure(folder, identity)
    first = UNLIMITED if failed is None else size_after_failure(failed.samples, failed.largest_run)
    largest = UNLIMITED if hold is None else hold.largest_batch
    if scheme.micro_batch is not None:
        if scheme.micro_batch > largest or (failed is not None and scheme.micro_batch >= failed.samples):
            raise ConfigError(
                f"micro-batches of {scheme.micro_batch} samples do not fit into this worker's memory: lower micro_batch"
            )
        first = largest = UNLIMITED  # Any number of micro-batches fits.
    device = request.device
    told = record_of(scheme, host=workers.host, device=identity, hold=hold)
    if (found := request.found) is not None:
        # The largest batch that an earlier run with the same folder found for this worker.
        holds, by_cost = found.holds_of(told["identity"]), loader.costs is not None
        if holds is not None and len(found.workers) == workers.count and found.by_cost == by_cost:
            first = min(first, holds) if scheme.micro_batch is None else first
        elif request.automatic:
            raise ConfigError(
                f"what {request.run_folder} holds was measured of other workers, or with other costs: run evenstep plan"
                " again with the same run directory"
            )
    parameters = [parameter for model in request.models for parameter in model.parameters()]
    record = {
        **loader.record,
        **told,
        "empty": request.empty,
        # Peers have other parts of a model.
        "parameters": sum(parameter.numel() for parameter in parameters) if workers.peers is None else None,
        "shapes": None if workers.peers else zlib.crc32(repr([list(each.shape) for each in parameters]).encode()),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "smallest_batch": max(map(needed_batch, request.models)),
        "largest_batch": largest,
        "largest_first": first,
    }
    too_large = None if failed is None else failed.samples
    return Own(scheme=scheme, hold=hold, emulated=emulated, failed=too_large, record=record)


def device_identity(device: torch.device, workers: Workers) -> str:
    """A name that identifies this worker's device, also in later runs."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"{workers.host}, worker {workers.rank}"
