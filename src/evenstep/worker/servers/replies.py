"""Waits for the answers of servers, and asks again for those that are missing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar, final

from evenstep.core.errors import WorkerLostError
from evenstep.protocol import messages
from evenstep.transport.base import ConnectionLostError, Message, SilentError
from evenstep.worker.servers.remote_shard import RemoteShard, raise_refusal

ASK_AGAIN: Final = 0.25
"""The part of the heartbeat after which a worker asks again for a missing answer."""

_Said = TypeVar("_Said", bound=messages.Answered)


@final
@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that is not yet answered. Either the `gradients` in the buffers belong to it, or it has a `payload`."""

    request: messages.NumberedRequest
    gradients: bool
    payload: tuple[memoryview, ...] = ()


@dataclass(slots=True)
class _Wait:
    """The times when an answer was last asked for, and when the server last sent anything and made progress.

    A server makes progress as long as its count of events changes.
    """

    asked: float
    limit: float
    heard: float = field(init=False)
    moved: float = field(init=False)
    events: int | None = None

    def __post_init__(self) -> None:
        self.heard = self.moved = self.asked

    def hear(self, said: messages.Answered, now: float) -> None:
        self.heard = now
        if isinstance(said, messages.Pending) and said.events != self.events:
            self.events, self.moved = said.events, now
        if isinstance(
            said, messages.NumberedReply | messages.Refusal | messages.Staged | messages.Resend | messages.Placed
        ):
            self.asked = now


@final
class Replies:
    """Receives the answers of all servers, one at a time.

    Args:
        timeout_seconds: How long a server may make no progress.
        clock: A clock in seconds that does not go back.
        resend: Sends the pending request again.

    Attributes:
        asked: The pending request, which is repeated while its answer is missing.
        heartbeat_seconds: How long a server may be silent while a request is pending.
        lost: The error of servers that were given up; None while they answer.
    """

    def __init__(self, timeout_seconds: float, clock: Callable[[], float], resend: Callable[[], None]) -> None:
        self.asked: PendingRequest | None = None
        self.heartbeat_seconds = timeout_seconds
        self.lost: WorkerLostError | None = None
        self._timeout = timeout_seconds
        self._clock = clock
        self._resend = resend

    def period(self) -> float:
        """Seconds between two pulses, and until a missing answer is asked for again."""
        return self.heartbeat_seconds * ASK_AGAIN

    def next(
        self, shard: RemoteShard, kind: type[_Said], sequence: int | None = None, *, placed: bool = True
    ) -> tuple[_Said, Message]:
        """Return the next message of this kind, with this sequence if there is one.

        A worker without a place (`placed` False) does not ask for the answer again, since the server would refuse.

        Raises:
            ConnectionLostError: The server was silent for longer than its heartbeat.
            WorkerLostError: The server runs, but does not answer within the timeout.
            ConfigError, DisagreementError, ProtocolError: The server refused.
        """
        asked = self.asked
        wait = _Wait(self._clock(), self.heartbeat_seconds if asked is not None else self._timeout)
        while True:
            try:
                said, message = shard.receive(wait.asked + self.period() - self._clock())
            except SilentError as error:
                if self._clock() - wait.heard > wait.limit:
                    raise ConnectionLostError(f"server {shard.index} is silent") from error
                if asked is not None and placed:
                    shard.send(messages.Again(sequence=asked.request.sequence))
                wait.asked = self._clock()
                continue
            if isinstance(said, kind) and (sequence is None or getattr(said, "sequence", None) == sequence):
                return said, message
            wait.hear(said, self._clock())
            if isinstance(said, messages.Refusal) and sequence in (None, said.sequence):
                raise_refusal(said)
            if self._clock() - wait.moved > self._timeout + 2 * self.heartbeat_seconds:
                self.lost = WorkerLostError(
                    f"server {shard.index} did not answer for {self._timeout:g} s although it runs: look at the"
                    " servers' output, then start again"
                )
                raise self.lost
            if isinstance(said, messages.Resend) and asked is not None:
                self._resend()
                wait.heard = wait.asked = self._clock()  # Meanwhile, an inner wait received what this server sent.
