"""Workers of several processes each, as of a model that is split over devices: what the peers tell and report, as one.

All processes exchange records and rows; each then makes the same worker's out of its peers'.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from evenstep.core.common_data import unlike
from evenstep.core.errors import ConfigError, DisagreementError, EvenstepError
from evenstep.core.values import IntArray
from evenstep.worker.agreement import require_same
from evenstep.worker.meter import COLUMNS

_INPUT, _SCRIPT, _MICROSECONDS, _FORECAST, _LARGEST = 1, 2, *range(COLUMNS - 3, COLUMNS)
_BOUNDS: Final = {"smallest_batch": max, "largest_batch": min, "largest_first": min}
"""How a worker's bound on its batch follows from its peers' records."""
_PROCESSES: Final = re.compile(r"\bworker(s?) (\d+(?:, \d+)*(?: and \d+)?)")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peers:
    """The processes of each worker, a replica of the model.

    Attributes:
        ranks: Their ranks among all processes, int64 of shape [groups, workers of a group, peers of a worker]. The
            first peer of a worker leads. Workers of a group wait for each other in each layer, as the shards of HSDP
            do, so that all count as its slowest.
        dims: The dimensions of the mesh along which the workers lie.
        others: Its other dimensions, along which the peers of a worker lie.
    """

    ranks: IntArray
    dims: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The number of workers."""
        groups, workers, _ = self.ranks.shape
        return int(groups * workers)

    def place_of(self, rank: int) -> tuple[int, int]:
        """The worker of this process, and its number among the worker's peers."""
        worker, peer = np.argwhere(self.ranks.reshape(self.count, -1) == rank)[0].tolist()
        return worker, peer

    def slowest(self, rows: IntArray) -> IntArray:
        """The rows of the workers, [workers, columns], for those of the processes, all of the same plan."""
        of_group = rows[self.ranks.reshape(len(self.ranks), -1)]
        slowest = of_group[:, :, _MICROSECONDS].argmax(axis=1)
        row: IntArray = of_group[np.arange(len(of_group)), slowest]
        for column in (_INPUT, _SCRIPT, _FORECAST):
            row[:, column] = of_group[:, :, column].max(axis=1)
        row[:, _LARGEST] = of_group[:, :, _LARGEST].min(axis=1)
        rows_of_all: IntArray = row.repeat(self.ranks.shape[1], axis=0)
        return rows_of_all

    def merged(self, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The records of the workers for those of the processes: their leaders', with the bounds of all peers.

        Raises:
            ConfigError: Something cannot work on a process, which is named.
            DisagreementError: The processes were given different things.
        """
        with self.naming():
            for rank, record in enumerate(records):
                if "error" in record:
                    raise ConfigError(f"worker {rank}: {record['error']}")
            require_same(records)
        merged = []
        for group in self.ranks:
            of_group = [records[rank] for rank in group.flat]
            bounds = {key: of(each[key] for each in of_group) for key, of in _BOUNDS.items() if key in of_group[0]}
            merged += [{**records[leader], **bounds} for leader in group[:, 0]]
        return merged

    def require_same_batches(self, checksums: IntArray) -> None:
        """Check that the peers of each worker got the same batch, by the checksums of all processes' batches.

        Raises:
            DisagreementError: They did not. The message names two, alike on every process.
        """
        for ranks in self.ranks.reshape(self.count, -1):
            if (odd := unlike(checksums[ranks].tolist())) is not None:
                said = f"worker {ranks[odd[0]]} got another batch than worker {ranks[odd[1]]}"
                raise DisagreementError(
                    f"{self.named(said)}: give the peers of a replica the same dataset, and seed alike what it draws"
                    ' (torch.manual_seed); or partition="common" if the batches are the same'
                )

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Inside, errors about processes name them as such."""
        try:
            yield
        except EvenstepError as error:
            raise type(error)(self.named(str(error))) from error.__cause__

    def named(self, text: str) -> str:
        """The text with `rank 3 (replica 1)` for `worker 3`, where its numbers are those of processes."""

        def place(number: re.Match[str]) -> str:
            return f"{number[0]} (replica {self.place_of(int(number[0]))[0]})"

        return _PROCESSES.sub(lambda found: f"rank{found[1]} {re.sub('[0-9]+', place, found[2])}", text)
