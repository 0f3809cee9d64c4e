"""The one line of a user's script: puts the parts together for this worker."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenstep.cluster import Cluster
from evenstep.core.activity import Doing
from evenstep.core.errors import ConfigError
from evenstep.core.load.limits import SizeLimits
from evenstep.launch.launch_settings import SUMMARY_FILE, VARIABLE, LaunchSettings
from evenstep.schemes import Scheme
from evenstep.telemetry import SCHEMA, JsonlRecorder, Logged, Recorder, Silent
from evenstep.telemetry.say import say
from evenstep.torch.accumulate import WindowedOptimizer, window_scheduler
from evenstep.torch.arguments import read_arguments
from evenstep.torch.data.loader import PreparedLoader
from evenstep.torch.device_memory import CudaMemory
from evenstep.torch.device_stopwatch import DeviceStopwatch
from evenstep.torch.engines.collective import CollectiveEngine, CommHook
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.local import LocalEngine
from evenstep.torch.engines.serve import served_engine, served_optimizer
from evenstep.torch.engines.served import ServedEngine
from evenstep.torch.failure import end_of_run, install_hook, when_failing
from evenstep.torch.model import device_of, replicate
from evenstep.torch.processes.join_servers import Joined, join_group, join_servers
from evenstep.torch.processes.join_workers import join_workers
from evenstep.torch.processes.liveness import Liveness, explaining
from evenstep.torch.processes.workers import Workers
from evenstep.torch.profiler import profiler_of, to_be_profiled
from evenstep.torch.request import Agreement, Request, agree, asked_scheme
from evenstep.worker.activity import Activity
from evenstep.worker.balancer import Balancer
from evenstep.worker.device_memory import EmulatedMemory, LearntLimit
from evenstep.worker.factors import FactorSampler
from evenstep.worker.hold import Hold
from evenstep.worker.servers.link import Link
from evenstep.worker.stopwatch import HostStopwatch
from evenstep.worker.summary import Summary

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...])


def prepare(
    model: torch.nn.Module | tuple[torch.nn.Module, ...],
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    scheme: Scheme | str | None = None,
    global_batch_size: int | None = None,
    batch_sizes: Sequence[int] | Mapping[Any, int] | None = None,
    seed: int = 0,
    timeout: float = 300.0,
    run_dir: str | os.PathLike[str] | None = None,
    comm_hook: CommHook | None = None,
    emulate: Cluster | str | os.PathLike[str] | None = None,
    schedulers: LRScheduler | Sequence[LRScheduler] | None = None,
) -> tuple[Any, Optimizer, PreparedLoader]:
    """Make an ordinary training loop run under a scheme; every worker calls it together, once.

    Explicit arguments win over those of `evenstep run`, and those over the default scheme, `lb-bsp`. A single process
    without torchrun simply works.

    Args:
        model: A plain model or one in DistributedDataParallel, or a tuple of them.
        optimizer: Its optimizer, or a tuple of them; the same objects come back.
        loader: A map-style DataLoader. Its `batch_size` is per worker, as under DDP: the global batch is that times the
            number of workers. Its sampler's shuffling, seed and `set_epoch` are heeded.
        scheme: A `Scheme`, or a string such as `lb-bsp:multiple=8`.
        global_batch_size: The samples of one iteration over all workers, instead of the loader's.
        batch_sizes: Fixed sizes with the right weights and no tuning: a list with one per worker, or a mapping from
            `rank:2`, `host:node7` or `gpu:NVIDIA GeForce RTX 3090` (where several fit a worker, the first of these).
        seed: Draws the order of the samples and their randomness; a DistributedSampler's own seed wins for the order.
        timeout: Seconds after which a worker that does not answer ends the run, with an error that names it.
        run_dir: Where every worker writes its events, as JSON lines.
        comm_hook: `(state, hook)`, an averaging DDP communication hook (compression, say) to use for the reduction.
        emulate: A cluster (or its TOML file) whose devices and disturbances are emulated on this one.
        schedulers: The optimizer's learning-rate schedulers. Needed where the scheme has micro-batches, of which each
            worker computes on another number: their `step` then does nothing before the last one of an iteration.

    Returns:
        The model as a `PreparedModel` (a tuple of them for a tuple) with the user's model in `.module`; the optimizer
        (in a wrapper where the scheme has micro-batches); the loader that hands out this worker's batches.

    Raises:
        ConfigError: Something asked for cannot work; raised on every worker where it is wrong on any.
        DisagreementError: The workers were started with different schemes, versions or data.
    """
    install_hook()
    _leave_mark(LaunchSettings.from_environment(os.environ).marks)
    activity = Activity()
    request = _request(
        loader,
        model=model,
        optimizer=optimizer,
        scheme=scheme,
        global_batch_size=global_batch_size,
        batch_sizes=batch_sizes,
        seed=seed,
        timeout=timeout,
        run_dir=run_dir,
        comm_hook=comm_hook,
        emulate=emulate,
        schedulers=schedulers,
    )
    if request.launched.profile is not None:
        request = to_be_profiled(request)
    joined: Joined | None = None
    servers, asked = _asked(request)
    if servers is not None:
        joined = join_servers(request.launched, servers, request.timeout, request.events_dir, activity, asked)
        workers = joined.workers
    else:
        device = device_of(request.models[0]) if request.models else torch.device("cpu")
        workers = join_workers(device, request.timeout, asked)
    # The pulse begins before the workers first wait for each other.
    liveness = Liveness(workers, activity) if joined is None and workers.count > 1 else None
    with explaining(liveness):
        agreement = agree(request, workers, activity)
    if joined is not None:
        join_group(joined, agreement.scheme, [each["host"] for each in agreement.workers])
    link = None if joined is None else joined.link
    summary = _summary(request, agreement, workers)
    recorder = Logged(summary or _kept(agreement, workers), workers.rank)
    with explaining(liveness):
        engine = _engine(request, workers, agreement, liveness, activity, recorder, link, summary)
    identity = agreement.workers[workers.rank]["device"]
    ends = partial(
        end_of_run, recorder=recorder, device=identity, advice=_advice(request, agreement), liveness=liveness
    )
    when_failing(engine.balancer, ends)
    if summary is not None:
        when_failing(summary, _without_summary)
    for each in request.optimizers:
        each.register_step_pre_hook(lambda stepped, *_: engine.before_step(stepped))
    if isinstance(engine, ServedEngine):
        optimizer = cast("Optimizer", served_optimizer(engine, optimizer))
    windowed: tuple[WindowedOptimizer, ...] = ()
    if agreement.scheme.micro_batch is not None:
        windowed = tuple(WindowedOptimizer(each, lambda: engine.balancer.iteration) for each in request.optimizers)
        for scheduler in request.schedulers:
            window_scheduler(scheduler, lambda: engine.synchronises)
        optimizer = cast("Optimizer", windowed if isinstance(optimizer, tuple) else windowed[0])
    with explaining(liveness):
        prepared = tuple(
            replicate(
                each, engine, index, comm_hook=comm_hook, accumulating=lambda: any(w.accumulating for w in windowed)
            )
            for index, each in enumerate(request.models)
        )
    profiler = profiler_of(request, agreement, engine.balancer, workers, recorder)
    prepared_loader = PreparedLoader(
        request.loader,
        order=agreement.order,
        engine=engine,
        global_batch_size=agreement.problem.global_batch_size,
        depth=agreement.depth,
        scheme=agreement.scheme.name,
        micro_batch=agreement.scheme.micro_batch,
        shares=engine.shares if profiler is None else profiler.shares,
        profiled=profiler is not None,
    )
    for each in request.optimizers:
        each.register_step_post_hook(lambda *_: prepared_loader.stepped())
    recorder.record(
        {
            "event": "run",
            "schema": SCHEMA,
            "at": time.perf_counter(),
            "unix_seconds": time.time(),
            "workers": workers.count,
            "scheme": agreement.scheme.name,
            "engine": "collective" if link is None else "server",
            "global_batch_size": agreement.problem.global_batch_size,
            "iterations_per_epoch": len(prepared_loader),
            "minimum": agreement.problem.minimum.tolist(),
            "maximum": agreement.problem.maximum.tolist(),
            "multiple": agreement.problem.multiple,
            "seed": request.seed,
            "emulated": agreement.emulation.device,
            **{
                key: agreement.workers[workers.rank][key]
                for key in ("version", "torch", "python", "host", "gpu", "device")
            },
        }
    )
    activity.mark(Doing.STEPPED, -1)
    return (prepared if isinstance(model, tuple) else prepared[0]), optimizer, prepared_loader


def _leave_mark(marks: str | None) -> None:
    """Tell the launcher that the script has called `prepare`."""
    if marks is not None:
        with suppress(OSError):  # Where a launcher is gone, so is its folder.
            Path(marks, os.environ.get("RANK", "0")).touch()


def _request(loader: DataLoader[Any], **given: object) -> Request:
    """The arguments of `prepare`, each of its type."""
    values, mistake = read_arguments(given)
    models, optimizers = values.pop("model"), values.pop("optimizer")
    launched = LaunchSettings.from_environment(os.environ)
    return Request(models=models, optimizers=optimizers, loader=loader, launched=launched, mistake=mistake, **values)


def _asked(request: Request) -> tuple[int | None, dict[str, object]]:
    """How many servers this worker is to join, None for none, and what the others are told of that when they meet."""
    try:
        scheme = asked_scheme(request)
    except ConfigError as error:
        # Where the launcher has started servers the others are there, and not in a process group.
        return len(request.launched.servers) or None, {"error": request.mistake or str(error)}
    servers = None if scheme.served is None else scheme.served.servers
    if request.mistake is not None:
        return servers, {"error": request.mistake}
    return servers, {"scheme": scheme.name, "servers": servers}


def _kept(agreement: Agreement, workers: Workers) -> Recorder:
    """Where this worker's events are kept."""
    if agreement.run_dir is None:
        return Silent()
    return JsonlRecorder(agreement.run_dir, workers.rank, last=lambda: {"event": "end", "at": time.perf_counter()})


def _summary(request: Request, agreement: Agreement, workers: Workers) -> Summary | None:
    """What says at the end how the run went: on the first worker, and on servers the first of those."""
    launched = VARIABLE in os.environ
    if workers.rank or request.launched.profile is not None or agreement.scheme.served is not None:
        return None
    if workers.count == 1 and not launched:
        return None
    return Summary(
        _kept(agreement, workers),
        workers=workers.count,
        global_batch_size=agreement.problem.global_batch_size,
        scheme=agreement.scheme.name,
        say=say if request.launched.marks is None else partial(_leave_line, request.launched.marks),
    )


def _without_summary(summary: Summary, error: BaseException) -> BaseException:
    summary.drop()
    return error


def _leave_line(marks: str, line: str) -> None:
    """Leave a line of the summary to the launcher, which learns whether the run failed."""
    with suppress(OSError), Path(marks, SUMMARY_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def _engine(
    request: Request,
    workers: Workers,
    agreement: Agreement,
    liveness: Liveness | None,
    activity: Activity,
    recorder: Recorder,
    link: Link | None,
    summary: Summary | None,
) -> Engine:
    clock, wait = time.perf_counter, time.sleep
    hold = None
    if agreement.emulation.disturbance is not None:
        hold = Hold(
            disturbance=agreement.emulation.disturbance,
            worker=workers.rank,
            largest_batch=agreement.emulation.largest_batch,
            memory=agreement.emulation.memory,
            clock=clock,
            wait=wait,
        )
    device = device_of(request.models[0])
    scheme = agreement.scheme
    estimator = scheme.load.estimator()
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    balancer = Balancer(
        workers=workers,
        policy=scheme.policy(workers.count),
        estimator=estimator,
        problem=agreement.problem,
        limits=SizeLimits(scheme.load, agreement.problem, agreement.limits),
        stopwatch=DeviceStopwatch() if device.type == "cuda" else HostStopwatch(clock),
        recorder=recorder,
        clock=clock,
        hold=hold,
        # What this machine has to give says nothing of an emulated device.
        factors=FactorSampler(threads=threads, clock=clock) if estimator.uses_factors and hold is None else None,
        memory=_learnt_limit(device, agreement),
        activity=activity,
        summary=summary,
    )
    models = [each.module if isinstance(each, DistributedDataParallel) else each for each in request.models]
    if link is not None:
        return served_engine(request, agreement, workers, balancer, link, clock)
    if scheme.period is not None:
        return LocalEngine(
            workers=workers,
            balancer=balancer,
            period=scheme.period,
            models=models,
            optimizers=request.optimizers,
            wait=wait,
            clock=clock,
            liveness=liveness,
        )
    return CollectiveEngine(
        workers=workers,
        balancer=balancer,
        scheme=scheme,
        models=models,
        optimizers=request.optimizers,
        wait=wait,
        clock=clock,
        liveness=liveness,
    )


def _learnt_limit(device: torch.device, agreement: Agreement) -> LearntLimit | None:
    """What learns the largest batch of this worker; None where its memory is not known, or bounds no batch."""
    if agreement.scheme.micro_batch is not None:
        return None
    failed = None if agreement.failed is None else agreement.failed.samples
    if agreement.emulation.memory is not None:
        return LearntLimit(EmulatedMemory(agreement.emulation.memory), failed=failed)
    if device.type == "cuda":
        return LearntLimit(CudaMemory(device), failed=failed)
    return None


def _advice(request: Request, agreement: Agreement) -> str:
    """What to do after a worker ran out of memory."""
    if agreement.scheme.micro_batch is not None:
        return "lower micro_batch"
    if request.batch_sizes is not None:
        return "give this worker a smaller one of the batch_sizes"
    if agreement.run_dir is None:
        return "give a run_dir (--run-dir), so that the next start knows, or a smaller global batch"
    return f"start again with the same run directory {agreement.run_dir}, and this worker's batches stay below it"
