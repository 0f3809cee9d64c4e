"""Agrees with the other workers on what to train and how, before anything is built."""

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import msgspec
import torch

import evenstep
from evenstep.core.disagreement import Field, require_agreement
from evenstep.core.errors import ConfigError
from evenstep.core.load.checked import load_policy
from evenstep.core.load.limits import DEFAULT_MINIMUM
from evenstep.core.memory import size_after_failure
from evenstep.core.samples import Costs
from evenstep.core.sync.checked import sync_policy
from evenstep.core.values import UNLIMITED, IntArray, Problem
from evenstep.schemes import Scheme, placed
from evenstep.torch.costs import costs_of
from evenstep.torch.data.order import EpochOrder, order_of
from evenstep.torch.data.sampling import Sampling
from evenstep.torch.data.sketch import require_common, sketch_of
from evenstep.torch.failure import Failure, read_failure
from evenstep.torch.model import needed_batch
from evenstep.torch.processes.workers import Workers, gather
from evenstep.torch.refusals import (
    require_loader,
    require_private_possible,
    require_servable_loader,
    require_trainable,
)
from evenstep.torch.request import Request
from evenstep.worker.activity import Activity
from evenstep.worker.agreement import hold_of, limits_of, problem_of, tell
from evenstep.worker.earlier import earlier_start, identity_of
from evenstep.worker.hold import Hold

_MUST_AGREE: Final = {
    "version": Field(phrase="version {} of evenstep"),
    "scheme": Field(phrase="the scheme {}"),
    "batch_size": Field(
        phrase="a loader with a batch size of {}",
        then="start every worker with the same (sizes by worker are what batch_sizes= is for)",
    ),
    "global_batch_size": Field(phrase="a global_batch_size of {}", none="no global_batch_size"),
    "dataset": Field(phrase="a dataset of {} samples"),
    "length": Field(phrase="an epoch of {} samples"),
    "sampler": Field(phrase="a sampler {}", none="no custom sampler"),
    "drawn": Field(
        phrase="a sampler that draws {}",
        then="evenstep shares out what all are to have, so give every worker the same sampler, for all of the samples"
        " (as for a single process: num_replicas=1, rank=0) and seeded alike",
    ),
    "replacement": Field(phrase="replacement={}"),
    "empty": Field(phrase="empty={}"),
    "shuffle": Field(phrase="shuffle={}"),
    "seed": Field(phrase="a seed of {} for the order of samples"),
    "drop_last": Field(phrase="drop_last={}"),
    "partition": Field(phrase="partition={}", none="no partition"),
    "cost": Field(phrase="costs of samples with the checksum {}", none="no costs of samples"),
    "parameters": Field(phrase="a model of {} parameters"),
    "shapes": Field(phrase="parameters whose shapes have the checksum {}"),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What this worker was given.

    `hold` emulates slowness, and if `emulated` the memory of another device. `failed` is the batch that this worker's
    device could not hold in an earlier run, if any.
    """

    scheme: Scheme
    order: EpochOrder
    costs: Costs | None
    hold: Hold | None
    emulated: bool
    failed: Failure | None
    record: dict[str, Any]
    """What the other workers are told, as JSON."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is the same on all workers about one loader.

    `depth`: how many iterations to fetch ahead; `even`: whether no worker may be without samples; `lengths`: the
    samples of each worker's own dataset, if they are private, while `order` is this worker's; `costs`: of the samples,
    if they differ.
    """

    order: EpochOrder
    global_batch_size: int
    depth: int
    even: bool
    lengths: tuple[int, ...] | None = None
    costs: Costs | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What is the same on all workers, and this worker's `own` part.

    `terms`: those of the first loader; `limits`: the largest batch of each worker if known, shape [workers];
    `workers`: the records of all workers.
    """

    scheme: Scheme
    problem: Problem
    terms: Terms
    limits: IntArray
    workers: list[dict[str, Any]]
    own: Own


def agree(request: Request, workers: Workers, activity: Activity) -> Agreement:
    """Check what this worker was given, and that all were given the same; all workers must call it together.

    Raises:
        ConfigError: Something cannot work on this worker or on another, which is named.
        DisagreementError: The workers were given different things.
    """
    exchange = _exchange(workers, activity)
    own, records = tell(lambda: _check(request, workers), exchange)
    require_agreement(records, _fields(own.record))
    require_common(request.loader, records, exchange, workers.rank)
    scheme = placed(own.scheme, [record["host"] for record in records], [record["gpu"] for record in records])
    global_batch_size = _global_batch_size(request, scheme, own.order.sampling, workers.count)
    limits = limits_of(scheme, records)
    problem = problem_of(scheme, global_batch_size, limits, records, usual=DEFAULT_MINIMUM)
    # Refuse what cannot be shared out or grouped, on every worker alike.
    load_policy(scheme.load, workers.count).allocate(problem)
    sync_policy(scheme.sync, workers.count)
    terms = _terms(request, own, scheme, global_batch_size, records)
    return Agreement(scheme=scheme, problem=problem, terms=terms, limits=limits, workers=records, own=own)


def agree_on_loader(request: Request, workers: Workers, first: Agreement, activity: Activity) -> Terms:
    """Check a further loader, that of this request; all workers must call it together.

    Raises:
        ConfigError: It cannot be trained on, on this worker or on another, which is named.
        DisagreementError: The workers were given different ones.
    """
    exchange = _exchange(workers, activity)
    own, records = tell(lambda: _check_loader(request, workers, first), exchange)
    require_agreement(records, _fields(own.record))
    require_common(request.loader, records, exchange, workers.rank)
    scheme = first.scheme
    whole = _global_batch_size(request, scheme, own.order.sampling, workers.count)
    load_policy(scheme.load, workers.count).allocate(replace(first.problem, global_batch_size=whole))
    return _terms(request, own, scheme, whole, records)


def _fields(own: Mapping[str, Any]) -> dict[str, Field]:
    """What must agree of records like this one."""
    differ = ("dataset", "length") if own["partition"] == "private" else ()
    return {key: field for key, field in _MUST_AGREE.items() if key in own and key not in differ}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnLoader:
    """A further loader of this worker, and what the other workers are told about it."""

    order: EpochOrder
    costs: Costs | None
    record: dict[str, Any]


def _check_loader(request: Request, workers: Workers, first: Agreement) -> _OwnLoader:
    require_loader(request.loader)
    order = order_of(request.loader, workers, request.seed)
    require_private_possible(request, first.scheme, order)
    if first.scheme.served is not None:
        require_servable_loader(first.scheme, request.loader)
        size = _global_batch_size(request, first.scheme, order.sampling, workers.count)
        known = first.terms.order.length, first.terms.global_batch_size, first.terms.order.sampling.drop_last
        if (order.length, size, order.sampling.drop_last) != known:
            raise ConfigError(
                f"a further loader has {order.length} samples, a global batch size of {size} and"
                f" drop_last={order.sampling.drop_last}, and the servers know those of the first:"
                f" {known[0]}, {known[1]} and {known[2]}. Give it the same, or use a scheme without servers"
            )
    costs = costs_of(request, first.scheme, order)
    return _OwnLoader(order=order, costs=costs, record=_loader_record(request, order, workers, costs))


def _require_end(scheme: Scheme, order: EpochOrder) -> None:
    """Check that sizes which change between epochs have epochs to change between."""
    if scheme.load.by_epoch and order.endless:
        raise ConfigError(
            f"the scheme {scheme.name!r} changes sizes between epochs, and shares without a length are one epoch that"
            " never ends: give shares a length, or use lb-bsp"
        )


def _terms(
    request: Request,
    own: Own | _OwnLoader,
    scheme: Scheme,
    global_batch_size: int,
    records: Sequence[Mapping[str, Any]],
) -> Terms:
    order = own.order
    _require_end(scheme, order)
    even = request.empty == "shrink"
    if even and len(records) > 1 and scheme.served is None:
        _require_samples_for_all(order, global_batch_size, len(records))
    lengths = tuple(record["length"] for record in records) if request.partition == "private" else None
    length = order.length if lengths is None else sum(lengths)
    # With drop_last this is an error, which the loader raises.
    if global_batch_size > length and not order.sampling.drop_last:
        warnings.warn(
            f"the global batch size {global_batch_size} is more than the {length} samples of an epoch, which"
            " is then a single iteration: lower the batch size or start fewer workers",
            stacklevel=6,
        )
    depth = max(record["depth"] for record in records)
    return Terms(
        order=order, global_batch_size=global_batch_size, depth=depth, even=even, lengths=lengths, costs=own.costs
    )


def _exchange(workers: Workers, activity: Activity) -> Callable[[Mapping[str, Any]], list[dict[str, Any]]]:
    """Exchanges this worker's record for those of all."""

    def exchange(record: Mapping[str, Any]) -> list[dict[str, Any]]:
        with activity.waiting():
            return gather(workers, record)

    return exchange


def _check(request: Request, workers: Workers) -> Own:
    """Check everything that one worker can check alone."""
    if request.mistake is not None:
        raise ConfigError(request.mistake)
    scheme = request.asked_scheme()
    require_trainable(request, workers, scheme)
    order = order_of(request.loader, workers, request.seed)
    require_private_possible(request, scheme, order)
    costs = costs_of(request, scheme, order)
    hold, emulated = hold_of(request.emulate, request.launched, rank=workers.rank, workers=workers.count)
    folder = request.events_dir
    failed = None if folder is None else read_failure(folder, device_identity(request.device, workers))
    first = UNLIMITED if failed is None else size_after_failure(failed.samples, failed.largest_run)
    largest = UNLIMITED if hold is None else hold.largest_batch
    if scheme.micro_batch is not None:
        if scheme.micro_batch > largest or (failed is not None and scheme.micro_batch >= failed.samples):
            raise ConfigError(
                f"micro-batches of {scheme.micro_batch} samples do not fit into this worker's memory: lower micro_batch"
            )
        first = largest = UNLIMITED  # Any number of micro-batches fits.
    identity = identity_of(device_identity(request.device, workers), hold)
    found = _found_limit(request, identity, workers, by_cost=costs is not None)
    first = first if scheme.micro_batch is not None else min(first, found)
    record = {
        **_record(request, workers, scheme, order, costs),
        "largest_batch": largest,
        "largest_first": first,
        "identity": identity,
        "earlier": earlier_start(request.launched, folder, workers.rank),
    }
    return Own(scheme=scheme, order=order, costs=costs, hold=hold, emulated=emulated, failed=failed, record=record)


def _found_limit(request: Request, identity: str, workers: Workers, *, by_cost: bool) -> int:
    """The largest batch that an earlier run into the same folder has found for this worker; UNLIMITED if none has.

    Raises:
        ConfigError: It has found the global batch size for other workers.
    """
    found = request.found
    if found is None:
        return UNLIMITED
    holds = found.holds_of(identity)
    if holds is not None and len(found.workers) == workers.count and found.by_cost == by_cost:
        return holds
    if request.automatic:
        raise ConfigError(
            f"what {request.run_folder} holds was found for other workers, or with other costs: run evenstep run"
            " --find-batch again with the same run directory"
        )
    return UNLIMITED


def _record(
    request: Request, workers: Workers, scheme: Scheme, order: EpochOrder, costs: Costs | None
) -> dict[str, Any]:
    device = request.device
    parameters = [parameter for model in request.models for parameter in model.parameters()]
    return {
        **_loader_record(request, order, workers, costs),
        "version": evenstep.__version__,
        "scheme": scheme.name,
        "empty": request.empty,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "shapes": zlib.crc32(repr([list(parameter.shape) for parameter in parameters]).encode()),
        "host": workers.host,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "device": device_identity(device, workers),
        "smallest_batch": max(needed_batch(model) for model in request.models),
    }


def _loader_record(request: Request, order: EpochOrder, workers: Workers, costs: Costs | None) -> dict[str, Any]:
    loader, sampling = request.loader, order.sampling
    compared = workers.count > 1 and request.partition is None
    return {
        "batch_size": sampling.batch_size,
        "global_batch_size": request.global_batch_size,
        "dataset": order.dataset_length,
        "length": order.length,
        "sampler": None if order.sampler is None else type(order.sampler).__name__,
        "drawn": order.sketch() if compared else None,
        "replacement": order.pieces is not None and order.pieces.replacement,
        "shuffle": order.shuffle,
        "seed": order.seed,
        "drop_last": sampling.drop_last,
        "partition": request.partition,
        "sketch": msgspec.to_builtins(sketch_of(loader)) if compared else (),
        "cost": None if costs is None else costs.checksum,
        "depth": loader.num_workers * (loader.prefetch_factor or 0),
    }


def device_identity(device: torch.device, workers: Workers) -> str:
    """What tells this worker's device from others, in the next run too."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"{workers.host}, worker {workers.rank}"


def _global_batch_size(request: Request, scheme: Scheme, sampling: Sampling, workers: int) -> int:
    given, size = scheme.load.given_sizes, sampling.global_batch_size(workers)
    of_shares = size if sampling.whole and not sampling.lists else None
    if request.global_batch_size is not None:
        if of_shares not in (None, request.global_batch_size):
            raise ConfigError(
                f"shares was asked for a global batch size of {size}, and the session for"
                f" {request.global_batch_size}: leave out that of the session"
            )
        return request.global_batch_size
    if given is not None and of_shares is None:
        return sum(given)
    if size is None:
        raise ConfigError(
            f"the loader's batch sampler {type(sampling.sampler).__name__} does not say how long its lists are,"
            " which are the global batches: give prepare the length of the longest as global_batch_size, or the sampler"
            " a batch_size"
        )
    return size


def _require_samples_for_all(order: EpochOrder, global_batch_size: int, workers: int) -> None:
    """Check that no slice leaves a worker without samples."""
    if global_batch_size < 2 * workers:
        raise ConfigError(
            f"empty='shrink' needs a global batch of at least 2 samples for each worker, and {global_batch_size} are"
            f" fewer for {workers} workers: raise the batch size, or leave out empty"
        )
    if order.length < workers:
        raise ConfigError(
            f"an epoch of {order.length} samples leaves some of {workers} workers without any, which empty='shrink'"
            " rules out: start fewer workers, or leave out empty"
        )
