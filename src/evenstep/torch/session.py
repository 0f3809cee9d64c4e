"""A session: the parts of `prepare`, in any order."""

import os
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self, TypeVar, Unpack, cast, final

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.core.samples import Ledger
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.schemes import Scheme
from evenstep.torch.costs import Cost
from evenstep.torch.data.batches import Batches
from evenstep.torch.data.loader import PreparedLoader, PreparedShares
from evenstep.torch.data.loop import CLOSED, BatchLoop
from evenstep.torch.data.order import EpochOrder, order_of
from evenstep.torch.engines.collective import CommHook
from evenstep.torch.engines.engine import NO_BATCH
from evenstep.torch.model import PreparedModel, unwrapped
from evenstep.torch.optimizers import ServedOptimizer, WindowedOptimizer, is_initialised
from evenstep.torch.processes.workers import Value, Workers, rows_of_all
from evenstep.torch.request import RunRequest, SessionOptions
from evenstep.torch.running import Running
from evenstep.worker.arguments import require_known

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


@final
class Session:
    """One worker's part in a run, for frameworks that bring the model, the optimizer and the loader one by one.

    `model`, `optimizer`, `scheduler`, `loader` and `shares` may be called in any order, which must be the same on all
    workers. The workers meet and agree at the request for the first batch, or in `start`. The arguments are those of
    `evenstep.prepare`.

    Attributes:
        scheme: The requested scheme; None if it is wrong, which `start` reports to all workers.
        closed: Whether `close` was called.

    Raises:
        ConfigError: From `start` and the first batch: a request cannot work. Raised on every worker, even if it is
            wrong on only one.
        DisagreementError: The workers were started with different schemes, versions or data.
        WorkerLostError: Not all workers came within the timeout; the message names the missing ones.
    """

    def __init__(self, scheme: Scheme | str | None = None, **options: Unpack[SessionOptions]) -> None:
        require_known(options, ("scheme", *SessionOptions.__annotations__), "Session")
        self._request = RunRequest.of(LaunchSettings.from_environment(os.environ), scheme=scheme, **options)
        self.scheme: Scheme | None = None
        with suppress(ConfigError):
            self.scheme = self._request.asked_scheme()
        self._models: list[Any] = []
        self._prepared: list[PreparedModel] = []
        self._optimizers: list[Any] = []
        self._wrapped: list[Any] = []
        self._schedulers: list[LRScheduler] = []
        self._guards: list[Any] = []
        self._comm_hook: CommHook | None = None
        # Weak, so that the data workers end with the script's last reference to the loader.
        self._given: list[weakref.ref[Batches]] = []
        self._running: Running | None = None
        self.closed = False

    def model(self, model: Any, *, comm_hook: CommHook | None = None) -> Any:
        """Prepare a model to synchronise gradients; `comm_hook`: as in `prepare`. Several models may be given.

        A DistributedDataParallel is returned itself, unless workers step on their own gradients or on micro-batches.

        Raises:
            ConfigError: The session has started.
        """
        self._require_open("a model")
        if not isinstance(model, torch.nn.Module):
            self._models.append(model)
            return model  # All workers are told in `start`.
        prepared = PreparedModel(unwrapped(model))
        self._models.append(model)
        self._prepared.append(prepared)
        self._comm_hook = comm_hook if comm_hook is not None else self._comm_hook
        if isinstance(model, DistributedDataParallel) and self.scheme is not None and self.scheme.sums_every_gradient:
            prepared.follow(model)
            return model
        return prepared

    def backward_begins(self, model: torch.nn.Module) -> None:
        """Say that a backward follows, if it is only known now whether it sums gradients (`no_sync`).

        Only for frameworks that let scripts choose this between the forward pass and the backward, like Lightning.
        """
        for prepared in self._prepared:
            if prepared.module is unwrapped(model):
                prepared.backward_begins(model)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepare an optimizer; returns it in a wrapper if servers step for it or a step has several micro-batches.

        Raises:
            ConfigError: The session has started.
        """
        self._require_open("an optimizer")
        self._optimizers.append(optimizer)
        if is_initialised(optimizer):
            self._guards.append(optimizer.register_step_pre_hook(self._require_unstrayed))
        scheme, wrapped = self.scheme, cast("Any", optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            if scheme is not None and scheme.served is not None and scheme.period is None:
                wrapped = ServedOptimizer(optimizer)
            elif self._request.accumulation > 1 or (scheme is not None and scheme.accumulates):
                wrapped = WindowedOptimizer(optimizer)
        self._wrapped.append(wrapped)
        return wrapped  # type: ignore[no-any-return]

    def accumulate(self, batches: int) -> None:
        """Make each step of so many batches of a worker, like the option `accumulation`, where it is known late.

        Raises:
            ConfigError: The session has started.
        """
        if self._request.accumulation == batches:
            return
        self._require_open("a number of batches that accumulate")
        self._request = replace(self._request, accumulation=batches)

    def scheduler(self, scheduler: LRScheduler) -> LRScheduler:
        """Prepare a learning-rate scheduler. With micro-batches its `step` waits for the last one of an iteration.

        Raises:
            ConfigError: The session has started.
        """
        self._require_open("a scheduler")
        self._schedulers.append(scheduler)
        return scheduler

    def loader(self, loader: DataLoader[Any], *, cost: Cost | None = None) -> PreparedLoader:
        """Prepare a loader: it hands out this worker's batches and knows its length at once. There may be several.

        Each has its own epochs and its own state. A loader that is given after the start is agreed on at its first
        batch, which all workers ask for together. `cost`: as in `prepare`.
        """
        prepared = PreparedLoader(loader, self, len(self._given), cost)
        self._given.append(weakref.ref(prepared))
        return prepared

    def shares(self, length: int | None, global_batch_size: int, *, cost: Cost | None = None) -> PreparedShares:
        """This worker's share of each iteration, for a loop that makes its own batches.

            for share in session.shares(length, 480):
                inputs, targets = my_batch(share.positions)

        Each position of an epoch is in exactly one worker's share. A batch has a row for each of `share.positions`, in
        their order, or the same number of rows if rows are drawn at random. In all other respects this is a loader.

        Args:
            length: The positions of an epoch, 0 to length - 1; None for a loop that never ends.
            global_batch_size: Positions in one iteration, over all workers.
            cost: The cost of each position, as in `prepare`; workers' speeds then decide how much cost a share has.

        Raises:
            ConfigError: A number is not an integer, or is out of range.
        """
        shares = PreparedShares(length, global_batch_size, self, len(self._given), cost)
        self._given.append(weakref.ref(shares))
        return shares

    @property
    def started(self) -> bool:
        """True if the workers have met; models and optimizers can then no longer be given."""
        return self._running is not None

    def start(self) -> None:
        """Meet the other workers and agree with them, if that has not happened yet. All workers must call it.

        Raises:
            ConfigError: A part is missing, a request cannot work, or the session is closed.
        """
        if self._running is not None:
            return
        if self.closed:
            raise ConfigError(CLOSED)
        loaders = self._loaders
        if not loaders:
            raise ConfigError("a session needs a loader, or shares: give it yours with session.loader(loader)")
        request = self._request.of_parts(
            loaders[0].source,
            loaders[0].cost,
            model=_one_or_all(self._models),
            optimizer=_one_or_all(self._optimizers),
            schedulers=_one_or_all(self._schedulers),
            comm_hook=self._comm_hook,
        )
        self._remove_guards()
        self._running = Running(request, loaders)
        self._running.bind(self._prepared, self._wrapped)
        for each in loaders:
            self._running.bind_loader(each)
        self._running.begin(loaders[0].iterations())

    def __contains__(self, part: object) -> bool:
        """True if `part` is a model or an optimizer of this session."""
        return any(each is part for each in (*self._models, *self._optimizers))

    def require_summing(self, who: str, page: str) -> None:
        """Check that the scheme works with a framework `who`, described in `page`, that sums gradients in every step.

        Raises:
            ConfigError: It does not.
        """
        scheme = self.scheme
        if scheme is not None and not scheme.sums_every_gradient:  # None: unknown, which the start will report.
            raise ConfigError(
                f"{who} sums gradients over all workers in every step, which the scheme {scheme.name!r} does not: use"
                f" lb-bsp, dbs, bsp or batch_sizes, or write the loop with evenstep.prepare ({page})"
            )

    def follow(self, loader: BatchLoop) -> None:
        """Do nothing: no worker joins late."""

    def start_with(self, loader: BatchLoop) -> None:
        """Start if necessary, and agree on a loader that was given later; for evenstep's own use."""
        self.start()
        if self._running is not None and not loader.bound:
            self._running.bind_loader(loader)

    def mean_over_workers(self, value: Value, count: float) -> Value:
        """The mean of all workers' values, weighted by their counts, as `PreparedLoader.mean_over_workers`."""
        return self._started_loaders[0].mean_over_workers(value, count)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The rows of all workers' tensors, on every worker. All workers must call it, at the same place.

        Args:
            values: Shape [rows, ...]. The number of rows may differ between workers; give those of this worker's own
                samples (`values[: loader.current.samples]`). A scalar is a row.

        Returns:
            Shape [rows of all workers, ...], in the order of the workers.

        Raises:
            ConfigError: Workers do not wait for each other (on servers).
            WorkerLostError: A worker died or stopped, or did not call it; the message names it.
        """
        engine = self._started_loaders[0].engine
        with engine.meeting():
            return torch.cat(rows_of_all(engine.workers, values))

    def state_dict(self) -> dict[str, Any]:
        """The run's progress and the basis of its sizes, like `PreparedLoader.state_dict` but of all loaders."""
        states = [each.state_dict() for each in self._started_loaders]
        return states[0] if len(states) == 1 else {"loaders": states}

    def load_state_dict(self, state: Any) -> None:
        """Continue from where `state_dict` was called, like `PreparedLoader.load_state_dict`.

        Raises:
            ConfigError: The state is damaged, or of other loaders.
        """
        several = isinstance(state, dict) and isinstance(state.get("loaders"), list)
        states, loaders = state["loaders"] if several else [state], self._started_loaders
        if len(states) != len(loaders):
            raise ConfigError(
                f"this state is of {len(states)} loaders and the session has {len(loaders)}: give it the same, in the"
                " same order"
            )
        for each, saved in zip(loaders, states, strict=True):
            each.load_state_dict(saved)

    def close(self) -> None:
        """End the run on every worker. The user's objects can be prepared again; the prepared ones cannot be used.

        A loop over a prepared loader then raises a ConfigError, and a prepared model's first forward pass for training
        gives a warning. Only needed in processes that prepare several times, or after an asynchronous checkpoint.

        Raises:
            CheckpointError: A checkpoint that was saved asynchronously could not be written.
        """
        if self.closed:
            return
        self.closed = True
        self._remove_guards()
        for loader in self._loaders:
            loader.release()
        for model in self._prepared:
            model.release()
        if self._running is not None:
            self._running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except CheckpointError:
            if kind is None:  # Otherwise the script's own error says more.
                raise

    @property
    def batches_in_iteration(self) -> int:
        """The batches of a worker in an iteration, on average."""
        return 1 if self.scheme is None else self.scheme.batches_in_iteration

    def expected_length(self, loader: DataLoader[Any], parts: int = 1) -> int:
        """The iterations of an epoch, each cut into `parts`, as expected before the workers have agreed on them."""
        order = self._expected_order(loader)
        if order.sampling.lists:
            return len(order.sampling.sampler)
        size, drop_last = max(self.expected_batch_size(loader) // parts, 1), order.sampling.drop_last
        whole = self._request.expected_workers if self._request.private else 1
        return Ledger(length=order.length * whole, global_batch_size=size, drop_last=drop_last).iterations

    def draws_own(self, loader: DataLoader[Any]) -> bool:
        """True if each worker draws from data of its own, as many samples as its size says."""
        scheme = self.scheme
        return scheme is not None and replace(self._request, loader=loader).draws_own(scheme)

    def expected_batch_size(self, loader: DataLoader[Any]) -> int:
        """The samples of an iteration, as expected before the workers have agreed on them."""
        sampling = self._expected_order(loader).sampling
        try:
            return self._request.whole_batch_size(
                self._request.asked_scheme(), sampling, self._request.expected_workers
            )
        except ConfigError:
            return sampling.global_batch_size(self._request.expected_workers) or 1  # `start` tells all workers.

    def _expected_order(self, loader: DataLoader[Any]) -> EpochOrder:
        workers = Workers(rank=0, count=self._request.expected_workers, host="", timeout_seconds=0.0)
        return order_of(loader, workers, 0)

    @property
    def _loaders(self) -> list[Batches]:
        return [loader for reference in self._given if (loader := reference()) is not None]

    @property
    def _started_loaders(self) -> list[Batches]:
        self.start()
        if not (loaders := self._loaders):
            raise ConfigError("the loader of this session is gone: keep what session.loader returned")
        return loaders

    def _require_open(self, what: str) -> None:
        if self._running is not None:
            raise ConfigError(
                f"{what} was given to a session that has started: give all of them before the first batch"
            )

    def _require_unstrayed(self, *_: Any) -> None:
        """Check, before each step until the session starts, that no model was trained yet."""
        if self._request.expected_workers > 1 and any(model.strayed for model in self._prepared):
            raise ConfigError(NO_BATCH)

    def _remove_guards(self) -> None:
        for guard in self._guards:
            guard.remove()
        self._guards.clear()


def _one_or_all(given: list[Any]) -> Any:
    return given[0] if len(given) == 1 else tuple(given)
