"""A replica's session: the script's objects, the slice of each step, and the state for replicas that join."""

import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import MethodType
from typing import Any, Final, TypedDict, TypeVar, Unpack, final

import msgspec
import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torchft import Manager
from torchft import Optimizer as OfTorchft

from evenstep.cluster import Cluster
from evenstep.core.errors import ConfigError, DisagreementError
from evenstep.core.load import Static
from evenstep.core.load.limits import SizeLimits
from evenstep.core.load.members import Members
from evenstep.core.load.shares import shares
from evenstep.core.samples import WEIGHTINGS, Share
from evenstep.launch.c10d import GradBucket, completed
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.marks import leave_mark
from evenstep.schemes import Scheme
from evenstep.telemetry import JsonlRecorder, Logged, Silent
from evenstep.telemetry.events import Ended
from evenstep.torch.agree import Terms, agree
from evenstep.torch.cuda import DeviceStopwatch
from evenstep.torch.data.sampling import Sampling
from evenstep.torch.elastic.loader import ElasticLoader
from evenstep.torch.elastic.model import summing
from evenstep.torch.elastic.quorum import BrokenQuorumError, Quorum
from evenstep.torch.elastic.record import ReplicaRecorder
from evenstep.torch.failure import install_hook
from evenstep.torch.model import device_of
from evenstep.torch.optimizers import window_scheduler
from evenstep.torch.processes.workers import Workers, gather
from evenstep.torch.request import RunRequest
from evenstep.worker.activity import Activity
from evenstep.worker.agreement import Agreed, hold_of
from evenstep.worker.arguments import require_known
from evenstep.worker.loader_state import LoaderState, read_state
from evenstep.worker.meter import COLUMNS, HostStopwatch, Meter, Rows
from evenstep.worker.opening import run_event
from evenstep.worker.tracker import Tracker

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

_KEY: Final = "evenstep"  # Of this state among those that torchft sends to a replica that joins.


class ElasticOptions(TypedDict, total=False):
    """The options of `ElasticSession` besides `scheme`, with the same meaning as in `evenstep.prepare`."""

    global_batch_size: int | None
    batch_sizes: Any
    seed: int
    run_dir: str | os.PathLike[str] | None
    emulate: Cluster | str | os.PathLike[str] | None


@dataclass(slots=True)
class Position:
    """The first slice that no step that counted has computed."""

    epoch: int = 0
    done: int = 0


@final
class ElasticSession:
    """One replica's part in a run whose members come and go, for scripts with torchft's `Manager`.

        session = ElasticSession(manager, global_batch_size=256)
        model, optimizer, loader = session.model(model), session.optimizer(optimizer), session.loader(loader)

    The members compute one slice of the epoch's order together in each step, in sizes that follow their speeds. If one
    is lost, the step does not count, and those that are left compute the same slice. A replica that joins gets the
    model, the optimizer, the schedulers, the position in the epoch, the speeds and the state of the random generators.

    Args:
        manager: The manager of this replica, with `use_async_quorum=False`, and without a `state_dict` of the model or
            the optimizer, which this session sends.
        scheme: A scheme that sums gradients in every step, such as `lb-bsp`, the default.
        options: `global_batch_size` (the samples of a step, whoever is there; without `evenstep run --elastic` it must
            be given), `batch_sizes`, `seed`, `run_dir` and `emulate`, as in `evenstep.prepare`.

    Raises:
        ConfigError: An argument is wrong, or the scheme cannot run under a quorum.
    """

    def __init__(self, manager: Manager, scheme: Scheme | str | None = None, **options: Unpack[ElasticOptions]) -> None:
        require_known(options, ("scheme", *ElasticOptions.__annotations__), "ElasticSession")
        install_hook()
        launched = LaunchSettings.from_environment(os.environ)
        self._request = RunRequest.of(launched, scheme=scheme, **options)
        if self._request.mistake is not None:
            raise ConfigError(self._request.mistake)
        self._scheme = scheme = self._request.asked_scheme()
        if not scheme.sums_every_gradient or scheme.load.uses_forecasts or scheme.nonfinite == "refuse":
            raise ConfigError(
                f"the scheme {scheme.name!r} cannot run while members come and go: use lb-bsp, dbs, bsp or batch_sizes,"
                " without predictor=narx and nonfinite=refuse"
            )
        self._launched, self._slot, self._slots = launched, *_slot_of(launched)
        slot, folder = self._slot, self._request.events_dir
        last = partial(Ended, worker=slot)
        keeps = Silent() if folder is None else JsonlRecorder(folder, slot, last=lambda: last(at=time.perf_counter()))
        self._recorder = ReplicaRecorder(keeps, slot, self._slots)
        self._quorum = Quorum(manager)
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._carried: list[Any] = []
        self._loader: ElasticLoader | None = None
        self.global_batch_size = 0
        self._key = secrets.randbits(62)
        self._members: Members | None = None  # Of the last step that counted.
        self._present: Members | None = None
        self._restored: Mapping[str, Any] | None = None
        self._tracker: Tracker | None = None
        self._share: Share | None = None
        self._table: torch.Tensor | None = None
        self._works: list[Any] = []
        self.at = Position()
        self.counted = False
        """Whether the last step counted; False before the first, and after this replica has got a state."""
        self._settled = True
        self.fresh = False
        """Whether the slices must be planned anew, as the members or the position are others."""
        manager.register_state_dict_fn(_KEY, self._load, self._save)

    # The script's objects.

    def model(self, model: torch.nn.Module) -> Any:
        """Return the model in a DistributedDataParallel that sums gradients over the members; there may be several."""
        prepared = summing(model, self._reduce)
        self._modules.append(prepared.module)
        return prepared

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make the steps of this optimizer take place only if they count; returns it, without torchft's wrapper."""
        optimizer = optimizer.optim if isinstance(optimizer, OfTorchft) else optimizer
        step = optimizer.step

        @wraps(step)
        def step_if_it_counts(_: object, closure: Callable[[], float] | None = None) -> float | None:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            if self.commit():
                step()
            return loss

        optimizer.step = MethodType(step_if_it_counts, optimizer)  # type: ignore[method-assign]
        self._optimizers.append(optimizer)
        return optimizer

    def scheduler(self, scheduler: LRScheduler) -> LRScheduler:
        """Send this scheduler's state to replicas that join; its `step` does nothing if the optimizer's does not."""
        window_scheduler(scheduler, lambda: self.counted)
        return self.carry(scheduler)

    def carry(self, part: Any) -> Any:
        """Send the state of this object (a GradScaler, an average of weights) to replicas that join, and return it."""
        self._carried.append(part)
        return part

    def loader(self, loader: DataLoader[Any]) -> ElasticLoader:
        """Return a loader of this replica's batches.

        Raises:
            ConfigError: There is one already, or the global batch size is not known.
        """
        if self._loader is not None:
            raise ConfigError(
                "an elastic session has one loader: give it the training loader, and leave others as they are"
            )
        self._request = replace(self._request, loader=loader)
        given = self._request.global_batch_size or self._scheme.load.given_sizes
        if given is None and self._launched.elastic is None:
            raise ConfigError(
                "the global batch must not depend on who is there: give ElasticSession a global_batch_size, the samples"
                " of all replicas in a step"
            )
        self.global_batch_size = self._request.whole_batch_size(self._scheme, Sampling.of(loader), self._slots)
        self._loader = ElasticLoader(loader, self)
        return self._loader

    @property
    def step(self) -> int:
        """The number of steps that have counted."""
        return self._quorum.step

    # A step.

    def join(self) -> None:
        """Meet the other members for the next step; a replica that is behind has the state of the others afterwards."""
        self._quorum.open()

    def share_of(self, epoch: int) -> Share | None:
        """This replica's share of the next slice of the epoch; None once the epoch is over. Waits for the members.

        Raises:
            ConfigError: Something cannot work on this replica or on another, which is named.
            DisagreementError: The replicas were started with different things.
        """
        while True:
            if self.at.epoch > epoch:
                return None
            self.join()
            if self.at.epoch > epoch:
                return None
            if not self._quorum.broken and self._agree(epoch):
                break
            self._quorum.commit()
        assert self._loader is not None
        share = self._loader.planned(self.at)
        assert share is not None
        self._share, self._table, self._settled = share, None, False
        self.tracker.begin(share, share, self.at.epoch)
        return share

    @property
    def tracker(self) -> Tracker:
        """Follows this replica's iterations."""
        assert self._tracker is not None
        return self._tracker

    def _agree(self, epoch: int) -> bool:
        """Settle who the members are, if they may be others; False if one was lost meanwhile."""
        if self.at.epoch < epoch:
            self.at, self.fresh = Position(epoch), True
        if not self._quorum.changed:
            return True
        rank, count = self._quorum.place
        workers = Workers(
            rank=rank,
            count=count,
            host=socket.gethostname(),
            timeout_seconds=self._request.timeout,
            meet=self._quorum.gather,
        )
        try:
            told = gather(workers, {"key": self._key, "slot": self._slot, "host": workers.host})
            agreed, terms = agree(self._request_of([each["slot"] for each in told]), workers, Activity())
        except BrokenQuorumError:
            return False
        except (ConfigError, DisagreementError):
            if self._members is None or self._key not in self._members.keys:
                raise
            return False  # A replica that joins was started with something else: it ends, and the members go on.
        self._begin(tuple(each["key"] for each in told), agreed, terms, workers)
        assert self._loader is not None
        run = run_event(
            agreed, rank, iterations=len(self._loader), seed=self._request.seed, torch=str(torch.__version__)
        )
        self._recorder.members(told, rank, run, self.step)
        return True

    def _request_of(self, slots: list[int]) -> RunRequest:
        """The request of these members: sizes that the user gave are divided anew in their proportion."""
        scheme, whole = self._scheme, self.global_batch_size
        if (given := scheme.load.given_sizes) is not None:
            weights = np.array([given[slot] for slot in slots], dtype=np.int64)
            sizes = shares(whole, weights, lower=np.zeros_like(weights), upper=np.full_like(weights, whole))
            scheme = replace(scheme, load=Static(sizes=tuple(sizes.tolist())))
        return replace(
            self._request,
            models=tuple(self._modules),
            optimizers=tuple(self._optimizers),
            scheme=scheme,
            batch_sizes=None,
            global_batch_size=whole,
            emulate=None,  # This and `slow` are of a replica, whatever its rank.
            launched=msgspec.structs.replace(self._launched, slow=(), emulate=None, start_from=None),
        )

    def _begin(self, keys: tuple[int, ...], agreed: Agreed, terms: Terms, worker: Workers) -> None:
        if self._restored is not None and self._restored["keys"]:
            former = Members.of(agreed.scheme.load, tuple(self._restored["keys"]), None)
            former.policy.load_state_dict(self._restored["policy"])
            self._members, self._restored = former, None
        self._present = Members.of(agreed.scheme.load, keys, self._members)
        limits = SizeLimits(agreed.scheme.load, agreed.problem, agreed.limits)
        self._tracker = self._tracker or self._new_tracker(agreed, worker, limits)
        self._tracker.regroup(
            worker, self._present.policy, replace(agreed.problem, epoch=self.at.epoch), limits, self._quorum.step
        )
        self._rows = Rows(self._tracker.meter, partial(gather, worker))
        self._weigh = WEIGHTINGS[agreed.scheme.weighting]
        self.fresh = True
        assert self._loader is not None
        self._loader.follow(terms)

    def _new_tracker(self, agreed: Agreed, worker: Workers, limits: SizeLimits) -> Tracker:
        assert self._present is not None
        hold, _ = hold_of(self._request.emulate, self._launched, rank=self._slot, workers=self._slots)
        clock, slot = time.perf_counter, self._slot
        on_device = device_of(self._modules[0]).type == "cuda"
        return Tracker(
            workers=worker,
            policy=self._present.policy,
            problem=agreed.problem,
            limits=limits,
            meter=Meter(stopwatch=DeviceStopwatch() if on_device else HostStopwatch(clock)),
            recorder=Logged(self._recorder, slot),
            clock=clock,
            hold=hold,
        )

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Weigh a bucket of gradients and begin its sum; the last one waits for all, as DDP reads none before."""
        buffer = bucket.buffer()
        if self._share is None or self._settled:
            raise ConfigError(
                "a backward ran outside the loop over the session's loader: compute gradients of its batches alone"
            )
        if self._share.samples:
            buffer.mul_(self._weigh(self._share))
        else:
            buffer.zero_()
        self._works.append(self._quorum.sum(buffer))
        if bucket.is_last():
            self._exchange()
        return completed(buffer)

    def _exchange(self) -> None:
        tracker = self.tracker
        tracker.compute_ends()
        now = tracker.iteration
        assert now is not None
        rates = [float(group["lr"]) for each in self._optimizers for group in each.param_groups if "lr" in group]
        rank, count = self._quorum.place
        self._table = torch.zeros((count, COLUMNS), dtype=torch.int64)
        self._table[rank] = torch.tensor(self._rows.row(now, rates=rates))
        with tracker.waiting():
            for work in (*self._works, self._quorum.sum(self._table)):
                work.wait()
        self._works.clear()
        assert now.paused is not None
        now.synchronised_seconds = tracker.clock() - now.paused

    def commit(self) -> bool:
        """End the step, once; returns whether it counts.

        Raises:
            ConfigError: No backward has run over the batch.
            DisagreementError: The members computed different iterations, or at different learning rates.
        """
        if self._settled:
            return self.counted
        if self._table is None and not self._quorum.broken:
            raise ConfigError(
                "no backward ran over the last batch of the loader: every batch needs one, before the step"
            )
        with suppress(BrokenQuorumError):
            if self._table is not None and not self._quorum.broken:
                self._rows.check(self._table.numpy())
        self._settled, self.counted = True, self._quorum.commit()
        tracker, loader = self.tracker, self._loader
        assert loader is not None
        if self.counted:
            self._members = self._present
            leave_mark(self._launched, self._slot)
            loader.advance(self.at)
        else:
            tracker.meter.received = None
            tracker.take_back()
            self._recorder.not_counted(self.step, tracker.clock())
        return self.counted

    def next_begins(self) -> None:
        """The script asks for the next batch: end the step, if the script has not stepped, and learn from it."""
        self.commit()
        self.tracker.enter_loader()
        if self.counted:
            self.tracker.learn()

    # The state.

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch and the speeds, for a checkpoint of the script's own."""
        assert self._loader is not None
        members = self._members
        return msgspec.structs.asdict(
            LoaderState(
                seed=self._request.seed,
                epoch=self.at.epoch,
                iteration=self.at.done,
                length=self._loader.length,
                global_batch_size=self.global_batch_size,
                order=None,
                load={
                    "keys": [] if members is None else list(members.keys),
                    "policy": {} if members is None else members.policy.state_dict(),
                },
            )
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was called; before the loop. A replica that joins gets the others' state.

        Raises:
            ConfigError: It is not such a state.
        """
        saved = read_state(state)
        self.at, self._restored, self._members = Position(saved.epoch, saved.iteration), saved.load, None

    def _save(self) -> dict[str, Any]:
        """The state for a replica that joins."""
        return {
            "parts": [each.state_dict() for each in (*self._modules, *self._optimizers, *self._carried)],
            "loader": self.state_dict(),
            "random": (random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()),
        }

    def _load(self, state: dict[str, Any]) -> None:
        parts = *self._modules, *self._optimizers, *self._carried
        for part, saved in zip(parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        self.load_state_dict(state["loader"])
        of_python, of_numpy, of_torch = state["random"]
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        self.counted, self.fresh = False, True

    def close(self) -> None:
        """End the record of this replica."""
        if self._tracker is not None:
            self._tracker.close()


def _slot_of(launched: LaunchSettings) -> tuple[int, int]:
    """The number of this replica and of the places for replicas, as `evenstep run` or torchft's launcher says."""
    if launched.elastic is not None:
        return int(os.environ["RANK"]), launched.elastic[1]
    slot = int(os.environ.get("REPLICA_GROUP_ID", "0"))
    return slot, max(int(os.environ.get("NUM_REPLICA_GROUPS", "1")), slot + 1)
