"""The interface of the question *how far ahead*, and the events and commands that pass through it."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias, final

from evenstep.core.groups import Groups
from evenstep.core.values import State

# Values made anew for each push have their constructor written out, and are made by position. That takes less than
# frozen dataclasses, named tuples or keywords. Nothing changes them all the same, as the type checker sees.


@final
@dataclass(init=False, slots=True, unsafe_hash=True)
class Push:
    """A worker's gradients have arrived, whole.

    Attributes:
        worker: Its rank.
        iteration: Counts this worker's pushes up; with the worker it names the push.
        samples: How many training samples it was computed on. 0: an empty push (a skipped step), which counts as an
            iteration and changes nothing.
        units: What it counts by beside the other pushes of a commit: its samples, or what the script weighs by.
        share: Its samples over the global batch size.
        version: The version of the weights that it was computed on.
    """

    worker: Final[int]
    iteration: Final[int]
    samples: Final[int]
    units: Final[int]
    share: Final[float]
    version: Final[int]

    def __init__(self, worker: int, iteration: int, samples: int, units: int, share: float, version: int) -> None:
        self.worker = worker
        self.iteration = iteration
        self.samples = samples
        self.units = units
        self.share = share
        self.version = version


@final
@dataclass(init=False, slots=True, unsafe_hash=True)
class Commit:
    """Fold these pushes into the parameters as one update: their mean, weighted by units. Never empty.

    `share` is the part of a global batch that the update stands for: 1 for a whole barrier.
    """

    pushes: Final[tuple[Push, ...]]
    share: Final[float]

    def __init__(self, pushes: tuple[Push, ...], share: float) -> None:
        self.pushes = pushes
        self.share = share


@final
@dataclass(init=False, slots=True, unsafe_hash=True)
class Release:
    """This worker may start its next iteration, on the weights as the commits before this command have left them.

    `lead` is its lead at this moment and `bound` what allowed it (None: nothing bounds it); `held_seconds` is how long
    it waited since its push, 0 for one that has just joined.
    """

    worker: Final[int]
    lead: Final[int]
    bound: Final[int | None]
    held_seconds: Final[float]

    def __init__(self, worker: int, lead: int, bound: int | None, held_seconds: float) -> None:
        self.worker = worker
        self.lead = lead
        self.bound = bound
        self.held_seconds = held_seconds


class Regroup(NamedTuple):
    """From here on these are the groups, each of which takes every iteration together; `reason` is one sentence."""

    groups: Groups
    reason: str


Command: TypeAlias = Commit | Release | Regroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStatistics:
    """Counts since the policy was made: `pushes` and `held_seconds` by worker, `largest_lead` at any release."""

    pushes: dict[int, int] = field(default_factory=dict)
    held_seconds: dict[int, float] = field(default_factory=dict)
    largest_lead: int = 0


class SyncPolicy(Protocol):
    """Decides what is committed when, and who may run.

    Times are seconds of any clock that does not go back. Commands are to be carried out in their order, before the next
    event. A worker is *running* from its release to its push, and *held* from its push to its release; `lead` is its
    iterations minus those of the slowest worker that has joined. Some worker that has joined is always running.
    """

    def on_join(self, worker: int, now: float) -> list[Command]:
        """A worker begins, level with the slowest; the commands release it.

        Raises:
            ProtocolError: It has joined already.
        """

    def on_push(self, push: Push, now: float) -> list[Command]:
        """A running worker's push has arrived; it is held until its release, which may be among the commands.

        Raises:
            ProtocolError: The worker has not joined, or is held.
        """

    def on_leave(self, worker: int, now: float) -> list[Command]:
        """A worker is gone, or rests: it holds nobody from now on. A push of its that has arrived is still committed.

        Raises:
            ProtocolError: The worker has not joined.
        """

    def waited_for(self) -> list[int]:
        """The running workers that held ones wait for, ascending. Takes time for all workers."""

    def statistics(self) -> SyncStatistics:
        """What has happened so far."""

    def state_dict(self) -> State:
        """What a new policy needs beside the joins of its workers to decide as this one: plain numbers and lists."""

    def load_state_dict(self, state: State) -> None:
        """Go on where the given state was taken, before any worker joins."""


class Sync(Protocol):
    """The answer to *how far ahead* as a part of a scheme: makes the policy.

    Attributes:
        in_step: Workers take every iteration together, so that its samples are one slice of the epoch: all of them, or
            those of a group where there was a `Regroup`.
    """

    @property
    def in_step(self) -> bool: ...

    def policy(self, workers: int) -> SyncPolicy:
        """A new policy for a run of so many workers, none of which has joined."""
