"""Has every shard carry out the commands of shard 0, in the same order."""

from collections.abc import Sequence
from typing import final

from evenstep.protocol.encoding import encode
from evenstep.protocol.messages import Grant, SendWeights
from evenstep.protocol.shard_messages import Command, ShardAnswer
from evenstep.server.server_slot import ServerSlot
from evenstep.server.shard_state import ShardState
from evenstep.transport.base import Connection


@final
class AllShards:
    """Shard 0 itself (`own`), and the connections to the other shards, which receive the same commands."""

    def __init__(self, own: ShardState, followers: Sequence[Connection]) -> None:
        self.own = own
        self._followers = followers

    def do(self, command: Command) -> None:
        """Carry out a command on every shard."""
        self.tell(command)
        self.own.carry_out(command)

    def tell(self, command: Command) -> None:
        """Send a command to the other shards, for one that this shard carries out in another way."""
        if self._followers:
            header = encode(command)
            for follower in self._followers:
                follower.send(header)

    def reply(
        self,
        worker: int,
        body: SendWeights | Grant | None = None,
        ahead: tuple[float, ...] = (),
        *,
        whole: bool = True,
    ) -> None:
        """Answer a worker's pending request; only shard 0 sends the body. A worker that leaves its loop gets none."""
        slot = self.own.slots.get(worker)
        if slot is not None:
            self.own.answer(self._tell_answer(slot, ahead, whole=whole), body)

    def refuse(self, worker: int, error: Exception) -> None:
        """Answer a worker's pending request with an error."""
        slot = self.own.slots.get(worker)
        if slot is not None:
            self._tell_answer(slot)
            slot.refuse(slot.sequence, error)

    def _tell_answer(self, slot: ServerSlot, ahead: tuple[float, ...] = (), *, whole: bool = True) -> ShardAnswer:
        command = ShardAnswer(
            worker=slot.worker,
            incarnation=slot.incarnation,
            sequence=slot.sequence,
            has=slot.version,
            ahead=ahead,
            whole=whole,
        )
        self.tell(command)
        return command
