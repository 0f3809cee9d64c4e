"""Exchanges the records of a run's workers before the run begins."""

from dataclasses import dataclass, field
from typing import final

from evenstep.core.errors import ConfigError
from evenstep.protocol.messages import MAX_ROUNDS, Meet, Met
from evenstep.server.send_queue import SendQueue
from evenstep.transport.base import Connection


@final
@dataclass(slots=True)
class _Round:
    records: dict[int, bytes] = field(default_factory=dict)
    came: dict[int, tuple[Connection, bool]] = field(default_factory=dict)
    """By rank: the connection of a waiting worker, and whether it knows the records already."""
    complete: bool = False


@final
class Rendezvous:
    """Collects a record of each worker, and then sends all records to each. Workers can meet several times, in rounds.

    A worker that joins a complete round again gets the records at once.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._rounds = [_Round() for _ in range(MAX_ROUNDS)]
        self._processes: dict[int, tuple[str, Connection]] = {}
        """By rank: the latest process of this worker, and its connection. Removed when that connection ends."""

    def require_single(self, rank: int, process: str, trains_over: Connection | None) -> None:
        """Refuse a second process of the same rank while the first one waits here or trains over that connection.

        Raises:
            ConfigError: There is such a process.
        """
        former, over = self._processes.get(rank, (process, None))
        waits = any(each.came.get(rank, (None, False))[0] is over for each in self._rounds)
        if former != process and (waits or trains_over is over):
            raise ConfigError(
                f"two processes have the rank {rank} ({former} and {process}, host and process): give each worker"
                " its own rank"
            )

    def come(self, meet: Meet, record: bytes, connection: Connection) -> None:
        """Add a worker's record to a round. One that knows all records gets no answer, since it waits for others."""
        self._processes[meet.rank] = meet.process, connection
        now = self._rounds[meet.round]
        now.records[meet.rank] = record
        now.came[meet.rank] = connection, meet.known
        now.complete = now.complete or len(now.records) == self._workers
        if not now.complete:
            return
        records = [now.records[each] for each in range(self._workers)]
        met = Met(lengths=tuple(map(len, records)))
        for waiting, told in now.came.values():
            if not told:
                # Records may be long, and a worker may be slow.
                SendQueue(waiting).send_last(met, *(memoryview(each) for each in records))
        now.came.clear()

    @property
    def absent(self) -> list[int]:
        """The missing ranks of the latest round that has begun."""
        latest = next((each for each in reversed(self._rounds) if each.records), self._rounds[0])
        return [] if latest.complete else [rank for rank in range(self._workers) if rank not in latest.records]

    def leave(self, connection: Connection) -> None:
        """Forget a worker that has left. It must come again to every incomplete round."""
        self._processes = {rank: each for rank, each in self._processes.items() if each[1] is not connection}
        for each in self._rounds:
            for rank, (came, _) in list(each.came.items()):
                if came is connection:
                    del each.came[rank], each.records[rank]
