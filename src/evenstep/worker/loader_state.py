"""The position of a loader, and its state in a checkpoint."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, final

import msgspec
import numpy as np
from msgspec import Meta

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Drawn
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED
from evenstep.worker.tracker import Tracker

_Count = Annotated[int, Meta(ge=0, le=2**62)]
_AGAIN = "give what a loader's state_dict() returned"


@final
class LoaderState(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a run: `iteration` of `epoch`, whether in a loop, and the speeds behind the sizes (`load`).

    `length` is the length of an epoch, over all workers; `lengths` are the lengths of the workers' datasets if they are
    private. `taken` are the samples that each worker has taken in the epoch, where each draws from data of its own, and
    `firsts` checksums of each one's first; `length` is then 0 before the epoch is over. `order` is the order of the
    epoch if a user's sampler drew it, which may not draw it again. `ends` are the ends of the lists of a batch sampler.
    """

    version: Literal[1] = 1
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    epoch: _Count
    iteration: _Count
    looping: bool = False
    length: _Count
    lengths: list[_Count] | None = None
    global_batch_size: Annotated[int, Meta(ge=1, le=UNLIMITED)]
    order: list[_Count] | None
    ends: list[_Count] | None = None
    taken: list[_Count] | None = None
    firsts: list[_Count] | None = None
    load: dict[str, Any]


def read_state(state: object) -> LoaderState:
    """Read a state, which may come from a file.

    Raises:
        ConfigError: It is not the state of a loader, or is of another version.
    """
    if not isinstance(state, dict):
        raise ConfigError(f"a loader goes on from what its state_dict() returned, not from {shown(state)}")
    if state.get("version") != 1:
        raise ConfigError(f"this loader state has version {shown(state.get('version'))}, not 1: it cannot be resumed")
    try:
        read = msgspec.convert(state, LoaderState)
    except msgspec.ValidationError as error:
        found = re.search(r"(?:field `|`\$\.)(\w+)", str(error))
        name = found[1] if found else "it"
        raise ConfigError(f"this loader state is damaged ({name} is {shown(state.get(name))}): {_AGAIN}") from None
    length = read.ends[-1] if read.ends else read.length
    if read.order is not None and len(read.order) != length:
        raise ConfigError(
            f"this loader state is damaged (an order of {len(read.order)} for {length} samples): {_AGAIN}"
        )
    return read


@final
@dataclass(slots=True)
class Progress:
    """The position of a loader: the epochs of this loop and of the next, and the iterations `done` in this one.

    `resume` is the iteration at which the next loop begins in mid-epoch. `drawn` is the epoch's order if a checkpoint
    needs it. `chosen`: the script has set the epoch of the next loop.
    """

    epoch: int = 0
    next_epoch: int = 0
    looping: bool = False
    done: int = 0
    resume: int | None = None
    drawn: Drawn | None = None
    chosen: bool = False
    _resumed: int | None = None

    def set_next(self, epoch: int) -> None:
        """Make this the epoch of the next loop."""
        if epoch != self.next_epoch:
            self.resume = None
        self.next_epoch, self.chosen = epoch, True

    def start_at(self, iteration: int) -> None:
        """Make the next loop begin at this iteration of its epoch."""
        if self.epoch != self.next_epoch:
            self.drawn = None  # It belongs to another epoch.
        self.resume, self.chosen = iteration, True

    def begin(self, *, again: bool = False) -> bool:
        """Begin the next loop, `again` like the last one if the script has not chosen its epoch.

        Returns whether it resumes an epoch, at iteration `done`.
        """
        if again and not self.chosen:
            self.next_epoch, self.resume = self.epoch, self._resumed
        self.chosen, self._resumed = False, self.resume
        self.epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        resuming, self.done = self.resume is not None, self.resume or 0
        self.resume = None
        return resuming

    def restore(self, saved: LoaderState, iterations: int) -> None:
        """Continue from a state, in epochs of that many iterations."""
        over = saved.iteration >= iterations and not saved.looping
        self.epoch, self.done = saved.epoch, saved.iteration
        self.next_epoch = saved.epoch + 1 if over else saved.epoch
        self.resume = None if over else saved.iteration
        self.chosen, self.drawn = True, None
        if saved.order is not None and not over:
            ends = None if saved.ends is None else np.array(saved.ends, dtype=np.int64)
            self.drawn = Drawn(indices=np.array(saved.order, dtype=np.int64), ends=ends)


def load_speeds(tracker: Tracker, load: dict[str, Any]) -> None:
    """Continue from the speeds of a state.

    Raises:
        ConfigError: They are damaged.
    """
    try:
        tracker.load_state_dict(load)
    except ConfigError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"what this loader state says of sizes and speeds is damaged ({type(error).__name__}: {error}): {_AGAIN}"
        ) from error
