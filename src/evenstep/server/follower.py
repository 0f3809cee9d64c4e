"""What a server other than shard 0 does: it carries out the commands of shard 0, in their order."""

import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, final

from evenstep.protocol import shard_messages as commands
from evenstep.protocol.encoding import decode
from evenstep.server.serving import BrokenServerError
from evenstep.server.shard_state import ShardState
from evenstep.telemetry import Recorder
from evenstep.telemetry.events import SnapshotFailed
from evenstep.telemetry.say import say
from evenstep.transport.base import Message

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class Follower:
    """The connection to shard 0, on another shard.

    Args:
        shard_state: This shard.
        lock: Held for every call of it.
        workers: Number of workers of the run.
        recorder: Receives events.
    """

    def __init__(
        self, shard_state: ShardState, lock: AbstractContextManager[bool], workers: int, recorder: Recorder
    ) -> None:
        self._shard_state = shard_state
        self._lock = lock
        self._recorder = recorder
        self._failing = False
        """Whether the last snapshot could not be written."""
        self._commands: Final[dict[type, Callable[[Any], object]]] = {
            commands.ShardAnswer: self._answer,
            commands.ShardCommit: shard_state.commit,
            commands.ShardDiscard: lambda command: shard_state.discard(command.key),
            commands.ShardLeave: lambda command: shard_state.leave(
                command.worker, command.incarnation, command.announced
            ),
            commands.ShardInitialise: lambda command: shard_state.initialise(command.worker, command.version),
            commands.ShardRestore: lambda command: shard_state.restore(command.version, workers),
            commands.ShardSnapshot: self._snapshot,
        }
        shard_state.led = True

    def take(self, message: Message) -> None:
        """Carry out a command.

        Raises:
            BrokenServerError: It failed, and shard 0 cannot take it back.
        """
        try:
            command = decode(commands.COMMAND, message.header)
            with self._lock:
                self._commands[type(command)](command)
        except Exception as error:
            raise BrokenServerError("this server could not carry out a command of shard 0") from error

    def lost(self) -> None:
        """The connection has ended."""
        with self._lock:
            self._shard_state.led = False

    def _answer(self, command: commands.ShardAnswer) -> None:
        slot = self._shard_state.slots.get(command.worker)
        if slot is None or slot.incarnation != command.incarnation:
            return  # The worker has joined again, and this shard learned of it first.
        if command.sequence > slot.sequence:
            slot.take_in(command.sequence)  # A request without gradients is sent to shard 0 only.
        slot.version = command.has
        # The worker may have staged its next request here before this answer.
        self._shard_state.answer(command.worker, command.sequence, ahead=command.ahead)

    def _snapshot(self, command: commands.ShardSnapshot) -> None:
        index, version = self._shard_state.index, self._shard_state.version

        def told(failure: str | None) -> None:
            if failure is not None and not self._failing:
                say(f"server {index} can write no snapshot: {failure}")
                now = time.monotonic()
                self._recorder.record(SnapshotFailed(server=index, at=now, version=version, text=failure))
            self._failing = failure is not None

        self._shard_state.snapshot(told, meanwhile=command.meanwhile)
