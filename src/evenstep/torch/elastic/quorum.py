"""The quorum of torchft, as this package uses it: who is a member of the next step, sums over them, and the commit."""

import time
import zlib
from typing import Any, Final, final

import torch
from torch.distributed import ReduceOp
from torchft import Manager

from evenstep.core.errors import ConfigError, EvenstepError

_TRIES: Final = 3
"""How often a replica asks for the quorum, each time for twice as long as the members wait for one that hangs."""
_PAUSE_SECONDS: Final = 0.2


class BrokenQuorumError(EvenstepError, RuntimeError):
    """A member was lost in a step, which therefore does not count; another step follows, with those that are left."""


@final
class _Numbering:
    """A client of torchft's manager for which a quorum of other members has another number.

    A Lighthouse that is started again counts from 1. Members connect anew only if the number is new to them, and leave
    their addresses under it in a store that may hold those of an earlier quorum.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, **request: Any) -> Any:
        found = self._client._quorum(**request)
        found.quorum_id = zlib.crc32(" ".join((str(found.quorum_id), *sorted(found.replica_ids))).encode())
        return found


@final
class Quorum:
    """This replica in the quorum of torchft's `Manager`.

    Raises:
        ConfigError: The manager finds the members during the forward pass, when the batch has been fetched already.
    """

    def __init__(self, manager: Manager) -> None:
        if manager._use_async_quorum:
            raise ConfigError(
                "sizes follow from the members, who must be known before a batch is fetched: give torchft's Manager"
                " use_async_quorum=False"
            )
        manager._client = _Numbering(manager._client)
        self._manager = manager
        self._open = False
        # torchft counts the quorums: one whose members, or their connections, are new has a new number.
        self._known = -1

    def open(self) -> None:
        """Meet the other members, unless this has happened for this step; a replica that is behind gets the state."""
        if self._open:
            return
        seconds = 2 * self._manager._quorum_timeout
        ends = time.monotonic() + _TRIES * seconds.total_seconds()
        while True:
            try:
                self._manager.start_quorum(timeout=seconds)
                break
            except (RuntimeError, TimeoutError):  # A request is lost with a Lighthouse that is started again.
                self._manager._quorum_future = None
                if time.monotonic() > ends:
                    raise
                time.sleep(_PAUSE_SECONDS)
        self._open = True

    @property
    def step(self) -> int:
        """The number of steps that counted."""
        return int(self._manager.current_step())

    @property
    def place(self) -> tuple[int, int]:
        """The rank of this replica among the members, and their number."""
        return self._manager.participating_rank() or 0, self._manager.num_participants()

    @property
    def changed(self) -> bool:
        """True if the members may be others than in the last step that counted."""
        return bool(self._manager._quorum_id != self._known)

    @property
    def broken(self) -> bool:
        """True if this step cannot count."""
        return self._manager.errored() is not None

    def sum(self, tensor: torch.Tensor) -> Any:
        """Begin to add up this tensor over the members, in place; `wait` on what is returned, and look at `broken`."""
        return self._manager.allreduce(tensor, reduce_op=ReduceOp.SUM)

    def gather(self, content: bytes) -> list[bytes]:
        """The contents of all members, by rank; all must call it together.

        Raises:
            BrokenQuorumError: A member was lost.
        """
        lengths = self._rows(torch.tensor([len(content)]))[:, 0].tolist()
        row = torch.frombuffer(bytearray(content.ljust(max(lengths))), dtype=torch.uint8)
        table: Any = self._rows(row).numpy()
        return [each[:length].tobytes() for each, length in zip(table, lengths, strict=True)]

    def _rows(self, row: torch.Tensor) -> torch.Tensor:
        rank, count = self.place
        table = torch.zeros((count, *row.shape), dtype=row.dtype)
        table[rank] = row
        self.sum(table).wait()
        if self.broken:
            raise BrokenQuorumError("a replica was lost while the members met")
        return table

    def commit(self) -> bool:
        """End the step; returns whether it counts. If not, no state may have changed."""
        self._open = False
        number = self._manager._quorum_id
        counts = bool(self._manager.should_commit())
        self._known = number if counts else -1
        if not counts:  # Another member may wait for this one in a sum that has failed here: it fails there too then.
            self._manager._pg.abort()
        return counts
