"""What a script asks for, checked here and agreed on with the other workers before anything is built."""

import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import evenstep
from evenstep.cluster import Cluster, parse_slow
from evenstep.cluster.slowness import Chain, Disturbance
from evenstep.cluster.slowness.device_memory import DeviceMemory
from evenstep.core.disagreement import Field, require_agreement
from evenstep.core.errors import ConfigError
from evenstep.core.load.memory import size_after_failure
from evenstep.core.values import UNLIMITED, IntArray, Problem
from evenstep.launch.launch_settings import LaunchSettings, read_cluster, require_emulable
from evenstep.schemes import DEFAULT, Scheme, parse_scheme, placed, static
from evenstep.torch import model as models
from evenstep.torch.accumulate import require_schedulers_given
from evenstep.torch.batch_sizes import sizes_by_rank
from evenstep.torch.data import loader as loaders
from evenstep.torch.data.order import EpochOrder, order_of
from evenstep.torch.engines.collective import CommHook
from evenstep.torch.out_of_memory import Failure, read_failure
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.activity import Activity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `prepare`, with the launcher's options behind them.

    `mistake` is a sentence on the first wrong one of them, in whose place the default stands; None where none is.
    """

    models: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    loader: DataLoader[Any]
    scheme: Scheme | str | None
    global_batch_size: int | None
    batch_sizes: Sequence[int] | Mapping[Any, int] | None
    seed: int
    timeout: float
    run_dir: str | None
    comm_hook: CommHook | None
    emulate: Cluster | str | None
    schedulers: tuple[LRScheduler, ...]
    launched: LaunchSettings
    mistake: str | None = None

    @property
    def events_dir(self) -> Path | None:
        """Where events go: the argument's directory, or else the launcher's."""
        given = self.run_dir if self.run_dir is not None else self.launched.run_dir
        return None if given is None else Path(given)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What is not this worker's own: `disturbance`, None for none, and whether another `device` is among it.

    `largest_batch` is the limit that is known of that device, and `memory` the one that is not.
    """

    disturbance: Disturbance | None
    device: bool
    largest_batch: int
    memory: DeviceMemory | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What is the same on all workers (`scheme`, `problem`, `depth`), and what is specific to this one."""

    scheme: Scheme
    problem: Problem
    depth: int
    order: EpochOrder
    run_dir: Path | None
    emulation: Emulation
    failed: Failure | None
    limits: IntArray
    workers: list[dict[str, Any]]


_MUST_AGREE = {
    "version": Field(phrase="version {} of evenstep"),
    "scheme": Field(phrase="the scheme {}"),
    "batch_sizes": Field(phrase="batch_sizes of {}", none="no batch_sizes"),
    "batch_size": Field(
        phrase="a loader with a batch size of {}",
        then="start every worker with the same (sizes by worker are what batch_sizes= is for)",
    ),
    "global_batch_size": Field(phrase="a global_batch_size of {}", none="no global_batch_size"),
    "dataset": Field(phrase="a dataset of {} samples"),
    "length": Field(phrase="an epoch of {} samples"),
    "sampler": Field(phrase="a sampler {}", none="no custom sampler"),
    "shuffle": Field(phrase="shuffle={}"),
    "seed": Field(phrase="a seed of {} for the order of samples"),
    "drop_last": Field(phrase="drop_last={}"),
    "parameters": Field(phrase="a model of {} parameters"),
}


def agree(request: Request, workers: Workers, activity: Activity) -> Agreement:
    """Check what this worker was given, and that all were given the same; all workers must call it together.

    Raises:
        ConfigError: Something cannot work on this worker or on another, which is named.
        DisagreementError: The workers were given different things.
    """
    mine: _Checked | None = None
    failure: Exception | None = None
    try:
        mine = _check(request, workers)
    except Exception as error:  # Whatever it is, the others must not wait for this worker.
        failure = error
    with activity.waiting():
        records = gather(workers, {"error": _sentence(failure)} if mine is None else mine.record)
    if failure is not None:
        raise failure
    assert mine is not None
    for rank, record in enumerate(records):
        if "error" in record:
            raise ConfigError(f"worker {rank}: {record['error']}")
    require_agreement(records, _MUST_AGREE)
    scheme, global_batch_size = _settle_sizes(request, mine.scheme, records)
    scheme = placed(scheme, [record["host"] for record in records])
    problem = _problem(scheme, global_batch_size, records)
    # Refuse what cannot be shared out or grouped, on every worker alike.
    scheme.load.policy(workers.count).allocate(problem)
    scheme.sync.policy(workers.count)
    # With drop_last it is an error, which the loader raises.
    if global_batch_size > mine.order.length and not request.loader.drop_last:
        warnings.warn(
            f"the global batch size {global_batch_size} is more than the {mine.order.length} samples of an epoch, which"
            " is then a single iteration: lower the batch size or start fewer workers",
            stacklevel=4,
        )
    return Agreement(
        scheme=scheme,
        problem=problem,
        depth=max(record["depth"] for record in records),
        order=mine.order,
        run_dir=mine.run_dir,
        emulation=mine.emulation,
        failed=mine.failed,
        limits=_limits(scheme, records),
        workers=records,
    )


def _sentence(failure: Exception | None) -> str:
    """What the other workers are told; the error of a user's dataset or sampler says less without its type."""
    return str(failure) if isinstance(failure, ConfigError) else f"{type(failure).__name__}: {failure}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    scheme: Scheme
    order: EpochOrder
    run_dir: Path | None
    emulation: Emulation
    failed: Failure | None
    record: dict[str, Any]
    """What the other workers are told, as JSON."""


def _check(request: Request, workers: Workers) -> _Checked:
    """Everything that one worker can check alone."""
    if request.mistake is not None:
        raise ConfigError(request.mistake)
    for model in request.models:
        models.require_preparable(model, workers)
    loader = loaders.require_preparable(request.loader)
    _require_optimizes(request, workers)
    scheme = asked_scheme(request)
    _require_goes_with(scheme, request)
    order = order_of(loader, workers, request.seed)
    emulation = _emulation(request, workers)
    run_dir = request.events_dir
    device = models.device_of(request.models[0])
    failed = None if run_dir is None else read_failure(run_dir, device_identity(device, workers))
    _require_micro_batch_fits(scheme, emulation.largest_batch, failed)
    sizes = request.batch_sizes
    return _Checked(
        scheme=scheme,
        order=order,
        run_dir=run_dir,
        emulation=emulation,
        failed=failed,
        record={
            "version": evenstep.__version__,
            "scheme": scheme.name,
            "batch_sizes": {str(k): v for k, v in sizes.items()} if isinstance(sizes, Mapping) else sizes,
            "batch_size": loader.batch_size,
            "global_batch_size": request.global_batch_size,
            "dataset": order.dataset_length,
            "length": order.length,
            "sampler": None if order.sampler is None else type(order.sampler).__name__,
            "shuffle": order.shuffle,
            "seed": order.seed,
            "drop_last": loader.drop_last,
            "parameters": sum(parameter.numel() for model in request.models for parameter in model.parameters()),
            "rank": str(workers.rank),
            "host": workers.host,
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": device_identity(device, workers),
            # A worker that computes on micro-batches can be given any number of them.
            "largest_batch": UNLIMITED if scheme.micro_batch else emulation.largest_batch,
            "largest_first": UNLIMITED
            if scheme.micro_batch or failed is None
            else size_after_failure(failed.samples, failed.largest_run),
            "depth": loader.num_workers * (loader.prefetch_factor or 0),
            "smallest_batch": max(models.smallest_batch(model) for model in request.models),
        },
    )


def _require_optimizes(request: Request, workers: Workers) -> None:
    trained = {id(parameter) for model in request.models for parameter in model.parameters()}
    for optimizer in request.optimizers:
        if not any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError("the optimizer has no parameter of the model: build it from model.parameters()")
        if isinstance(optimizer, torch.optim.LBFGS) and workers.count > 1:
            raise ConfigError(
                "LBFGS calls its closure as often as this worker's own loss tells it to, so the workers would part: use"
                " another optimizer, or one process"
            )


def _require_goes_with(scheme: Scheme, request: Request) -> None:
    """Refuse arguments that do not work with the scheme."""
    if scheme.micro_batch is not None:
        require_schedulers_given(request.optimizers, request.schedulers)
        _require_one_pass_a_batch(request)
    if scheme.served is not None:
        _require_servable(scheme, request)
    if any(models.is_sharded(model) for model in request.models):
        _require_goes_with_shards(scheme, request)
    if scheme.period is not None and request.comm_hook is not None:
        raise ConfigError(
            f"the scheme {scheme.name!r} sends no gradients for comm_hook to compress: leave out one of them"
        )


def _require_servable(scheme: Scheme, request: Request) -> None:
    """What parameter servers cannot do yet, or at all."""
    if len(request.models) > 1 or len(request.optimizers) > 1:
        raise ConfigError(
            f"the scheme {scheme.name!r} goes with one model and one optimizer, whose step is one push: train them one"
            " by one, or use a scheme without servers"
        )
    if request.comm_hook is not None:
        raise ConfigError(
            f"the scheme {scheme.name!r} sends gradients to servers, which a comm_hook never sees: leave out comm_hook"
        )
    if parse_scheme(scheme.name) != scheme:
        raise ConfigError(
            f"the servers know schemes by their strings, and {scheme.name!r} does not make this one: build it with a"
            " recipe such as evenstep.ssp"
        )


def _require_goes_with_shards(scheme: Scheme, request: Request) -> None:
    """No worker has the whole of a sharded model, and all are needed for every pass."""
    if scheme.served is not None or scheme.period is not None:
        raise ConfigError(
            f"under the scheme {scheme.name!r} each worker has the whole model, and fully_shard leaves it a part: use"
            " lb-bsp, dbs, bsp or batch_sizes, or pass the plain model"
        )
    if scheme.micro_batch is not None:
        raise ConfigError(
            "a model in fully_shard needs as many forward passes on every worker, and micro_batch gives each its own"
            " number: leave out micro_batch"
        )
    if request.comm_hook is not None:
        raise ConfigError("FSDP has no communication hook like DDP's: leave out comm_hook, or fully_shard")


def _require_one_pass_a_batch(request: Request) -> None:
    """With micro-batches, a worker does not do as many forward and backward passes as the others."""
    if len(request.models) > 1 or len(request.optimizers) > 1:
        raise ConfigError("micro_batch goes with one model and one optimizer: leave it out, or train them one by one")
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in request.models[0].modules()):
        raise ConfigError(
            "SyncBatchNorm needs as many forward passes on every worker, and micro_batch gives each its own number: use"
            " GroupNorm, or leave out micro_batch"
        )


def asked_scheme(request: Request) -> Scheme:
    """The requested scheme; with `batch_sizes` it is determined once all workers are known."""
    given = request.scheme if request.scheme is not None or request.batch_sizes is not None else request.launched.scheme
    scheme = parse_scheme(given) if isinstance(given, str) else given
    if request.batch_sizes is not None and scheme is not None:
        raise ConfigError(
            f"batch_sizes fixes the sizes and the scheme {scheme.name!r} would set them: give one of them"
        )
    return scheme if scheme is not None else parse_scheme(DEFAULT)


def device_identity(device: torch.device, workers: Workers) -> str:
    """What tells this worker's device from others, in the next run too."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"{workers.host}, worker {workers.rank}"


def _require_micro_batch_fits(scheme: Scheme, largest_batch: int, failed: Failure | None) -> None:
    too_large = UNLIMITED if failed is None else failed.samples
    if scheme.micro_batch is not None and (scheme.micro_batch > largest_batch or scheme.micro_batch >= too_large):
        raise ConfigError(
            f"micro-batches of {scheme.micro_batch} samples do not fit into this worker's memory: lower micro_batch"
        )


def _emulation(request: Request, workers: Workers) -> Emulation:
    """What disturbs this worker."""
    parts: list[Disturbance] = []
    largest_batch, memory, device = UNLIMITED, None, False
    emulate = request.emulate if request.emulate is not None else request.launched.emulate
    if emulate is not None:
        cluster = emulate if isinstance(emulate, Cluster) else read_cluster(Path(emulate))
        if len(cluster) != workers.count:
            raise ConfigError(
                f"the cluster to emulate describes {len(cluster)} workers but {workers.count} were started:"
                " make them the same"
            )
        require_emulable(cluster)
        parts.append(cluster.disturbance())
        largest_batch, memory = cluster.largest_batch(workers.rank), cluster.memory(workers.rank)
        device = cluster.workers[workers.rank].device is not None
    for text in request.launched.slow:
        slow = parse_slow(text)
        if slow.worker is not None and slow.worker >= workers.count:
            raise ConfigError(f"--slow {text} names worker {slow.worker} but the last one is {workers.count - 1}")
        parts.append(slow)
    disturbance = Chain(parts=tuple(parts)) if parts else None
    return Emulation(disturbance=disturbance, device=device, largest_batch=largest_batch, memory=memory)


def _settle_sizes(request: Request, scheme: Scheme, records: list[dict[str, Any]]) -> tuple[Scheme, int]:
    """The scheme and the global batch size."""
    if request.batch_sizes is None:
        default = int(records[0]["batch_size"]) * len(records)
        return scheme, default if request.global_batch_size is None else request.global_batch_size
    sizes = sizes_by_rank(request.batch_sizes, records)
    if request.global_batch_size not in (None, sum(sizes)):
        raise ConfigError(
            f"batch_sizes adds up to {sum(sizes)}, not to the global batch size {request.global_batch_size}:"
            " leave out global_batch_size or correct the sizes"
        )
    return static(sizes), sum(sizes)


def _problem(scheme: Scheme, global_batch_size: int, records: list[dict[str, Any]]) -> Problem:
    count = len(records)
    load = scheme.load
    smallest = max(record["smallest_batch"] for record in records)
    minimum = smallest if load.minimum is None else load.minimum
    if global_batch_size < count * minimum:
        raise ConfigError(
            f"the global batch size {global_batch_size} is less than {count} workers with at least {minimum} sample"
            f"{'s' if minimum > 1 else ''} each: raise the batch size or start fewer workers"
        )
    first = np.array([record["largest_first"] for record in records], dtype=np.int64)
    return Problem(
        global_batch_size=global_batch_size,
        minimum=np.full(count, minimum, dtype=np.int64),
        maximum=np.minimum(_limits(scheme, records), first),
        multiple=load.multiple,
    )


def _limits(scheme: Scheme, records: list[dict[str, Any]]) -> IntArray:
    """The limits of the sizes that are known before training; int64 of shape [workers]."""
    largest = np.array([record["largest_batch"] for record in records], dtype=np.int64)
    return largest if scheme.load.maximum is None else np.minimum(largest, scheme.load.maximum)
