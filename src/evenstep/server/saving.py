"""Writes and restores snapshots of a whole run, and reports how that went."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast, final

from evenstep.core.coordinate import Coordinator
from evenstep.core.errors import ConfigError
from evenstep.protocol.shard_messages import ShardRestore, ShardSnapshot
from evenstep.server.all_shards import AllShards
from evenstep.server.journal import Journal
from evenstep.telemetry.events import Restored, SnapshotFailed, SnapshotWritten

if TYPE_CHECKING:
    from evenstep.core.values import State


@final
class Saving:
    """Writes snapshots on all shards, and restores them; arguments as for `Primary`."""

    def __init__(
        self,
        shards: AllShards,
        *,
        clock: Callable[[], float],
        journal: Journal,
        say: Callable[[str], None],
    ) -> None:
        self._shards = shards
        self._snapshots = shards.own.snapshots
        self._clock = clock
        self._record = journal.record
        self._say = say
        self._saved = (clock(), -1)
        """The time at which the last snapshot was begun, and its version."""
        self._written: deque[tuple[int, str | None]] = deque()
        """Finished snapshots that are not yet reported: the version, and the reason if it could not be written."""
        self._failing = False

    def restore(self, coordinator: Coordinator) -> None:
        """Continue from the latest snapshot, if there is one."""
        try:
            version = self._snapshots.latest(self._say)
            if version is None:
                return
            state = self._shards.own.restore(version)  # First: it refuses the state of another run.
            self._shards.tell(ShardRestore(version=version))
        except ConfigError:
            self._shards.own.spec = None  # Every worker must get this error, not only the first.
            raise
        coordinator.load_state_dict(cast("State", state["coordinator"]))
        self._saved = (self._clock(), version)
        self._record(Restored(at=self._clock(), version=version))

    def write(self, coordinator: Coordinator | None, *, meanwhile: bool = False) -> None:
        """Write a snapshot on every shard, unless this version has one.

        With `meanwhile` the run continues during the write. Otherwise this returns once it is on this server's disk.
        """
        version, written = self._shards.own.version, self._written
        if coordinator is not None and version not in (-1, self._saved[1]):
            self._saved = (self._clock(), version)
            self._snapshots.make_room(version)
            self._shards.tell(ShardSnapshot(meanwhile=meanwhile))
            self._shards.own.snapshot(
                lambda why: written.append((version, why)), meanwhile=meanwhile, coordinator=coordinator.state_dict()
            )
        if not meanwhile:
            self._snapshots.wait()
            self._report()

    def look(self, coordinator: Coordinator | None, now: float) -> None:
        """Write a snapshot if one is due, and report finished ones."""
        (saved, version), own = self._saved, self._shards.own
        due = now - saved >= own.settings.snapshot_seconds and own.version not in (-1, version)
        if due and not self._snapshots.busy:
            self.write(coordinator, meanwhile=True)
        self._report()

    def _report(self) -> None:
        while self._written:
            version, failure = self._written.popleft()
            if failure is None:
                self._record(SnapshotWritten(at=self._clock(), version=version))
            elif not self._failing:
                self._say(f"no snapshot can be written ({failure}): if a server dies now, later commits are lost")
                self._record(SnapshotFailed(at=self._clock(), version=version, text=failure))
            if failure is not None:
                self._saved = (self._saved[0], -1)  # Try again at the end.
            self._failing = failure is not None
