"""Carries out the decisions of shard 0 on all shards, in the same order."""

from collections.abc import Callable, Sequence
from typing import final

from evenstep.core.coordinate import PushKey
from evenstep.protocol import shard_messages as commands
from evenstep.protocol.encoding import encode
from evenstep.protocol.messages import SendWeights, Work
from evenstep.server.shard_state import ShardState
from evenstep.server.worker_slot import WorkerSlot
from evenstep.transport.base import Connection


@final
class AllShards:
    """Shard 0 itself (`own`), and the connections to the other shards, which receive the same commands."""

    def __init__(self, own: ShardState, followers: Sequence[Connection]) -> None:
        self.own = own
        self._followers = followers
        self._commits = self._messages = 0

    def commit(self, commit: commands.ShardCommit) -> None:
        self._tell(commit)
        self._messages += self.own.commit(commit)
        self._commits += 1

    def discard(self, key: PushKey) -> None:
        self._tell(commands.ShardDiscard(key=key))
        self.own.discard(key)

    def leave(self, worker: int, incarnation: int, announced: tuple[PushKey, ...]) -> None:
        self._tell(commands.ShardLeave(worker=worker, incarnation=incarnation, announced=announced))
        self.own.leave(worker, incarnation, announced)

    def initialise(self, worker: int, version: int) -> None:
        self._tell(commands.ShardInitialise(worker=worker, version=version))
        self.own.initialise(worker, version)

    def restore(self, version: int, workers: int) -> dict[str, object]:
        state = self.own.restore(version, workers)  # First, since it refuses what is of another run.
        self._tell(commands.ShardRestore(version=version))
        return state

    def snapshot(self, told: Callable[[str | None], None], *, meanwhile: bool, **beside: object) -> None:
        self._tell(commands.ShardSnapshot(meanwhile=meanwhile))
        self.own.snapshot(told, meanwhile=meanwhile, **beside)

    def reply(self, worker: int, body: SendWeights | Work | None = None, ahead: tuple[float, ...] = ()) -> None:
        """Answer the request for which a worker waits; only shard 0 sends the body."""
        slot = self.own.slots.get(worker)
        if slot is not None:
            self._tell_answer(slot, ahead)
            self._messages += self.own.answer(worker, slot.sequence, body, ahead)

    def refuse(self, worker: int, error: Exception) -> None:
        """Answer the request for which a worker waits with an error."""
        slot = self.own.slots.get(worker)
        if slot is not None:
            self._tell_answer(slot, ())
            slot.refuse(slot.sequence, error)

    def take_counts(self) -> tuple[int, int]:
        """The number of commits, and of messages of gradients or weights, since the last call."""
        counts = self._commits, self._messages
        self._commits = self._messages = 0
        return counts

    def _tell_answer(self, slot: WorkerSlot, ahead: tuple[float, ...]) -> None:
        worker, incarnation, sequence = slot.worker, slot.incarnation, slot.sequence
        self._tell(
            commands.ShardAnswer(
                worker=worker, incarnation=incarnation, sequence=sequence, has=slot.version, ahead=ahead
            )
        )

    def _tell(self, command: commands.Command) -> None:
        if self._followers:
            header = encode(command)
            for follower in self._followers:
                follower.send(header)
