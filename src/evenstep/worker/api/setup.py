"""The arguments of a script without a framework of its own, and the agreement of all workers on them."""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypedDict, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Ledger
from evenstep.core.values import UNLIMITED, IntArray, require_whole
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.marks import leave_mark
from evenstep.schemes import Scheme
from evenstep.worker.agreement import Agreed, Exchange, Own, agree, hold_of, record_of
from evenstep.worker.arguments import RUN_DIR, SCHEME, SEED, SWITCH, Argument, read_arguments, whole
from evenstep.worker.worker import Worker

_SIZE: Final = whole(1, UNLIMITED)
_LIMIT: Final = Argument(_SIZE.must_be, lambda value: UNLIMITED if value is None else _SIZE.read(value))


class ShareOptions(TypedDict, total=False):
    """The options that every loop over shares takes; `evenstep.Balancer` explains them."""

    drop_last: bool
    shuffle: bool
    seed: int
    smallest_batch: int
    largest_batch: int | None
    run_dir: str | os.PathLike[str] | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments that `Balancer` and `Client` share, and the launcher's options.

    `check`: Raises a ConfigError for a scheme or other arguments that the class cannot run. Returns the other values
    that must agree on all workers, as JSON. `mistake` describes the first wrong argument, if any, which has its default
    here.
    """

    scheme: Annotated[Scheme | str | None, SCHEME] = None
    rank: int
    workers: int
    length: Annotated[int, _SIZE] = 1
    global_batch_size: Annotated[int, _SIZE] = 1
    drop_last: Annotated[bool, SWITCH] = False
    shuffle: Annotated[bool, SWITCH] = True
    seed: Annotated[int, SEED] = 0
    smallest_batch: Annotated[int, _SIZE] = 1
    largest_batch: Annotated[int, _LIMIT] = UNLIMITED
    run_dir: Annotated[str | None, RUN_DIR] = None
    launched: LaunchSettings
    check: Callable[[Scheme], Mapping[str, Any]]
    mistake: str | None

    @classmethod
    def of(
        cls,
        launched: LaunchSettings,
        check: Callable[[Scheme], Mapping[str, Any]],
        *,
        rank: object,
        workers: object,
        **given: object,
    ) -> Self:
        """Read the arguments. Those that are wrong, but for `rank` and `workers`, are told to all in `agree`.

        Raises:
            ConfigError: The rank or the number of workers is wrong.
        """
        count = require_whole("workers", workers, 1, UNLIMITED)
        place = require_whole("rank", rank, 0, count - 1)
        values, mistake = read_arguments(cls, given)
        return cls(rank=place, workers=count, launched=launched, check=check, mistake=mistake, **values)

    @property
    def events_dir(self) -> Path | None:
        """The folder for events: the argument's, or else the environment's."""
        given = self.run_dir or self.launched.run_dir
        return None if given is None else Path(given)

    @property
    def worker(self) -> Worker:
        """This process among the workers. Without a time limit: the caller's functions decide how long to wait."""
        leave_mark(self.launched, self.rank)
        return Worker(rank=self.rank, count=self.workers, host=socket.gethostname(), timeout_seconds=float("inf"))

    def agree(self, exchange: Exchange) -> Agreed:
        """Check what this worker was given, and that all were given the same; all workers must call it together.

        Raises:
            ConfigError: Something cannot work on this worker or on another, which is named.
            DisagreementError: The workers were given different things.
        """
        return agree(self._check, exchange, size=lambda scheme: self.global_batch_size)

    def _check(self) -> Own:
        """Check everything that one worker can check alone."""
        if self.mistake is not None:
            raise ConfigError(self.mistake)
        scheme = self.launched.scheme_of(self.scheme)
        more = self.check(scheme)
        self.ledger(0)
        hold, emulated = hold_of(None, self.launched, rank=self.rank, workers=self.workers)
        largest = self.largest_batch if hold is None else min(self.largest_batch, hold.largest_batch)
        same = ("workers", "length", "global_batch_size", "seed", "drop_last", "shuffle", "smallest_batch")
        host = socket.gethostname()
        device = f"{host}, worker {self.rank}"
        record = {
            **record_of(scheme, host=host, device=device, hold=hold),
            **{name: getattr(self, name) for name in same},
            "largest_batch": largest,
            "largest_first": largest,
            **more,
        }
        return Own(scheme=scheme, hold=hold, emulated=emulated, record=record)

    def order(self, epoch: int) -> IntArray:
        """Return the dataset index at each position of the epoch, int64 of shape [length].

        Only the raw stream of the generator is used, which is the same in every version of NumPy.
        """
        if not self.shuffle:
            return np.arange(self.length, dtype=np.int64)
        key = self.seed % 2**64 | (epoch % 2**64) << 64
        return np.argsort(np.random.Philox(key=key).random_raw(self.length), kind="stable").astype(np.int64)

    def ledger(self, iteration: int) -> Ledger:
        """Return the slices of an epoch from this iteration on."""
        return Ledger(
            length=self.length,
            global_batch_size=self.global_batch_size,
            drop_last=self.drop_last,
            iteration=iteration,
        )
