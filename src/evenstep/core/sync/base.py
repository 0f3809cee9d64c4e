"""The interface of the question *how far ahead*, and the events and commands that pass through it."""

from typing import Protocol, TypeAlias, final

from msgspec import Struct

from evenstep.core.groups import Regroup
from evenstep.core.values import State

# Records made for each push are msgspec structs, which are constructed in a third of the time of a dataclass.


@final
class Push(Struct, frozen=True, gc=False):
    """All gradients of one worker's iteration have arrived.

    Attributes:
        worker: rank.
        iteration: number of this worker's push, which rises by one; with the worker it identifies the push.
        samples: number of training samples that the gradients were computed on. 0 for an empty push (a skipped step),
            which counts as an iteration and changes nothing.
        units: weight within a commit: the samples, or the script's own count.
        share: samples over the global batch size.
        version: version of the weights that the gradients were computed on.
    """

    worker: int
    iteration: int
    samples: int
    units: float
    share: float
    version: int


@final
class Commit(Struct, frozen=True, gc=False):
    """Fold these pushes into the parameters as one update, their mean weighted by units.

    Attributes:
        pushes: one or more, none of them empty.
        share: part of a global batch that the update stands for; 1 for a whole barrier.
    """

    pushes: tuple[Push, ...]
    share: float


@final
class Release(Struct, frozen=True, gc=False):
    """Let this worker start its next iteration on the weights after all commits that precede this command.

    Attributes:
        worker: rank.
        lead: the worker's lead now.
        bound: largest allowed lead; None for no bound.
        held_seconds: time since the worker's push; 0 after a join.
    """

    worker: int
    lead: int
    bound: int | None
    held_seconds: float


Command: TypeAlias = Commit | Release | Regroup
"""What a sync policy answers to an event."""


class SyncPolicy(Protocol):
    """Decides when pushes are committed and which workers may run.

    Times are seconds of any monotonic clock. The driver carries out commands in their order, before the next event. A
    worker is *running* from its release to its push, and *held* from its push to its release. Its `lead` is its number
    of iterations minus that of the slowest joined worker. While any worker has joined, one is running.
    """

    def on_join(self, worker: int, now: float) -> list[Command]:
        """A worker joins, level with the slowest, and the commands release it.

        Raises:
            ProtocolError: The worker has joined already.
        """

    def on_push(self, push: Push, now: float) -> list[Command]:
        """A running worker's push has arrived. The worker is held until its release, which the commands may contain.

        Raises:
            ProtocolError: The worker has not joined, or is held.
        """

    def on_leave(self, worker: int, now: float) -> list[Command]:
        """A worker leaves or rests: no other worker waits for it. Its last push is still committed.

        Raises:
            ProtocolError: The worker has not joined.
        """

    def waited_for(self) -> list[int]:
        """The running workers that held ones wait for, ascending. Takes time proportional to the number of workers."""

    def state_dict(self) -> State:
        """The state that, with the joins of its workers, makes a new policy decide like this one: numbers and lists."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Continue from the given state. Called before any worker joins; leads start from 0."""
        return None


class Sync(Protocol):
    """The part of a scheme that answers *how far ahead*: it makes the policy."""

    @property
    def in_step(self) -> bool:
        """True if an iteration is one slice of the epoch, shared by all workers or (after a `Regroup`) by a group."""

    def policy(self, workers: int) -> SyncPolicy:
        """Make a new policy for a run of this many workers, none of which has joined."""
