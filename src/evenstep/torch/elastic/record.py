"""The event log of a replica, in which workers have the numbers of their places instead of ranks in the quorum."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from msgspec import structs

from evenstep.telemetry import JsonlRecorder, Silent
from evenstep.telemetry.events import ELASTIC, Event, MembersChanged, Planned, Run, WorkerEvent


@final
class ReplicaRecorder:
    """Records the events of the replica in this `slot` of so many `slots` of its host.

    The rank of a replica, and of those in its plans, is another one after each change of the members.
    """

    def __init__(self, recorder: JsonlRecorder | Silent, slot: int, slots: int) -> None:
        self._recorder = recorder
        self._slot, self._slots = slot, slots
        self._here: dict[int, int] = {}  # The slots of the members on this host, by rank.
        self._begun = False

    def record(self, event: Event) -> None:
        """Append the event."""
        if isinstance(event, WorkerEvent):
            event = structs.replace(event, worker=self._slot)
        if isinstance(event, Planned):
            sizes = {slot: event.batch_sizes[rank] for rank, slot in self._here.items()}
            event = structs.replace(event, batch_sizes=[sizes.get(slot, 0) for slot in range(self._slots)])
        self._recorder.record(event)

    def members(self, told: Sequence[Mapping[str, Any]], rank: int, run: Run, iteration: int) -> None:
        """The members, by rank, have told their `slot` and `host`; `run` is the first event, unless it is written."""
        self._here = {each: one["slot"] for each, one in enumerate(told) if one["host"] == told[rank]["host"]}
        if not self._begun:
            self.record(structs.replace(run, engine=ELASTIC, workers=self._slots, minimum=(), maximum=()))
            self._begun = True
        if rank == min(self._here):
            here, elsewhere = sorted(self._here.values()), len(told) - len(self._here)
            self.record(
                MembersChanged(
                    worker=self._slot, iteration=iteration, at=run.at or 0.0, members=here, elsewhere=elsewhere
                )
            )

    def close(self) -> None:
        """No more events follow."""
        self._recorder.close()
