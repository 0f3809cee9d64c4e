"""A session: the parts of `prepare`, in any order."""

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenstep.cluster import Cluster
from evenstep.core.errors import ConfigError
from evenstep.core.samples import Ledger
from evenstep.launch.found_batch import FoundBatch
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.schemes import Scheme
from evenstep.torch.costs import Cost
from evenstep.torch.data.batches import Batches
from evenstep.torch.data.loader import PreparedLoader
from evenstep.torch.data.loop import CLOSED, Loop
from evenstep.torch.data.order import EpochOrder, order_of
from evenstep.torch.data.own_batches import PreparedShares
from evenstep.torch.engines.collective import CommHook
from evenstep.torch.engines.engine import NO_BATCH
from evenstep.torch.engines.weighting import Weights
from evenstep.torch.model import PreparedModel, unwrapped
from evenstep.torch.optimizers import ServedOptimizer, WindowedOptimizer
from evenstep.torch.processes.workers import Workers
from evenstep.torch.request import AUTO, Request
from evenstep.torch.running import Running

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Value = TypeVar("Value", float, torch.Tensor)


@final
class Session:
    """One worker's part in a run, for frameworks that bring the model, the optimizer and the loader one by one.

    `model`, `optimizer`, `scheduler`, `loader` and `shares` may be called in any order, which must be the same on all
    workers. The workers meet and agree when the first batch is asked for, or in `start`. The arguments are those of
    `evenstep.prepare`.

    Raises:
        ConfigError: From `start` and the first batch: something asked for cannot work. Raised on every worker, even if
            it is wrong on one only.
        DisagreementError: The workers were started with different schemes, versions or data.
        WorkerLostError: Not all workers came within the timeout; the message names those.
    """

    def __init__(
        self,
        scheme: Scheme | str | None = None,
        *,
        global_batch_size: int | Literal["auto"] | None = None,
        batch_sizes: Sequence[int] | Mapping[Any, int] | None = None,
        seed: int = 0,
        timeout: float | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        emulate: Cluster | str | os.PathLike[str] | None = None,
        weights: Weights = "samples",
        process_group: dist.ProcessGroup | None = None,
        empty: Literal["copy", "shrink"] = "copy",
        partition: Literal["common", "private"] | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {
            "scheme": scheme,
            "global_batch_size": global_batch_size,
            "batch_sizes": batch_sizes,
            "seed": seed,
            "timeout": timeout,
            "run_dir": run_dir,
            "emulate": emulate,
            "weights": weights,
            "process_group": process_group,
            "empty": empty,
            "partition": partition,
        }
        self._launched = LaunchSettings.from_environment(os.environ)
        self._models: list[Any] = []
        self._prepared: list[PreparedModel] = []
        self._optimizers: list[Any] = []
        self._wrapped: list[Any] = []
        self._schedulers: list[LRScheduler] = []
        self._guards: list[RemovableHandle] = []
        self._comm_hook: CommHook | None = None
        # Weak, so that the data workers end with the script's last reference to the loader.
        self._given: list[weakref.ref[Batches]] = []
        self._running: Running | None = None
        self.closed = False  # Whether `close` was called.

    def model(self, model: Any, *, comm_hook: CommHook | None = None) -> Any:
        """A model that synchronises gradients; `comm_hook`: as in `prepare`. Several models may be given.

        A DistributedDataParallel comes back itself, unless workers step on their own gradients or on micro-batches.

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
        if isinstance(model, DistributedDataParallel) and self._sums_every_gradient:
            prepared.follow(model)
            return model
        return prepared

    def backward_begins(self, model: torch.nn.Module) -> None:
        """Say that a backward follows, if only now the script knows whether it sums gradients (`no_sync`).

        Only for frameworks that let scripts choose that between the forward pass and the backward, as Lightning does.
        """
        for prepared in self._prepared:
            if prepared.module is unwrapped(model):
                prepared.backward_begins(model)

    def waits(self) -> None:
        """Say that what follows, until the next forward pass, may wait for other workers and is no compute.

        Only for frameworks in which workers wait for each other between the batches of an accumulated gradient.
        """
        if self._running is not None:
            self._running.waits()

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, in a wrapper if servers step for it or several micro-batches make a step.

        Raises:
            ConfigError: The session has started.
        """
        self._require_open("an optimizer")
        self._optimizers.append(optimizer)
        if isinstance(optimizer, torch.optim.Optimizer):
            self._guards.append(optimizer.register_step_pre_hook(self._require_unstrayed))
        self._wrapped.append(self._wrap(optimizer))
        return self._wrapped[-1]  # type: ignore[no-any-return]

    def scheduler(self, scheduler: LRScheduler) -> LRScheduler:
        """The learning-rate scheduler. With micro-batches its `step` waits for the last of an iteration.

        Raises:
            ConfigError: The session has started.
        """
        self._require_open("a scheduler")
        self._schedulers.append(scheduler)
        return scheduler

    def loader(self, loader: DataLoader[Any], *, cost: Cost | None = None) -> PreparedLoader:
        """A loader that hands out this worker's batches and knows its length at once. There may be several.

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
        their order, or as many rows, if rows are drawn at random. Shares count as a loader in all other respects.

        Args:
            length: The positions of an epoch, 0 to length - 1; None for a loop that never ends.
            global_batch_size: Positions in one iteration, over all workers.
            cost: What each position costs, as in `prepare`; shares then hold as much cost as the workers' speeds allow.

        Raises:
            ConfigError: A number is not whole, or out of range.
        """
        shares = PreparedShares(length, global_batch_size, self, len(self._given), cost)
        self._given.append(weakref.ref(shares))
        return shares

    @property
    def started(self) -> bool:
        """Whether the workers have met, so that no model and no optimizer can be given any more."""
        return self._running is not None

    def start(self) -> None:
        """Meet the other workers and agree with them, if that has not happened yet. All workers must call it.

        Raises:
            ConfigError: A part is missing, something asked for cannot work, or the session is closed.
        """
        if self._running is not None:
            return
        if self.closed:
            raise ConfigError(CLOSED)
        loaders = self._loaders
        if not loaders:
            raise ConfigError("a session needs a loader, or shares: give it yours with session.loader(loader)")
        request = Request.of(
            loaders[0].source,
            self._launched,
            cost=loaders[0].cost,
            model=_one_or_all(self._models),
            optimizer=_one_or_all(self._optimizers),
            schedulers=_one_or_all(self._schedulers),
            comm_hook=self._comm_hook,
            **self._settings,
        )
        self._remove_guards()
        self._running = Running(request, loaders)
        self._running.bind_models(self._prepared)
        self._running.bind_optimizers(self._wrapped)
        for each in loaders:
            self._running.bind_loader(each)
        self._running.begin(loaders[0].iterations_per_epoch)

    def __contains__(self, part: object) -> bool:
        """Whether it is a model or an optimizer that was given."""
        return any(each is part for each in (*self._models, *self._optimizers))

    def require_summing(self, who: str, page: str) -> None:
        """Check that the scheme goes with a framework `who`, described in `page`, that sums gradients in every step.

        Raises:
            ConfigError: It does not.
        """
        scheme = self.scheme
        if scheme is not None and not scheme.sums_every_gradient:  # None: unknown, as the start will say.
            raise ConfigError(
                f"{who} sums gradients over all workers in every step, which the scheme {scheme.name!r} does not: use"
                f" lb-bsp, dbs, bsp or batch_sizes, or write the loop with evenstep.prepare ({page})"
            )

    def start_with(self, loader: Loop) -> None:
        """Start, if that has not happened yet, and agree on a loader that was given later; for evenstep's own use."""
        self.start()
        if self._running is not None and not loader.bound:
            self._running.bind_loader(loader)

    def mean(self, value: Value, count: float) -> Value:
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
        return self._started_loaders[0].gather_over_workers(values)

    def state_dict(self) -> dict[str, Any]:
        """Where the run is and what its sizes are decided from, as `PreparedLoader.state_dict`; of all loaders."""
        states = [each.state_dict() for each in self._started_loaders]
        return states[0] if len(states) == 1 else {"loaders": states}

    def load_state_dict(self, state: Any) -> None:
        """Continue from where `state_dict` was called, as `PreparedLoader.load_state_dict`.

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
        """End the run on every worker. The user's own objects can be prepared again; what was prepared cannot be used.

        A loop over a prepared loader then raises a ConfigError, and a prepared model's first forward pass for training
        gives a warning. Only needed in processes that prepare several times.
        """
        self.closed = True
        self._remove_guards()
        for loader in self._loaders:
            loader.release()
        if self._running is not None:
            self._running.close()
        for model in self._prepared:
            model.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def expected_length(self, loader: DataLoader[Any]) -> int:
        """The iterations of an epoch, as expected before the workers have agreed on them."""
        order = self._expected_order(loader)
        if order.sampling.lists:
            return len(order.sampling.sampler)
        size, drop_last = self.expected_batch_size(loader), order.sampling.drop_last
        whole = self._expected_workers if self._settings["partition"] == "private" else 1
        return Ledger(length=order.length * whole, global_batch_size=size, drop_last=drop_last).iterations

    def expected_batch_size(self, loader: DataLoader[Any]) -> int:
        """The samples of an iteration, as expected before the workers have agreed on them."""
        scheme, given = self.scheme, self._settings["global_batch_size"]
        if given == AUTO:
            folder = self._settings["run_dir"] or self._launched.run_dir
            found = None if folder is None else FoundBatch.read(Path(folder))
            given = None if found is None else found.global_batch_size
        if given is None and scheme is not None and scheme.load.given_sizes is not None:
            given = sum(scheme.load.given_sizes)
        own = self._expected_order(loader).sampling.global_batch_size(self._expected_workers) or 1
        return given if given is not None else own

    def _expected_order(self, loader: DataLoader[Any]) -> EpochOrder:
        workers = Workers(rank=0, count=self._expected_workers, host="", timeout_seconds=0.0)
        return order_of(loader, workers, 0)

    @property
    def _expected_workers(self) -> int:
        if dist.is_initialized():
            return dist.get_world_size(self._settings["process_group"])
        return int(os.environ.get("WORLD_SIZE", "1"))

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
        """Called before steps until the session starts."""
        if self._expected_workers > 1 and any(model.strayed for model in self._prepared):
            raise ConfigError(NO_BATCH)

    def _remove_guards(self) -> None:
        for guard in self._guards:
            guard.remove()
        self._guards.clear()

    def _wrap(self, optimizer: Any) -> Any:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        scheme = self.scheme
        if scheme is not None and scheme.served is not None:
            return ServedOptimizer(optimizer)
        return optimizer if scheme is None or scheme.micro_batch is None else WindowedOptimizer(optimizer)

    @property
    def _sums_every_gradient(self) -> bool:
        """Whether each backward is an exchange with all workers, as in DistributedDataParallel."""
        return self.scheme is not None and self.scheme.sums_every_gradient

    @property
    def scheme(self) -> Scheme | None:
        """The scheme that was asked for; None if there is none of that name, of which `start` tells all workers."""
        given = {"model": (), "optimizer": (), "schedulers": (), "comm_hook": None, **self._settings}
        try:
            return Request.of(DataLoader([0]), self._launched, **given).asked_scheme()  # type: ignore[arg-type]
        except (ConfigError, TypeError, AttributeError):
            return None


def _one_or_all(given: list[Any]) -> Any:
    return given[0] if len(given) == 1 else tuple(given)
