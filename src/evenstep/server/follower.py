"""A server other than shard 0, which carries out the commands of shard 0 in their order."""

import time
from contextlib import AbstractContextManager
from typing import final

from evenstep.protocol.encoding import decode
from evenstep.protocol.shard_messages import COMMAND, ShardSnapshot
from evenstep.server.serving import BrokenServerError
from evenstep.server.shard_state import ShardState
from evenstep.telemetry import Recorder
from evenstep.telemetry.events import SnapshotFailed
from evenstep.telemetry.say import say
from evenstep.transport.base import Message


@final
class Follower:
    """The connection to shard 0, on another shard.

    Args:
        shard_state: This shard.
        lock: Held during every call of the shard state.
        recorder: Receives events.
    """

    def __init__(self, shard_state: ShardState, lock: AbstractContextManager[bool], recorder: Recorder) -> None:
        self._shard_state = shard_state
        self._lock = lock
        self._recorder = recorder
        self._failing = False
        """True if the last snapshot could not be written."""
        shard_state.led = True

    def take(self, message: Message) -> None:
        """Carry out a command.

        Raises:
            BrokenServerError: The command failed, and shard 0 cannot take it back.
        """
        try:
            command = decode(COMMAND, message.header)
            with self._lock:
                if isinstance(command, ShardSnapshot):
                    self._snapshot(meanwhile=command.meanwhile)
                else:
                    self._shard_state.carry_out(command)
        except Exception as error:
            raise BrokenServerError("this server could not carry out a command of shard 0") from error

    def lost(self) -> None:
        """Handle the end of the connection."""
        with self._lock:
            self._shard_state.led = False

    def _snapshot(self, *, meanwhile: bool) -> None:
        index, version = self._shard_state.settings.index, self._shard_state.version

        def told(failure: str | None) -> None:
            if failure is not None and not self._failing:
                say(f"server {index} can write no snapshot: {failure}")
                now = time.monotonic()
                self._recorder.record(SnapshotFailed(server=index, at=now, version=version, text=failure))
            self._failing = failure is not None

        self._shard_state.snapshot(told, meanwhile=meanwhile)
