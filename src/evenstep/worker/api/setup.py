"""What a script asks for, the agreement of all workers on it, and the parts of a worker that follow."""

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from evenstep.core.disagreement import Field, require_agreement
from evenstep.core.errors import ConfigError, naming
from evenstep.core.load.checked import load_policy
from evenstep.core.load.limits import SizeLimits
from evenstep.core.load.narx import Narx
from evenstep.core.samples import Ledger
from evenstep.core.shown import shown
from evenstep.core.sync.checked import sync_policy
from evenstep.core.values import UNLIMITED, IntArray, Problem, plain, require_whole
from evenstep.core.version import VERSION
from evenstep.launch.launch_settings import VARIABLES, LaunchSettings
from evenstep.launch.marks import leave_line, leave_mark
from evenstep.schemes import DEFAULT, Scheme, parse_scheme, placed
from evenstep.telemetry import SCHEMA, JsonlRecorder, Logged, Silent
from evenstep.telemetry.events import Ended, Run
from evenstep.telemetry.say import say
from evenstep.worker.activity import Activity
from evenstep.worker.agreement import hold_of, limits_of, problem_of, tell, tells_plans
from evenstep.worker.earlier import earlier_start, first_policy, identity_of, last_sizes
from evenstep.worker.factors import FactorSampler
from evenstep.worker.hold import Hold
from evenstep.worker.meter import Meter
from evenstep.worker.stopwatch import Stopwatch
from evenstep.worker.summary import Summary
from evenstep.worker.tracker import Tracker
from evenstep.worker.worker import Worker

_MASK: Final = 2**64 - 1

_MUST_AGREE: Final = {
    "version": Field(phrase="version {} of evenstep"),
    "scheme": Field(phrase="the scheme {}"),
    "length": Field(phrase="an epoch of {} samples"),
    "global_batch_size": Field(phrase="a global_batch_size of {}"),
    "workers": Field(phrase="workers={}"),
    "drop_last": Field(phrase="drop_last={}"),
    "shuffle": Field(phrase="shuffle={}"),
    "seed": Field(phrase="a seed of {} for the order of samples"),
    "weights": Field(phrase="weights of {}"),
    "optimizer": Field(phrase="the optimizer {}"),
}
"""Of the records; those of a `Balancer` have no weights and no optimizer."""
_NUMBERS: Final = ("rank", "workers", "length", "global_batch_size", "seed", "smallest_batch", "largest_batch")
_SWITCHES: Final = ("drop_last", "shuffle")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """This worker's part: what it was asked for, what emulates slowness, and what the other workers are told."""

    scheme: Scheme
    hold: Hold | None
    emulated: bool
    record: Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What is the same on all workers, and this worker's `own` part; `limits` as in `limits_of`.

    `workers`: the records of all workers.
    """

    scheme: Scheme
    problem: Problem
    limits: IntArray
    workers: Sequence[Mapping[str, Any]]
    own: Own


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments that `Balancer` and `Client` share, as they were given, and the launcher's options beside them.

    `check`: Raises a ConfigError for a scheme that the class cannot run, and for what else it was given. Returns what
    else must agree on all workers, as JSON.
    """

    scheme: Scheme | str | None
    rank: int
    workers: int
    length: int
    global_batch_size: int
    drop_last: bool
    shuffle: bool
    seed: int
    smallest_batch: int
    largest_batch: int | None
    run_dir: str | os.PathLike[str] | None
    launched: LaunchSettings
    check: Callable[[Scheme], Mapping[str, Any]]

    def __post_init__(self) -> None:
        for name in (*_NUMBERS, *_SWITCHES):
            object.__setattr__(self, name, plain(getattr(self, name)))

    @property
    def events_dir(self) -> Path | None:
        """Where events go: the argument's folder, or else the environment's."""
        given = self.launched.run_dir if self.run_dir is None else self.run_dir
        return None if given is None else Path(given)

    @property
    def worker(self) -> Worker:
        """This process among the workers; other workers are waited for as the caller's functions do."""
        require_whole("workers", self.workers, 1, UNLIMITED)
        require_whole("rank", self.rank, 0, self.workers - 1)
        leave_mark(self.launched, self.rank)
        return Worker(rank=self.rank, count=self.workers, host=socket.gethostname(), timeout_seconds=float("inf"))

    def agree(self, gather: Callable[[Mapping[str, Any]], list[dict[str, Any]]]) -> Agreed:
        """Check what this worker was given, and that all were given the same; all workers must call it together.

        Raises:
            ConfigError: Something cannot work on this worker or on another, which is named.
            DisagreementError: The workers were given different things.
        """
        own, records = tell(self._check, gather)
        require_agreement(records, {key: field for key, field in _MUST_AGREE.items() if key in own.record})
        scheme = placed(own.scheme, [record["host"] for record in records], [""] * len(records))
        limits = limits_of(scheme, records)
        problem = problem_of(scheme, self.global_batch_size, limits, records)
        # Refuse what cannot be shared out or grouped, on every worker alike.
        load_policy(scheme.load, len(records)).allocate(problem)
        sync_policy(scheme.sync, len(records))
        return Agreed(scheme=scheme, problem=problem, limits=limits, workers=records, own=own)

    def _check(self) -> Own:
        """Check everything that one worker can check alone."""
        for name in ("length", "global_batch_size", "smallest_batch"):
            require_whole(name, getattr(self, name), 1, UNLIMITED)
        if self.largest_batch is not None:
            require_whole("largest_batch", self.largest_batch, 1, UNLIMITED)
        require_whole("seed", self.seed, -(2**63), 2**63 - 1)
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {shown(value)}")
        scheme = self._scheme()
        more = self.check(scheme)
        self.ledger(0)
        hold, emulated = hold_of(None, self.launched, rank=self.rank, workers=self.workers)
        largest = min(
            UNLIMITED if self.largest_batch is None else self.largest_batch,
            UNLIMITED if hold is None else hold.largest_batch,
        )
        return Own(scheme=scheme, hold=hold, emulated=emulated, record={**self._record(scheme, largest, hold), **more})

    def _scheme(self) -> Scheme:
        if self.scheme is None:
            return self.launched.asked_scheme() or parse_scheme(DEFAULT)
        return parse_scheme(self.scheme)

    def _record(self, scheme: Scheme, largest: int, hold: Hold | None) -> dict[str, Any]:
        return {
            "version": VERSION,
            "scheme": scheme.name,
            "workers": self.workers,
            "length": self.length,
            "global_batch_size": self.global_batch_size,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "host": (host := socket.gethostname()),
            "identity": identity_of(f"{host}, worker {self.rank}", hold),
            "earlier": earlier_start(self.launched, self.events_dir, self.rank),
            "smallest_batch": self.smallest_batch,
            "largest_batch": largest,
            "largest_first": largest,
        }

    def order(self, epoch: int) -> IntArray:
        """The dataset index at each position of the epoch, int64 of shape [length].

        Only the raw stream of the generator is used, which is the same in every version of NumPy.
        """
        if not self.shuffle:
            return np.arange(self.length, dtype=np.int64)
        key = (self.seed & _MASK) | ((epoch & _MASK) << 64)
        return np.argsort(np.random.Philox(key=key).random_raw(self.length), kind="stable").astype(np.int64)

    def ledger(self, iteration: int) -> Ledger:
        """The slices of an epoch from this iteration on."""
        return Ledger(
            length=self.length,
            global_batch_size=self.global_batch_size,
            drop_last=self.drop_last,
            iteration=iteration,
        )

    # The parts of a worker.

    def tracker(self, agreed: Agreed, worker: Worker, stopwatch: Stopwatch, activity: Activity) -> Tracker:
        """What follows this worker's iterations; its first event is in the log."""
        recorder, clock = self._recorder(), time.perf_counter
        recorder.record(self._run(agreed, worker))
        forecasts, hold = agreed.scheme.load.uses_forecasts, agreed.own.hold
        return Tracker(
            workers=worker,
            policy=first_policy(agreed.scheme, agreed.problem, agreed.workers, worker.rank),
            problem=agreed.problem,
            limits=SizeLimits(agreed.scheme.load, agreed.problem, agreed.limits),
            meter=Meter(
                stopwatch=stopwatch,
                forecaster=Narx() if forecasts else None,
                sampler=(hold or FactorSampler(threads=1, clock=clock)) if forecasts else None,
            ),
            recorder=recorder,
            last_sizes=last_sizes(agreed.scheme, agreed.workers, self.launched, self.events_dir, worker.rank),
            tells_plans=tells_plans(agreed.scheme, agreed.workers, worker.rank),
            clock=clock,
            hold=hold,
            activity=activity,
            summary=self._summary(agreed.scheme),
        )

    def _recorder(self) -> Logged:
        folder = self.events_dir
        if folder is None:
            return Logged(Silent(), self.rank)
        with naming("run_dir" if self.run_dir is not None else VARIABLES["run_dir"]):
            return Logged(JsonlRecorder(folder, self.rank, last=partial(_ended, self.rank)), self.rank)

    def _summary(self, scheme: Scheme) -> Summary | None:
        """What says at the end how the run went: on worker 0, or on servers the first of them."""
        if self.rank or self.workers == 1 or scheme.served is not None:
            return None
        marks = self.launched.marks
        return Summary(
            workers=self.workers,
            global_batch_size=self.global_batch_size,
            scheme=scheme.name,
            say=say if marks is None else partial(leave_line, marks),
        )

    def _run(self, agreed: Agreed, worker: Worker) -> Run:
        problem = agreed.problem
        return Run(
            worker=worker.rank,
            schema=SCHEMA,
            at=time.perf_counter(),
            unix_seconds=time.time(),
            workers=worker.count,
            scheme=agreed.scheme.name,
            engine="collective" if agreed.scheme.served is None else "server",
            global_batch_size=problem.global_batch_size,
            iterations_per_epoch=self.ledger(0).iterations,
            minimum=problem.minimum.tolist(),
            maximum=problem.maximum.tolist(),
            multiple=problem.multiple,
            seed=self.seed,
            emulated=agreed.own.emulated,
            version=VERSION,
            python=platform.python_version(),
            host=worker.host,
            device=f"{worker.host}, worker {worker.rank}",
        )


def _ended(rank: int) -> Ended:
    return Ended(worker=rank, at=time.perf_counter())
