"""A started session: this worker joins the others, agrees with them, and binds the script's objects to an engine."""

import os
import platform
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evenstep.core.activity import Doing
from evenstep.core.errors import ConfigError, naming
from evenstep.core.load.limits import SizeLimits
from evenstep.core.load.narx import Narx
from evenstep.launch.launch_settings import VARIABLE, VARIABLES
from evenstep.launch.marks import leave_line, leave_mark
from evenstep.protocol.run_spec import RunSpec
from evenstep.schemes import Served
from evenstep.telemetry import SCHEMA, JsonlRecorder, Logged, Silent
from evenstep.telemetry.events import Ended, Run
from evenstep.telemetry.say import say
from evenstep.torch.agree import Terms, agree, agree_on_loader
from evenstep.torch.cuda import CudaMemory, DeviceStopwatch
from evenstep.torch.data.loop import Bound, Loop
from evenstep.torch.engines.collective import CollectiveEngine
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.known_parameters import KnownParameters, OtherOptimizers, check_step
from evenstep.torch.engines.local import LocalEngine
from evenstep.torch.failure import RunEnd, forget_failing, install_hook, when_failing
from evenstep.torch.gathering import GatherGuard
from evenstep.torch.model import PreparedModel, bind, forget, unwrapped
from evenstep.torch.optimizers import ServedOptimizer, WindowedOptimizer, window_scheduler
from evenstep.torch.processes.join_workers import join_workers
from evenstep.torch.processes.liveness import Liveness, explaining
from evenstep.torch.profiler import probe_of, profiler_of, to_be_profiled
from evenstep.torch.request import Request
from evenstep.worker.activity import Activity
from evenstep.worker.agreement import tells_plans
from evenstep.worker.device_memory import EmulatedMemory, LearntLimit
from evenstep.worker.earlier import first_policy, last_sizes
from evenstep.worker.factors import FactorSampler
from evenstep.worker.meter import Meter
from evenstep.worker.servers.link import Link
from evenstep.worker.stopwatch import HostStopwatch
from evenstep.worker.summary import Summary
from evenstep.worker.tracker import Tracker

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from torch.utils.hooks import RemovableHandle

    from evenstep.torch.engines.served import ServedEngine


@final
class Running:
    """One worker's part in a run: all workers start it together.

    Args:
        request: What the script asks for, with the first loader.
        loaders: All loaders of the session so far.

    Raises:
        ConfigError: Something asked for cannot work; raised on every worker if it is wrong on any.
        DisagreementError: The workers were started with different schemes, versions or data.
    """

    def __init__(self, request: Request, loaders: Sequence[Loop]) -> None:
        install_hook()
        leave_mark(request.launched, os.environ.get("RANK", "0"))
        self._request = to_be_profiled(request) if request.launched.measures else request
        self._activity = Activity()
        self._windowed: tuple[WindowedOptimizer, ...] = ()
        self._hooks: list[RemovableHandle | GatherGuard] = []
        self._loaders: dict[int, tuple[DataLoader[Any], Terms]] = {}
        link = self._join(loaders)
        self._summary = self._summary_of()
        self._recorder = Logged(self._kept(), self._workers.rank)
        with explaining(self._liveness):
            self._engine = self._engine_of(link)
        self._end_with_run()
        self._profiler = profiler_of(
            self._request, self._agreement, self._engine.balancer, self._workers, self._recorder
        )

    def _join(self, loaders: Sequence[Loop]) -> Link | None:
        """Join the other workers and agree with them; the link to the servers, if the scheme has any."""
        request, activity = self._request, self._activity
        servers, asked = _asked(request)
        joined = None
        if servers is not None:
            # Imported here, as most schemes have no servers, and a start is mostly imports.
            from evenstep.torch.processes.join_servers import join_group, join_servers

            joined = join_servers(request.launched, servers, request.timeout, request.events_dir, activity, asked)
            workers = joined.workers
        else:
            workers = join_workers(request.device, request.timeout, asked, request.process_group)
        self._workers = workers
        # The pulse starts before the workers first wait for each other.
        alone = joined is not None or workers.count == 1
        self._liveness = None if alone else Liveness(workers, activity, request.launched.heartbeat_seconds)
        with explaining(self._liveness):
            self._agreement = agree(request, workers, activity)
            for loader in loaders:
                self._agree_on(loader)
        if joined is None:
            return None
        join_group(joined, self._agreement.scheme, [each["host"] for each in self._agreement.workers])
        return joined.link

    def bind_models(self, prepared: Sequence[PreparedModel]) -> None:
        """From now on these models, of the request's, synchronise gradients."""
        with explaining(self._liveness):
            for index, (model, each) in enumerate(zip(self._request.models, prepared, strict=True)):
                bind(
                    each,
                    model,
                    self._engine,
                    index,
                    comm_hook=self._request.comm_hook,
                    accumulating=lambda: any(each.accumulating for each in self._windowed),
                )

    def bind_optimizers(self, prepared: Sequence[torch.optim.Optimizer]) -> None:
        """From now on steps of these optimizers are checked, pushed to servers, or wait for the last micro-batch."""
        engine, known = self._engine, KnownParameters(self._request.models)
        for each in self._request.optimizers:
            self._hooks.append(each.register_step_pre_hook(partial(check_step, engine, known)))
            if type(engine).after_step is not Engine.after_step:
                self._hooks.append(each.register_step_post_hook(lambda stepped, *_: engine.after_step(stepped)))
        if engine.workers.count > 1:
            self._others = OtherOptimizers(engine, known, [*self._request.optimizers, *prepared])
            self._hooks.append(register_optimizer_step_pre_hook(self._others.hook()))
        for wrapped in prepared:
            if isinstance(wrapped, ServedOptimizer):
                from evenstep.torch.engines.served import ServedEngine

                assert isinstance(engine, ServedEngine)
                wrapped.bind(engine)
            elif isinstance(wrapped, WindowedOptimizer):
                wrapped.bind(lambda: engine.balancer.iteration)
                self._windowed = (*self._windowed, wrapped)
        if self._windowed:
            for scheduler in self._request.schedulers:
                window_scheduler(scheduler, lambda: engine.synchronises)

    def _agree_on(self, loader: Loop) -> None:
        """Agree with the other workers on this loader; the first one is part of the agreement."""
        request = self._request
        if not self._loaders:
            self._loaders[loader.number] = request.loader, self._agreement.terms
            return
        request = replace(request, loader=loader.source, cost=loader.cost)
        if request.launched.measures:
            request = to_be_profiled(request)
        terms = agree_on_loader(request, self._workers, self._agreement, self._activity)
        self._loaders[loader.number] = request.loader, terms

    def bind_loader(self, loader: Loop) -> None:
        """From now on this loader hands out this worker's batches. All workers must bind it together.

        Raises:
            ConfigError: It came after the start of a session on servers.
        """
        engine, scheme = self._engine, self._agreement.scheme
        if loader.number not in self._loaders:
            if scheme.served is not None:
                raise ConfigError(
                    f"under the scheme {scheme.name!r} all loaders must be known before the first batch: give them to"
                    " session.loader first"
                )
            with explaining(self._liveness):
                self._agree_on(loader)
        source, terms = self._loaders[loader.number]
        shares = engine.shares if self._profiler is None else self._profiler.shares
        if terms.lengths is not None:
            shares = partial(engine.balancer.private_shares, terms.lengths)
        profiled = self._profiler is not None
        loader.bind(source, Bound(terms=terms, scheme=scheme, engine=engine, shares=shares, profiled=profiled))
        for each in self._request.optimizers:
            self._hooks.append(each.register_step_post_hook(partial(_stepped, weakref.ref(loader))))

    def begin(self, iterations: int) -> None:
        """Everything is bound; an epoch of the first loader has this many iterations."""
        self._record_run(iterations)
        self._activity.mark(Doing.STEPPED, -1)

    def waits(self) -> None:
        """Until the next forward pass nothing is computed."""
        self._engine.balancer.stopwatch.pause()

    def close(self) -> None:
        """End the run on this worker, and remove every hook and mark from the script's objects."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._engine.close()
        forget_failing(self._engine.balancer)
        for model in self._request.models:
            forget(model)

    # Building.

    def _engine_of(self, link: Link | None) -> Engine:
        scheme, request = self._agreement.scheme, self._request
        balancer = self._balancer()
        if link is not None:
            return self._served_engine(balancer, link)
        models = [unwrapped(each) for each in request.models]
        common = self._workers, balancer, self._liveness
        if scheme.period is not None:
            return LocalEngine(
                *common,
                period=scheme.period,
                nonfinite=scheme.nonfinite,
                models=models,
                optimizers=request.optimizers,
            )
        engine = CollectiveEngine(
            *common, scheme=scheme, weights=request.weights, models=models, optimizers=request.optimizers
        )
        self._hooks.append(GatherGuard(engine))
        return engine

    def _served_engine(self, balancer: Tracker, link: Link) -> "ServedEngine":
        """Describe the run to the servers, and take this worker's place there; if that fails, close the link."""
        from evenstep.torch.engines.describe import describe, layout_of, require_small_options
        from evenstep.torch.engines.served import ServedEngine

        scheme, request, optimizer = self._agreement.scheme, self._request, self._request.optimizers[0]
        served, parameters = scheme.served, dict(unwrapped(request.models[0]).named_parameters())
        assert served is not None
        try:
            layout, spec = layout_of(parameters.items(), request.optimizers), describe(optimizer, served.allowed)
            require_small_options(spec, optimizer)
            run = RunSpec(
                scheme=scheme,
                problem=self._agreement.problem,
                length=self._agreement.terms.order.length,
                drop_last=bool(self._agreement.terms.order.sampling.drop_last),
                layout=layout,
                optimizers=(spec,),
                costs=None if (costs := self._agreement.terms.costs) is None else costs.checksum,
            )
            layouts = layout.shards(served.servers)
            link.start(run.encode(), [each.nbytes for each in layouts])
            return ServedEngine(
                self._workers,
                balancer,
                link,
                served=served,
                layouts=layouts,
                parameters=parameters,
                optimizer=optimizer,
                spec=spec,
                ahead=1 if served.exchange == "overlapped" or request.loader.num_workers else 0,
                in_step=scheme.sync.in_step,
            )
        except BaseException:
            link.close()
            raise

    def _balancer(self) -> Tracker:
        agreement, request, clock, rank = self._agreement, self._request, time.perf_counter, self._workers.rank
        scheme, hold, workers = agreement.scheme, agreement.own.hold, agreement.workers
        forecasts, threads = scheme.load.uses_forecasts, torch.get_num_threads() if request.device.type == "cpu" else 1
        return Tracker(
            workers=self._workers,
            policy=first_policy(scheme, agreement.problem, workers, rank),
            problem=agreement.problem,
            limits=SizeLimits(scheme.load, agreement.problem, agreement.limits),
            meter=Meter(
                stopwatch=DeviceStopwatch() if request.device.type == "cuda" else HostStopwatch(clock),
                forecaster=Narx() if forecasts else None,
                # This machine's processors say nothing about an emulated device.
                sampler=(hold or FactorSampler(threads=threads, clock=clock)) if forecasts else None,
                memory=self._learned_limit(),
            ),
            recorder=self._recorder,
            last_sizes=last_sizes(scheme, workers, request.launched, request.events_dir, rank),
            # An event of a GPU's stream is read when the next iteration has been launched.
            lags=None if scheme.micro_batch is not None else [int(bool(each["gpu"])) for each in workers],
            tells_plans=tells_plans(scheme, workers, rank),
            clock=clock,
            hold=hold,
            activity=self._activity,
            summary=self._summary,
        )

    def _learned_limit(self) -> LearntLimit | None:
        """What learns this worker's largest batch; None if its memory is unknown, or does not limit batches."""
        own, device, hosts = (
            self._agreement.own,
            self._request.device,
            [each["host"] for each in self._agreement.workers],
        )
        if self._request.launched.find_batch is not None:
            return LearntLimit(probe_of(self._request, own.hold, hosts.count(self._workers.host)))
        if self._agreement.scheme.micro_batch is not None:
            return None
        failed = None if own.failed is None else own.failed.samples
        if own.hold is not None and own.hold.memory is not None:
            return LearntLimit(EmulatedMemory(own.hold.memory), failed=failed)
        return LearntLimit(CudaMemory(device), failed=failed) if device.type == "cuda" else None

    # Recording.

    def _kept(self) -> JsonlRecorder | Silent:
        folder = self._request.events_dir
        if folder is None:
            return Silent()
        rank = self._workers.rank
        with naming("run_dir" if self._request.run_dir is not None else VARIABLES["run_dir"]):
            return JsonlRecorder(folder, rank, last=lambda: Ended(worker=rank, at=time.perf_counter()))

    def _summary_of(self) -> Summary | None:
        """What says at the end how the run went: on worker 0, or on servers the first of them."""
        launched, workers, scheme = self._request.launched, self._workers, self._agreement.scheme
        alone = workers.count == 1 and VARIABLE not in os.environ
        if alone or workers.rank or launched.measures or scheme.served is not None:
            return None
        return Summary(
            workers=workers.count,
            global_batch_size=self._agreement.problem.global_batch_size,
            scheme=scheme.name,
            say=say if launched.marks is None else partial(leave_line, launched.marks),
        )

    def _end_with_run(self) -> None:
        """An exception that ends the process also ends the run."""
        ends = RunEnd(
            recorder=self._recorder,
            device=self._agreement.workers[self._workers.rank]["device"],
            advice=self._advice(),
            liveness=self._liveness,
        )
        when_failing(self._engine.balancer, ends)
        if self._summary is not None:
            when_failing(self._summary, _without_summary)

    def _advice(self) -> str:
        """What to do after a worker ran out of memory."""
        if self._agreement.scheme.micro_batch is not None:
            return "lower micro_batch"
        if self._agreement.scheme.load.given_sizes is not None:
            return "give this worker a smaller batch size"
        folder = self._request.events_dir
        if folder is None:
            return "give a run_dir (--run-dir), so that the next start knows, or a smaller global batch"
        return f"start again with the same run directory {folder}, and this worker's batches stay below it"

    def _record_run(self, iterations: int) -> None:
        agreement, problem = self._agreement, self._agreement.problem
        mine = agreement.workers[self._workers.rank]
        self._recorder.record(
            Run(
                worker=self._workers.rank,
                schema=SCHEMA,
                at=time.perf_counter(),
                unix_seconds=time.time(),
                workers=self._workers.count,
                scheme=agreement.scheme.name,
                engine="collective" if agreement.scheme.served is None else "server",
                global_batch_size=problem.global_batch_size,
                iterations_per_epoch=iterations,
                minimum=problem.minimum.tolist(),
                maximum=problem.maximum.tolist(),
                multiple=problem.multiple,
                seed=self._request.seed,
                emulated=agreement.own.emulated,
                version=mine["version"],
                torch=str(torch.__version__),
                python=platform.python_version(),
                host=mine["host"],
                gpu=mine["gpu"],
                device=mine["device"],
            )
        )


def _stepped(loader: "weakref.ref[Loop]", *_: Any) -> None:
    if (alive := loader()) is not None:
        alive.stepped()


def _asked(request: Request) -> tuple[Served | None, dict[str, object]]:
    """The servers to join, None for none, and what the other workers are told about it when they meet."""
    try:
        scheme = request.asked_scheme()
    except ConfigError as error:
        # If the launcher has started servers, the other workers meet there, and not in a process group.
        started = len(request.launched.servers)
        return Served(servers=started) if started else None, {"error": request.mistake or str(error)}
    if request.mistake is not None:
        return scheme.served, {"error": request.mistake}
    return scheme.served, {"scheme": scheme.name, "servers": scheme.served and scheme.served.servers}


def _without_summary(summary: Summary, error: BaseException) -> BaseException:
    summary.drop()
    return error
