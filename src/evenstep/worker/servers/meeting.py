"""The exchange of records with the other workers, through shard 0, before the run begins."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

from evenstep.core.errors import WorkerLostError
from evenstep.protocol import messages
from evenstep.transport.base import ConnectionLostError, SilentError
from evenstep.worker.servers.remote_shard import RemoteShard, raise_refusal

RETRY_SECONDS: Final = 0.2


@final
class Meeting:
    """One worker's side of the rendezvous; arguments as for `ServerLink`."""

    def __init__(
        self,
        rank: int,
        shard: RemoteShard,
        timeout_seconds: float,
        clock: Callable[[], float],
        wait: Callable[[float], None],
    ) -> None:
        self._rank = rank
        self._shard = shard
        self._timeout = timeout_seconds
        self._clock = clock
        self._wait = wait
        self._records: list[bytes] = []
        """This worker's records, one for each round."""

    def meet(self, record: bytes) -> list[bytes]:
        """Wait for all workers; return their records by rank.

        Raises:
            WorkerLostError: A worker did not arrive in time, or the server is lost.
        """
        self._records.append(record)
        deadline = self._clock() + self._timeout
        while True:
            try:
                return self._meet(deadline)
            except SilentError as error:
                missing = ", ".join(map(str, self._absent())) or "unknown"
                raise WorkerLostError(
                    f"not all workers joined within {self._timeout:g} s (missing: {missing}): look at their output"
                ) from error
            except ConnectionLostError as error:
                self._shard.close()
                if self._clock() > deadline:
                    raise servers_gone(self._timeout, error) from error
                self._wait(RETRY_SECONDS)

    def repeat(self) -> None:
        """Send this worker's records to restarted servers. It has the other workers' records already."""
        for number in range(len(self._records)):
            self._send(number, known=True)

    def _send(self, number: int, *, known: bool) -> None:
        process = f"{socket.gethostname()}:{os.getpid()}"
        meet = messages.Meet(rank=self._rank, round=number, known=known, process=process)
        self._shard.send(meet, memoryview(self._records[number]))

    def _meet(self, deadline: float) -> list[bytes]:
        self._shard.reach()
        self._send(len(self._records) - 1, known=False)
        while True:
            said, _ = self._shard.receive(deadline - self._clock())
            if isinstance(said, messages.Refusal):
                raise_refusal(said)
            if isinstance(said, messages.Met):
                break
        records = [bytearray(length) for length in said.lengths]
        self._shard.receive_payload(*(memoryview(each) for each in records))
        return [bytes(each) for each in records]

    def _absent(self) -> tuple[int, ...]:
        """Return the ranks of some missing workers; empty if the server does not answer."""
        with suppress(SilentError, ConnectionLostError):
            self._shard.send(messages.Absent())
            while True:
                said, _ = self._shard.receive(2.0)
                if isinstance(said, messages.Missing):
                    return said.ranks
        return ()


def servers_gone(timeout_seconds: float, last: Exception) -> WorkerLostError:
    """Make the error for servers that did not answer."""
    return WorkerLostError(
        f"the servers did not answer for {timeout_seconds:g} s ({last}): look at the servers' output, then start again"
    )
