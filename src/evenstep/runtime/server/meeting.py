"""Where the workers of a run tell each other what they were given, before anything is built."""

from typing import final

from evenstep.transport.base import Connection, ConnectionLostError


@final
class Meeting:
    """Keeps every worker's record until all have come, then gives all of them to each; late comers get them at once.

    Args:
        workers: How many are to come.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._records: dict[int, bytes] = {}
        self._waiting: dict[int, tuple[Connection, int]] = {}
        self._complete = False

    def come(self, rank: int, record: bytes, sequence: int, connection: Connection) -> None:
        """A worker is here with its record, and waits for an answer with this number."""
        self._records[rank] = record
        self._waiting[rank] = (connection, sequence)
        self._complete = self._complete or len(self._records) == self._workers
        if not self._complete:
            return
        records = [self._records[each] for each in range(self._workers)]
        header = {"lengths": [len(each) for each in records]}
        for waiting, number in self._waiting.values():
            try:
                waiting.send({**header, "answer": number}, *(memoryview(each) for each in records))
            except ConnectionLostError:
                continue  # It is gone; whoever receives from it finds out.
        self._waiting.clear()

    @property
    def absent(self) -> list[int]:
        """The ranks of those who have not come yet."""
        return [] if self._complete else [rank for rank in range(self._workers) if rank not in self._records]

    def leave(self, connection: Connection) -> None:
        """A worker is gone; as long as not all have come, it must come again."""
        for rank, (waiting, _) in list(self._waiting.items()):
            if waiting is connection:
                del self._waiting[rank], self._records[rank]
