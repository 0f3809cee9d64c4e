"""The quorum of torchft, as this package uses it: who is a member of the next step, sums over them, and the commit."""

import json
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Final, final
from weakref import finalize

import torch
from torch.distributed import ReduceOp
from torchft import Manager

from evenstep.core.errors import ConfigError, EvenstepError, WorkerLostError
from evenstep.launch.c10d import Store
from evenstep.torch.processes.workers import Workers, of_all

_TRIES: Final = 3
"""How often a replica asks for the quorum, each time for twice as long as the members wait for one that hangs."""
_PAUSE_SECONDS: Final = 0.2
_ENDING_SECONDS: Final = 2.0
"""How long a process that ends waits for a quorum that it has asked for, which the others ask for too."""
_OF_LEADER: Final = (
    "store_address",
    "recover_src_manager_address",
    "recover_src_replica_rank",
    "recover_dst_replica_ranks",
    "heal",
)
"""What all processes of a replica take from its first one's quorum."""


class BrokenQuorumError(EvenstepError, RuntimeError):
    """A member was lost in a step, which therefore does not count; another step follows, with those that are left."""


@final
class _Client:
    """A client of torchft's manager for which a quorum of other members has another number.

    A Lighthouse that is started again counts from 1. Members connect anew only if the number is new to them, and leave
    their addresses under it in a store that may hold those of an earlier quorum.

    The processes of a replica vote together, and all take the state of the same other replica: torchft gives each its
    own, of which the parts of a model may not fit together before the first step.

    Args:
        store: Of this replica.
        vote: Returns whether all processes of this replica vote for a step.

    Attributes:
        ahead: The next quorum, for which it has asked before torchft does.
        heals: Whether this replica gets the state of another in the last quorum.
    """

    def __init__(self, client: Any, store: Store, vote: Callable[[bool], bool]) -> None:
        self._client, self._store, self._vote = client, store, vote
        self._quorum_id, self.heals = -1, False
        self._request: dict[str, Any] = {}
        self.ahead: Future[Any] | None = None
        self._asked: SimpleQueue[tuple[dict[str, Any], Future[Any]]] = SimpleQueue()
        self._idle = Event()
        self._idle.set()
        Thread(target=self._answer, daemon=True).start()
        # A thread that comes out of torchft's code while Python ends would abort the process.
        finalize(self, self._idle.wait, _ENDING_SECONDS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def ask(self, step: int) -> None:
        """Ask for the quorum of this step, which follows one that counted, in the background."""
        self.ahead = Future()
        self._idle.clear()
        self._asked.put((self._request | {"step": step, "commit_failures": 0}, self.ahead))

    def _answer(self) -> None:
        while True:
            request, ahead = self._asked.get()
            try:
                ahead.set_result(self._found(request))
            except Exception as error:
                ahead.set_exception(error)
            self._idle.set()

    def _quorum(self, **request: Any) -> Any:
        self._request, ahead, self.ahead = request, self.ahead, None
        return self._found(request) if ahead is None else ahead.result()

    def _found(self, request: dict[str, Any]) -> Any:
        found = self._client._quorum(**request)
        found.quorum_id = zlib.crc32(" ".join((str(found.quorum_id), *sorted(found.replica_ids))).encode())
        if found.quorum_id != self._quorum_id:
            self._quorum_id, key = found.quorum_id, f"evenstep/{found.quorum_id}/{found.max_step}"
            if request["group_rank"] == 0:
                self._store.set(key, json.dumps([getattr(found, name) for name in _OF_LEADER]))
            for name, value in zip(_OF_LEADER, json.loads(self._store.get(key)), strict=True):
                setattr(found, name, value)
        self.heals = found.heal
        return found

    def should_commit(self, _rank: int, _step: int, should_commit: bool, **_: Any) -> bool:
        """The vote of this replica: torchft would send that of each process to a server and back."""
        return self._vote(should_commit)


@final
class Quorum:
    """This replica in the quorum of torchft's `Manager`.

    It tells the launcher whether it is `waiting` for the others, or `computing` a step with them.

    Whether a step is `broken`, and whether it counts, may be known to one process of a replica before the others; where
    they decide by it, they ask each other first.

    Args:
        inside: This process in its replica.
        ahead: Whether to ask for the members of a step while it is computed. If they wait for each other before it
            instead, a replica that joins costs none of them a step, for the time of the quorum.

    Raises:
        ConfigError: The manager finds the members during the forward pass, when the batch has been fetched already.
    """

    def __init__(
        self, manager: Manager, tell: Callable[[str], None], inside: Workers | None = None, *, ahead: bool
    ) -> None:
        if manager._use_async_quorum:
            raise ConfigError(
                "sizes follow from the members, who must be known before a batch is fetched: give torchft's Manager"
                " use_async_quorum=False"
            )
        self._inside = None if inside is None or inside.peers is None else inside.processes
        manager._client = self._client = _Client(manager._client, manager._store, self._vote)
        self._manager = manager
        self._tell = tell
        self._seconds = 2 * manager._quorum_timeout
        self._ahead, self._open, self._moved = ahead, False, False
        # torchft counts the quorums: one whose members, or their connections, are new has a new number.
        self._known = -1

    def open(self) -> None:
        """Meet the other members, unless this has happened for this step; a replica that is behind gets the state.

        If it asks ahead, the members are taken to be the same until `arrive` after a step that counted, and only asked
        for in the background. If they are others by then, the step is `broken`, and they meet before the next one.
        """
        if self._open:
            return
        self._open = True
        if self._ahead and self._known != -1 and not self._moved:
            self._client.ask(self.step)
            self._tell("computing")
            return
        self._moved = False
        self._wait(self._meet)
        if not (good := self._of_peers(torch.tensor(self._manager.errored() is None))).all():
            if good.any() and self._client.heals:
                raise WorkerLostError(
                    "not all processes of this replica got the state of the members: start the replica again"
                )
            self._manager.report_error(BrokenQuorumError("a process of this replica did not reach the members"))

    def _of_peers(self, tensor: torch.Tensor) -> torch.Tensor:
        """This tensor of each process of the replica, stacked; all must call it together."""
        if self._inside is None:
            return tensor.unsqueeze(0)
        try:
            return of_all(self._inside, tensor)
        except RuntimeError as error:
            raise WorkerLostError("another process of this replica ended, died, stopped or did not answer") from error

    def _vote(self, good: bool) -> bool:
        """True if it is so for all processes of the replica."""
        return good if self._inside is None else bool(self._of_peers(torch.tensor(good)).all())

    def whole(self) -> bool:
        """Return whether the step is not `broken` for any process of the replica; all must ask together."""
        return self._vote(not self.broken)

    def _wait(self, until: Callable[[], object]) -> None:
        if self._manager._quorum_id >= 0:  # One that joins may wait while the others evaluate.
            self._tell("waiting")
        until()
        self._tell("computing")

    def _meet(self) -> None:
        ends = time.monotonic() + _TRIES * self._seconds.total_seconds()
        while True:
            try:
                return self._manager.start_quorum(timeout=self._seconds)
            except (RuntimeError, TimeoutError):  # A request is lost with a Lighthouse that is started again.
                self._manager._quorum_future = None
                if time.monotonic() > ends:
                    raise
                time.sleep(_PAUSE_SECONDS)

    @property
    def pending(self) -> bool:
        """True until `arrive`, if the members are taken to be the same."""
        return self._client.ahead is not None and not self._moved

    def arrive(self) -> None:
        """Wait until it is known who the members are."""
        if self._moved or (ahead := self._client.ahead) is None:
            return
        if not ahead.done():
            self._wait(ahead.exception)
        self._moved = ahead.exception() is not None or ahead.result().quorum_id != self._known
        if not self._moved:
            self._client.ahead = None

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
        """True if the members may be others than those that have settled."""
        return bool(self._manager._quorum_id != self._known)

    def settled(self) -> None:
        """Note that the members have settled what they compute."""
        self._known = self._manager._quorum_id

    @property
    def broken(self) -> bool:
        """True if this step cannot count."""
        return self._moved or self._manager.errored() is not None

    def sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to add up this tensor over the members, in place; call what is returned, and look at `broken`.

        Like `Manager.allreduce`, without the half millisecond of futures that it takes.
        """
        self.arrive()
        if self.broken:
            return lambda: None
        try:
            work = self._manager._pg.allreduce([tensor], ReduceOp.SUM)
        except Exception as error:  # As torchft does: whatever has failed, the step does not count.
            self._manager.report_error(error)
            return lambda: None

        def wait() -> None:
            try:
                work.wait()
            except Exception as error:
                self._manager.report_error(error)

        return wait

    def table(self, row: torch.Tensor) -> torch.Tensor:
        """A table with the rows of this replica's processes, shape [processes, ...]; `sum` fills in the others."""
        self.arrive()
        (rank, count), own = self.place, self._of_peers(row)
        table = torch.zeros((count, *own.shape), dtype=row.dtype)
        table[rank] = own
        return table.flatten(0, 1)

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all members' processes, stacked by rank; all must call it together.

        Raises:
            BrokenQuorumError: A member was lost.
        """
        table = self.table(row)
        self.sum(table)()
        if not self.whole():
            raise BrokenQuorumError("a replica was lost while the members met")
        return table

    def give_up(self) -> None:
        """End the step, which does not count."""
        self._manager.report_error(BrokenQuorumError("the members did not agree"))
        self.commit()

    def commit(self) -> bool:
        """End the step; returns whether it counts. If not, no state may have changed."""
        self._open = False
        if self._moved:
            return self._vote(False)
        counts = bool(self._manager.should_commit())
        if not counts:  # Another member may wait for this one in a sum that has failed here: it fails there too then.
            self._known = -1
            self._manager._pg.abort()
        return counts
