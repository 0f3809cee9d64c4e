"""Exchanges rows and records over the all-gather that the caller brings, and checks what comes back."""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np

from evenstep.core.disagreement import require_same_arrays
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import IntArray

AllGather: TypeAlias = Callable[[bytes], Sequence[bytes]]

_PREFIX: Final = struct.Struct("!4q")
"""Precedes the content of a row: number of workers, rank, number of the call, length of a record or a mark."""
_FAILED: Final = 1


@final
class Gather:
    """All workers make the same calls in the same order. Within a call all rows have the same length.

    Args:
        all_gather: Returns the rows of all workers by rank, this worker's included.
        rank: This worker.
        workers: The number of workers.
    """

    def __init__(self, all_gather: AllGather, *, rank: int, workers: int) -> None:
        self._all_gather = all_gather
        self._rank = rank
        self._workers = workers
        self._calls = 0

    def records(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the records of all workers, by rank, as JSON.

        Raises:
            ConfigError: The all-gather returned anything but the rows of all workers.
        """
        text = json.dumps(record).encode()
        lengths = [length for length, _ in self._call(b"", len(text))]
        padded = self._call(text.ljust(max(lengths), b"\0"), len(text))
        return [json.loads(each[:length]) for length, each in padded]

    def rows(self, row: Sequence[int], failure: str | None = None) -> IntArray:
        """Return the rows of all workers, int64 of shape [workers, columns].

        Args:
            row: This worker's row, of as many integers as the others'.
            failure: A sentence if this worker cannot take part; all workers then raise it.

        Raises:
            ConfigError: A worker failed, which is named, or as for `records`.
        """
        packed = np.array(row, dtype="<i8").tobytes()
        came = self._call(packed, 0 if failure is None else _FAILED)
        if any(mark == _FAILED for mark, _ in came):
            failures = [record["failure"] for record in self.records({"failure": failure})]
            rank, first = next((rank, each) for rank, each in enumerate(failures) if each is not None)
            raise ConfigError(failure or f"worker {rank}: {first}")
        return np.stack([np.frombuffer(each, dtype="<i8") for _, each in came]).astype(np.int64)

    def require_same(self, layout: Sequence[str]) -> None:
        """Check that all workers are to exchange the same arrays; otherwise their collectives might wait for ever.

        Args:
            layout: A description of each array of this worker.

        Raises:
            DisagreementError: The arrays differ.
        """
        digest = hashlib.blake2b("\n".join(layout).encode(), digest_size=8).digest()
        if len(set(self.rows([int.from_bytes(digest) >> 1])[:, 0].tolist())) > 1:
            require_same_arrays([record["layout"] for record in self.records({"layout": list(layout)})])

    def _call(self, content: bytes, number: int) -> list[tuple[int, bytes]]:
        """Return the numbers and contents of all workers."""
        self._calls += 1
        row = _PREFIX.pack(self._workers, self._rank, self._calls, number) + content
        came: Any = self._all_gather(row)
        if not isinstance(came, Sequence) or not all(isinstance(each, bytes | bytearray) for each in came):
            raise ConfigError(
                f"all_gather returned {shown(came)}: it must return a list of bytes, the row of each worker"
            )
        if len(came) != self._workers:
            raise ConfigError(
                f"all_gather returned {len(came)} rows to worker {self._rank}, which was told of {self._workers}"
                " workers: it must return the row of every worker, and workers= must be their number"
            )
        return [self._checked(rank, bytes(each), len(row)) for rank, each in enumerate(came)]

    def _checked(self, rank: int, row: bytes, length: int) -> tuple[int, bytes]:
        if len(row) != length:
            raise ConfigError(
                f"all_gather returned a row of {len(row)} bytes for worker {rank} where {length} are due: it must"
                " return rows as they were given, and every worker must take every share"
            )
        workers, sender, call, number = _PREFIX.unpack_from(row)
        if sender != rank:
            raise ConfigError(
                f"all_gather returned a row of worker {sender} in the place of worker {rank}: it must return the rows"
                " in the order of the ranks, and every worker must be given its own rank"
            )
        if workers != self._workers:
            raise ConfigError(
                f"worker {rank} was told of {workers} workers and worker {self._rank} of {self._workers}: give all the"
                " same number"
            )
        if call != self._calls:
            raise ConfigError(
                f"all_gather returned row {call} of worker {rank} in call {self._calls}: it must return what the"
                " workers gave it in this call, and every worker must take every share"
            )
        return number, row[_PREFIX.size :]
