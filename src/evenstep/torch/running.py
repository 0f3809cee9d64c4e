"""A started session: this worker joins the others, agrees with them, and binds the script's objects to an engine."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evenstep.core.activity import Doing
from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.launch.marks import leave_mark
from evenstep.protocol.run_spec import RunSpec
from evenstep.schemes import Served
from evenstep.torch.agree import Terms, agree, agree_on_loader
from evenstep.torch.cuda import CudaMemory, DeviceStopwatch
from evenstep.torch.data.loop import BatchLoop, Bound
from evenstep.torch.engines.collective import CollectiveEngine
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.steps import StepChecks
from evenstep.torch.failure import RunEnd, install_hook, when_failing
from evenstep.torch.gathering import ScriptCollectives
from evenstep.torch.model import PreparedModel, forget, unwrapped
from evenstep.torch.optimizers import ServedOptimizer, WindowedOptimizer, window_scheduler
from evenstep.torch.processes.join_workers import join_workers
from evenstep.torch.processes.liveness import Liveness, explaining
from evenstep.torch.request import RunRequest
from evenstep.torch.survey import Surveyor, to_be_surveyed
from evenstep.worker.activity import Activity
from evenstep.worker.device_memory import EmulatedMemory, LearntLimit, MemoryProbe, host_memory
from evenstep.worker.meter import HostStopwatch
from evenstep.worker.opening import open_tracker, run_event
from evenstep.worker.servers.link import ServerLink
from evenstep.worker.tracker import Tracker


@final
class Running:
    """One worker's part in a run: all workers start it together.

    Args:
        request: The script's arguments, with the first loader.
        loaders: All loaders of the session so far.

    Raises:
        ConfigError: A request cannot work; raised on every worker, even if it is wrong on only one.
        DisagreementError: The workers were started with different schemes, versions or data.
    """

    def __init__(self, request: RunRequest, loaders: Sequence[BatchLoop]) -> None:
        install_hook()
        leave_mark(request.launched, os.environ.get("RANK", "0"))
        self._request = request if request.launched.survey_up_to is None else to_be_surveyed(request)
        self._activity = Activity()
        self._hooks: list[Any] = []
        self._loaders: dict[int, tuple[Any, Terms]] = {}
        link = self._join(loaders)
        with explaining(self._liveness):
            self._engine = self._engine_of(link)
        ends = RunEnd(
            device=self._agreement.workers[self._workers.rank]["device"],
            advice=self._advice(),
            liveness=self._liveness,
        )
        when_failing(self._engine.tracker, ends)
        self._surveyed = request.launched.survey_up_to is not None
        if self._surveyed:
            self._engine.shares = Surveyor(request, self._agreement, self._engine.tracker, self._workers).shares

    def _join(self, loaders: Sequence[BatchLoop]) -> ServerLink | None:
        """Join the other workers and agree with them; returns the link to the servers, if the scheme has any."""
        request, activity = self._request, self._activity
        servers, asked = _asked(request)
        joined = None
        if servers is not None:
            # Imported here, because most schemes have no servers, and starting up is mostly imports.
            from evenstep.torch.processes.join_servers import join_group, join_servers

            joined = join_servers(request.launched, servers, request.timeout, request.events_dir, activity, asked)
            workers = joined.workers
        else:
            workers = join_workers(request.device, request.timeout, asked, request.process_group)
            if (peers := request.peers) is not None:
                from evenstep.torch.processes.meshes import as_replica

                workers = as_replica(workers, peers)
        self._workers = workers
        # The pulse must start before the workers first wait for each other.
        alone = joined is not None or workers.count == 1
        self._liveness = None if alone else Liveness(workers.processes, activity, request.launched.heartbeat_seconds)
        try:
            with explaining(self._liveness):
                self._agreement, self._first = agree(request, workers, activity)
                for loader in loaders:
                    self._agree_on(loader)
        except EvenstepError:
            if joined is not None and workers.count == 1:  # Of several workers, the others may still be told why.
                joined.link.close()
            raise
        if joined is None:
            return None
        join_group(joined, self._agreement.scheme, [each["host"] for each in self._agreement.workers])
        return joined.link

    def bind(self, models: Sequence[PreparedModel], prepared: Sequence[torch.optim.Optimizer]) -> None:
        """Make these models of the request synchronise gradients from now on, and check these optimizers' steps.

        The steps are pushed to servers, or deferred to the last micro-batch, if the scheme says so.
        """
        engine, optimizers = self._engine, self._request.optimizers
        with explaining(self._liveness):
            for index, (model, each) in enumerate(zip(self._request.models, models, strict=True)):
                each.bind(model, engine, index, comm_hook=self._request.comm_hook)
        self._checks = StepChecks(engine, self._request.models, [*optimizers, *prepared])
        # Its own hook runs after those that the script and the integrations have registered, whose errors say more.
        self._hooks += [each.register_step_pre_hook(self._checks.before_step) for each in optimizers]
        if (after_step := getattr(engine, "after_step", None)) is not None:
            self._hooks += [each.register_step_post_hook(after_step) for each in optimizers]
        if engine.workers.count > 1 or engine.replaces_weights:
            self._hooks.append(register_optimizer_step_pre_hook(self._checks.hook_of_others()))
        for wrapped in prepared:
            if isinstance(wrapped, ServedOptimizer):
                from evenstep.torch.engines.served import ServedEngine

                assert isinstance(engine, ServedEngine)
                wrapped.bind(engine)
            elif isinstance(wrapped, WindowedOptimizer):
                wrapped.bind(lambda: engine.hand_outs.in_hand, engine.window, self._request.schedulers)
        if engine.accumulates:
            for scheduler in self._request.schedulers:
                window_scheduler(scheduler, lambda: engine.synchronises)

    def _agree_on(self, loader: BatchLoop) -> None:
        """Agree with the other workers on this loader; the first one is part of the agreement."""
        request = self._request
        if not self._loaders:
            self._loaders[loader.number] = request.loader, self._first
            return
        request = replace(request, loader=loader.source, cost=loader.cost)
        if request.launched.survey_up_to is not None:
            request = to_be_surveyed(request)
        terms = agree_on_loader(request, self._workers, self._agreement, self._first, self._activity)
        self._loaders[loader.number] = request.loader, terms

    def bind_loader(self, loader: BatchLoop) -> None:
        """Make this loader hand out this worker's batches. All workers must bind it together.

        Raises:
            ConfigError: It was added after the start of a session on servers.
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
        loader.bind(source, Bound(terms=terms, scheme=scheme, engine=engine, surveyed=self._surveyed))

    def begin(self, iterations: int) -> None:
        """Begin, when everything is bound; an epoch of the first loader has this many iterations."""
        seed, version = self._request.seed, str(torch.__version__)
        self._engine.tracker.recorder.record(
            run_event(self._agreement, self._workers.rank, iterations=iterations, seed=seed, torch=version)
        )
        self._activity.mark(Doing.STEPPED, -1)

    def close(self) -> None:
        """End the run on this worker, and remove every hook and mark from the script's objects."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for model in self._request.models:
            forget(model)
        self._engine.close()

    def _engine_of(self, link: ServerLink | None) -> Engine:
        scheme, request = self._agreement.scheme, self._request
        tracker = self._tracker()
        if link is not None:
            return self._served_engine(tracker, link)
        models = [unwrapped(each) for each in request.models]
        common = self._workers, tracker, self._liveness
        if scheme.period is not None:
            from evenstep.torch.engines.local import LocalEngine

            return LocalEngine(*common, scheme=scheme, models=models, optimizers=request.optimizers)
        engine = CollectiveEngine(
            *common,
            scheme=scheme,
            weights=request.weights,
            models=models,
            optimizers=request.optimizers,
            accumulation=request.accumulation,
        )
        self._hooks.append(ScriptCollectives(engine))
        return engine

    def _served_engine(self, tracker: Tracker, link: ServerLink) -> Engine:
        """Describe the run to the servers, and take this worker's place there; if that fails, close the link."""
        from evenstep.torch.engines.describe import OptimizerState, describe, layout_of, require_small_options
        from evenstep.torch.engines.served import ServedEngine
        from evenstep.torch.engines.served_local import LocalServedEngine, OuterOptimizer

        scheme, request, optimizer = self._agreement.scheme, self._request, self._request.optimizers[0]
        served, parameters = scheme.served, dict(unwrapped(request.models[0]).named_parameters())
        assert served is not None
        try:
            layout, outer = layout_of(parameters.items(), request.optimizers), None
            if scheme.outer is None:
                spec = describe(optimizer, served.allowed)
                require_small_options(spec, optimizer)
            else:
                outer = OuterOptimizer(scheme.outer, groups=layout.groups)
                spec = outer.spec
            run = RunSpec(
                scheme=scheme,
                problem=self._agreement.problem,
                length=self._first.order.length,
                drop_last=bool(self._first.order.sampling.drop_last),
                layout=layout,
                optimizers=(spec,),
                costs=None if (costs := self._first.costs) is None else costs.checksum,
            )
            layouts = layout.shards(served.servers)
            link.start(run.encode(), [each.nbytes for each in layouts])
            return (ServedEngine if outer is None else LocalServedEngine)(
                self._workers,
                tracker,
                link,
                served=served,
                layouts=layouts,
                parameters=parameters,
                optimizer=optimizer,
                state=outer or OptimizerState(link, optimizer, spec, parameters, layouts),
                local=outer is not None,
                ahead=1 if served.exchange == "overlapped" or request.loader.num_workers else 0,
                in_step=scheme.sync.in_step,
            )
        except BaseException:
            link.close()
            raise

    def _tracker(self) -> Tracker:
        agreement, device = self._agreement, self._request.device
        # Events in a GPU's stream are read after the next iteration has been launched.
        lags = [int(bool(each["gpu"])) for each in agreement.workers]
        return open_tracker(
            agreement,
            self._workers,
            DeviceStopwatch() if device.type == "cuda" else HostStopwatch(time.perf_counter),
            self._activity,
            launched=self._request.launched,
            folder=self._request.events_dir,
            threads=torch.get_num_threads() if device.type == "cpu" else 1,
            memory=self._learned_limit(),
            lags=lags if agreement.scheme.micro_batch is None else None,
            leads=self._workers.leads,
        )

    def _learned_limit(self) -> LearntLimit | None:
        """Learns this worker's largest batch; None if its memory is unknown or does not limit batches."""
        own, device = self._agreement.own, self._request.device
        if self._agreement.scheme.micro_batch is not None:
            return None
        if own.hold is not None and own.hold.memory is not None:
            probe: MemoryProbe = EmulatedMemory(own.hold.memory)
        elif device.type == "cuda":
            probe = CudaMemory(device)
        elif self._request.launched.survey_up_to is not None:
            probe = host_memory([each["host"] for each in self._agreement.workers].count(self._workers.host))
        else:
            return None
        return LearntLimit(probe, failed=own.failed)

    def _advice(self) -> str:
        """Advice for the user after a worker ran out of memory."""
        if self._agreement.scheme.micro_batch is not None:
            return "lower micro_batch"
        if self._agreement.scheme.load.given_sizes is not None:
            return "give this worker a smaller batch size"
        folder = self._request.events_dir
        if folder is None:
            return "give a run_dir (--run-dir), so that the next start knows, or a smaller global batch"
        return f"start again with the same run directory {folder}, and this worker's batches stay below it"


def _asked(request: RunRequest) -> tuple[Served | None, dict[str, object]]:
    """The servers to join, or None, and the record about this for the other workers when they meet."""
    try:
        scheme = request.asked_scheme()
    except ConfigError as error:
        # If the launcher has started servers, the other workers meet there instead of in a process group.
        started = len(request.launched.servers)
        return Served(servers=started) if started else None, {"error": request.mistake or str(error)}
    if request.mistake is not None:
        return scheme.served, {"error": request.mistake}
    mesh = None if request.mesh is None else f"{request.mesh} along {list(request.data_dims)}"
    return scheme.served, {"scheme": scheme.name, "servers": scheme.served and scheme.served.servers, "mesh": mesh}
