"""Where the workers of a run tell each other what they were given, before anything is built."""

from typing import Final, final

from evenstep.server.send_queue import SendQueue
from evenstep.transport.base import Connection

MAX_ROUNDS: Final = 8
"""How often the workers of a run may meet."""


@final
class Rendezvous:
    """Keeps every worker's record until all have come, then gives all of them to each; late comers get them at once.

    Workers may meet several times, in rounds.

    Args:
        workers: How many are to come.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._rounds = [_Round(workers) for _ in range(MAX_ROUNDS)]

    def come(self, rank: int, record: bytes, connection: Connection, asked: int | None, number: int = 0) -> None:
        """Take a worker's record for this round.

        The records of all workers answer its request with the sequence `asked`. With None the worker knows them
        already, and gets no answer.
        """
        self._rounds[number].come(rank, record, connection, asked)

    @property
    def absent(self) -> list[int]:
        """The ranks of those who have not come yet to the round that the others are in."""
        begun = [each for each in self._rounds if each.begun]
        return begun[-1].absent if begun else list(range(self._workers))

    def leave(self, connection: Connection) -> None:
        """A worker is gone; as long as not all have come, it must come again."""
        for each in self._rounds:
            each.leave(connection)


@final
class _Round:
    """The workers come once."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._records: dict[int, bytes] = {}
        self._came: dict[int, tuple[Connection, int | None]] = {}
        """By rank, until all have; with the sequence of the request that waits."""
        self._complete = False

    def come(self, rank: int, record: bytes, connection: Connection, asked: int | None) -> None:
        self._records[rank] = record
        self._came[rank] = connection, asked
        self._complete = self._complete or len(self._records) == self._workers
        if not self._complete:
            return
        records = [self._records[each] for each in range(self._workers)]
        header = {"lengths": [len(each) for each in records]}
        for waiting, number in self._came.values():
            if number is not None:
                # Records may be long, and a worker slow to take them in.
                SendQueue(waiting).send_last({**header, "answer": number}, *(memoryview(record) for record in records))
        self._came.clear()

    @property
    def begun(self) -> bool:
        return bool(self._records)

    @property
    def absent(self) -> list[int]:
        return [] if self._complete else [rank for rank in range(self._workers) if rank not in self._records]

    def leave(self, connection: Connection) -> None:
        for rank, (came, _) in list(self._came.items()):
            if came is connection:
                del self._came[rank], self._records[rank]
