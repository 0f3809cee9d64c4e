"""A replica's session: the script's objects, the slice of each step, and the state for replicas that join."""

import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from types import MethodType
from typing import Any, Final, TypedDict, TypeVar, Unpack, final

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torchft import Manager
from torchft import Optimizer as OfTorchft

from evenstep.cluster import Cluster
from evenstep.core.errors import ConfigError, DisagreementError
from evenstep.core.load import Load, Static
from evenstep.core.load.members import Members
from evenstep.core.load.shares import shares
from evenstep.launch.c10d import GradBucket
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.marks import leave_mark
from evenstep.schemes import Scheme
from evenstep.torch.agree import agree
from evenstep.torch.cuda import DeviceStopwatch
from evenstep.torch.data.common_data import checksum_of
from evenstep.torch.data.loader import PreparedLoader
from evenstep.torch.data.loop import BatchLoop, Bound
from evenstep.torch.data.sampling import Sampling
from evenstep.torch.elastic.engine import ElasticEngine, ReplicaRecorder
from evenstep.torch.elastic.local import LocalReplica
from evenstep.torch.elastic.quorum import BrokenQuorumError, Quorum
from evenstep.torch.elastic.summed import SummingReplica, sum_parts, summing, whole
from evenstep.torch.engines.engine import NO_BATCH
from evenstep.torch.failure import install_hook
from evenstep.torch.model import PreparedModel, device_of, forget
from evenstep.torch.optimizers import window_scheduler
from evenstep.torch.processes.meshes import among, inside_of
from evenstep.torch.processes.workers import Workers, gather, of_all
from evenstep.torch.refusals import require_loader
from evenstep.torch.request import RunRequest
from evenstep.worker.activity import Activity
from evenstep.worker.agreement import hold_of
from evenstep.worker.arguments import require_known
from evenstep.worker.meter import HostStopwatch
from evenstep.worker.opening import open_tracker, record_in, run_event

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

_KEY: Final = "evenstep"  # Of this state among those that torchft sends to a replica that joins.


class ElasticOptions(TypedDict, total=False):
    """The options of `ElasticSession` besides `scheme`, with the same meaning as in `evenstep.prepare`."""

    global_batch_size: int | None
    batch_sizes: Any
    seed: int
    run_dir: str | os.PathLike[str] | None
    emulate: Cluster | str | os.PathLike[str] | None
    mesh: DeviceMesh | None
    data_dims: Sequence[str]


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
        scheme: A scheme that sums gradients in every step, such as `lb-bsp`, the default, or one of local steps,
            `local-sgd` or `diloco`, in which whole periods count or not.
        options: `global_batch_size` (the samples of a step, whoever is there; without `evenstep run --elastic` it must
            be given), `batch_sizes`, `seed`, `run_dir` and `emulate`, as in `evenstep.prepare`. A replica of several
            processes needs `mesh`, their own device mesh; they get one batch, or one each along the mesh's `data_dims`,
            over which `fully_shard` then sums the gradients.

    Raises:
        ConfigError: An argument is wrong, or the scheme cannot run under a quorum.
    """

    def __init__(self, manager: Manager, scheme: Scheme | str | None = None, **options: Unpack[ElasticOptions]) -> None:
        require_known(options, ("scheme", *ElasticOptions.__annotations__), "ElasticSession")
        install_hook()
        launched = LaunchSettings.from_environment(os.environ)
        given = RunRequest.of(launched, scheme=scheme, **options)
        if given.mistake is not None:
            raise ConfigError(given.mistake)
        self._request = replace(given, mesh=None, data_dims=())  # Of this replica alone.
        self._scheme = scheme = self._request.asked_scheme()
        scheme.require_elastic()
        self._launched, self._slot, self._slots = launched, *slot_of(launched)
        self._inside = inside = _inside_of(manager, given, scheme)
        self._split, self._first = inside.peers is not None, inside.processes.rank == 0
        # Those of data parallelism inside a replica are workers of their own.
        self._number, self._places = self._slot * inside.count + inside.rank, self._slots * inside.count
        folder = self._request.events_dir if inside.leads else None
        keeps = record_in(folder, self._number, launched)
        self._recorder = ReplicaRecorder(keeps, self._number, self._places)
        tell: Callable[[str], None] = partial(leave_mark, launched, f"{self._slot}.state")
        self._quorum = Quorum(manager, tell if self._first else lambda _: None, inside, ahead=scheme.period is None)
        self._modules: list[torch.nn.Module] = []
        self._prepared: list[PreparedModel] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._carried: list[Any] = []
        self._loader: PreparedLoader | None = None
        self._engine: ElasticEngine | None = None
        self._stepped = False
        """Whether an optimizer stepped when it was last asked to."""
        key = of_all(inside.processes, torch.tensor(secrets.randbits(60)))[0]
        self._key = int(key) + inside.rank
        self._arrived: dict[str, Any] | None = None
        """The state of another replica, until this one has agreed with the members."""
        self._activity = Activity()
        self.closed = False
        manager.register_state_dict_fn(_KEY, self._receive, self._save)

    def model(self, model: torch.nn.Module) -> Any:
        """Return the model in a DistributedDataParallel that sums gradients over the members; there may be several.

        One that is split over the processes of a replica is a `PreparedModel` instead, which sums them when backward
        ends, and under a scheme of local steps one that sums none.
        """
        module = whole(model, alone=not self._split)
        prepared: Any = PreparedModel(module)
        replica = prepared
        if self._scheme.period is None and not self._split:
            replica = summing(module, partial(self._reduce, len(self._modules)))
            prepared.follow(replica)
        self._modules.append(module)
        self._prepared.append(prepared)
        return replica

    def _reduce(self, model: int, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._engine is None:
            raise ConfigError(NO_BATCH)
        assert isinstance(self._engine, SummingReplica)
        return self._engine.communicate(model, bucket)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make the steps of this optimizer take place only if they count; returns it, without torchft's wrapper."""
        optimizer = optimizer.optim if isinstance(optimizer, OfTorchft) else optimizer
        step = optimizer.step

        @wraps(step)
        def step_if_it_counts(_: object, closure: Callable[[], float] | None = None) -> float | None:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            self._stepped = self._engine is not None and self._engine.steps(optimizer)
            if self._stepped:
                leave_mark(self._launched, self._slot)
                step()
            return loss

        optimizer.step = MethodType(step_if_it_counts, optimizer)  # type: ignore[method-assign]
        self._optimizers.append(optimizer)
        return optimizer

    def scheduler(self, scheduler: LRScheduler) -> LRScheduler:
        """Send this scheduler's state to replicas that join; its `step` does nothing if the optimizer's does not."""
        window_scheduler(scheduler, lambda: self._stepped)
        return self.carry(scheduler)

    def carry(self, part: Any) -> Any:
        """Send the state of this object (a GradScaler, an average of weights) to replicas that join, and return it."""
        self._carried.append(part)
        return part

    def loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        """Return a loader of this replica's batches.

        A loop over it is one epoch, counted from 0. On a replica that joins in a later epoch, the loops of the earlier
        ones are empty; `for epoch in range(loader.epoch, epochs)` leaves them out.

        Raises:
            ConfigError: There is one already, or the global batch size is not known.
        """
        if self._loader is not None:
            raise ConfigError(
                "an elastic session has one loader: give it the training loader, and leave others as they are"
            )
        self._request = replace(self._request, loader=require_loader(loader), checksum=checksum_of(loader))
        self._scheme = self._request.asked_scheme()  # With steps by speed on batches of this loader's size.
        given = self._request.global_batch_size or self._scheme.load.given_sizes
        if given is None and self._launched.elastic is None:
            if self._scheme.counts_periods:
                raise ConfigError(
                    "a period has as many steps as all places for replicas take, whose number is not known here: start"
                    " the script by evenstep run --elastic MIN:MAX, or leave out steps=speed"
                )
            raise ConfigError(
                "the global batch must not depend on who is there: give ElasticSession a global_batch_size, the samples"
                " of all replicas in a step"
            )
        self.global_batch_size = self._request.whole_batch_size(self._scheme, Sampling.of(loader), self._places)
        self._loader = PreparedLoader(loader, self, 0)
        return self._loader

    @property
    def step(self) -> int:
        """The number of steps that have counted, or of periods."""
        return self._quorum.step

    @property
    def counted(self) -> bool:
        """True if the last step or the last period counted; False before the first."""
        return self._engine is not None and self._engine.counted

    def start_with(self, loader: BatchLoop) -> None:
        """Bind the loader, on the terms of this replica alone; the members agree when they meet."""
        inside = self._inside
        workers = among(inside, (0, 1), partial(of_all, inside.processes)) if self._split else inside
        agreed, terms = agree(self._request_of([self._slot] * inside.count), workers, self._activity)
        hold, emulated = hold_of(self._request.emulate, self._launched, rank=self._slot, workers=self._slots)
        tracker = open_tracker(
            replace(agreed, own=replace(agreed.own, hold=hold, emulated=emulated)),
            workers,
            DeviceStopwatch() if device_of(self._modules[0]).type == "cuda" else HostStopwatch(time.perf_counter),
            self._activity,
            launched=self._launched,
            recorder=self._recorder,
            leads=inside.leads,
        )
        tracker.place = self._number
        common, scheme = (workers, tracker, self._quorum, terms, self._settle), agreed.scheme
        mine: Any = {"scheme": scheme, "models": self._modules, "optimizers": self._optimizers}
        if scheme.period is None:
            engine: ElasticEngine = SummingReplica(*common, **mine)
        else:
            engine = LocalReplica(*common, **mine, parts=lambda: (*self._optimizers, *self._carried))
        self._engine = engine
        for index, (module, prepared) in enumerate(zip(self._modules, self._prepared, strict=True)):
            prepared.bind(module, engine, index, comm_hook=None)
            if self._split and isinstance(engine, SummingReplica):
                sum_parts(module, engine, index, inside)
            forget(module)  # The members agree on it again and again.
        bound = Bound(terms=terms, scheme=agreed.scheme, engine=engine, surveyed=False)
        loader.bind(self._request.loader, bound)

    def follow(self, loader: BatchLoop) -> None:
        """Meet the members, if the next loop would, and make it that of the epoch in which they are."""
        engine = loader.engine
        assert isinstance(engine, ElasticEngine)
        if (at := loader.next_position) is not None:
            engine.at = max(engine.at, at)
            if not engine.meets(at[0]):
                loader.set_epoch(engine.at[0])

    def expected_batch_size(self, _: DataLoader[Any]) -> int:
        """The samples of a step."""
        return self.global_batch_size

    @property
    def batches_in_iteration(self) -> int:
        """The batches of a member in a step, on average."""
        return self._scheme.batches_in_iteration

    def expected_length(self, _: DataLoader[Any], parts: int = 1) -> int:
        """The steps of an epoch, each cut into `parts`."""
        assert self._loader is not None
        self.start_with(self._loader)
        return self._loader.iterations(parts)

    def draws_own(self, _: DataLoader[Any]) -> bool:
        """False: the members divide the slices of one dataset."""
        return False

    def _settle(self) -> bool:
        """Agree with the members, who may be others, and take over the state of another; False if one was lost."""
        engine = self._engine
        assert engine is not None
        workers = among(self._inside, self._quorum.place, self._quorum.rows)
        try:
            told = gather(workers, {"key": self._key, "slot": self._number, "host": workers.host})
            slots = [each["slot"] // self._inside.count for each in told]
            agreed, terms = agree(self._request_of(slots), workers, self._activity)
        except BrokenQuorumError:
            return False
        except (ConfigError, DisagreementError):
            if engine.members is None or self._key not in engine.members.keys:
                raise
            return False  # A replica that joins was started with something else: it ends, and the members go on.
        if self._arrived is not None:
            self._take_over(engine, self._arrived, agreed.scheme.load)
        engine.regroup(workers, tuple(each["key"] for each in told), agreed, terms)
        assert self._loader is not None
        length, seed = self._loader.iterations(), self._request.seed
        run = run_event(agreed, workers.rank, iterations=length, seed=seed, torch=str(torch.__version__))
        self._recorder.members(told, workers.rank, run, engine.number)
        return True

    def _request_of(self, slots: list[int]) -> RunRequest:
        """The request of the workers in these places: sizes that the user gave are divided anew in their proportion."""
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
            launched=msgspec.structs.replace(self._launched, slow=(), emulate=None),
        )

    def _receive(self, state: dict[str, Any]) -> None:
        self._arrived = state

    def _save(self) -> dict[str, Any]:
        """The state for a replica that joins."""
        if self._arrived is not None:
            return self._arrived
        engine = self._engine
        assert engine is not None
        members = engine.members
        return {
            "parts": [each.state_dict() for each in self._parts],
            "at": engine.at,
            "members": None if members is None else (members.keys, members.policy.state_dict()),
            "random": (random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()),
        }

    def _take_over(self, engine: ElasticEngine, state: dict[str, Any], load: Load) -> None:
        if len(state["parts"]) != len(self._parts):
            raise ConfigError(
                f"the members have {len(state['parts'])} models, optimizers, schedulers and other parts with a state,"
                f" and this replica has {len(self._parts)}: give the session the same ones in the same order"
            )
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        engine.at, engine.counted, engine.members = tuple(state["at"]), False, None
        if state["members"] is not None:
            keys, policy = state["members"]
            engine.members = Members.of(load, tuple(keys), None)
            engine.members.policy.load_state_dict(policy)
        of_python, of_numpy, of_torch = state["random"]
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        self._arrived = None

    @property
    def _parts(self) -> list[Any]:
        return [*self._modules, *self._optimizers, *self._carried]

    def close(self) -> None:
        """End the record of this replica."""
        self.closed = True
        if self._engine is not None:
            self._engine.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _inside_of(manager: Manager, request: RunRequest, scheme: Scheme) -> Workers:
    """This process in its replica."""
    count, mesh = manager._group_world_size, request.mesh
    if count == 1 and mesh is None and not request.data_dims:
        return Workers(rank=0, count=1, host=socket.gethostname(), timeout_seconds=request.timeout)
    if count == 1:
        raise ConfigError(
            "a replica is one process, and mesh and data_dims are for several: leave them out, or start replicas of"
            " several (evenstep run --nproc-per-replica)"
        )
    if mesh is None:
        raise ConfigError(f"this replica has {count} processes: give mesh, the device mesh of these processes alone")
    if scheme.period is not None:
        raise ConfigError(
            f"the scheme {scheme.name!r} goes with replicas of one process each: use lb-bsp, dbs, bsp or batch_sizes"
        )
    if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != (manager._group_rank, count):
        raise ConfigError(
            f"the process group must have the {count} processes of this replica alone, with the ranks that torchft's"
            " Manager has: call init_process_group with those"
        )
    return inside_of(mesh, request.data_dims, request.timeout)


def slot_of(launched: LaunchSettings) -> tuple[int, int]:
    """The number of this replica and of the places for replicas, as `evenstep run` or torchft's launcher says."""
    if launched.elastic is not None and launched.nproc_per_replica == 1:
        return int(os.environ["RANK"]), launched.elastic[1]
    slot = int(os.environ.get("REPLICA_GROUP_ID", "0"))
    if launched.elastic is not None:
        return slot, launched.elastic[1]
    return slot, max(int(os.environ.get("NUM_REPLICA_GROUPS", "1")), slot + 1)
