"""The reasons why workers of a run on parameter servers are absent at its end."""

from collections.abc import Mapping
from typing import Final, final

from evenstep.core.supervision import Why
from evenstep.telemetry.events import Begun, Event, Joined, Left

EARLY: Final = "left early"
"""The reason of a worker that left its loop by itself, or left the run between two epochs."""


@final
class Absences:
    """Tracks workers that join and leave, by the events of a server in their order."""

    def __init__(self) -> None:
        self._absent: dict[int, str] = {}
        self._passes: dict[int, int] = {}

    def take(self, event: Event) -> None:
        """Add an event; a worker that never came was not here to leave."""
        match event:
            case Joined():
                self._absent.pop(event.worker, None)
            case Begun():
                self._passes[event.worker] = event.number
            case Left() if event.why != Why.NEVER_CAME:
                early = event.why == Why.DONE and event.early
                self._absent[event.worker] = EARLY if early else event.why

    @property
    def reasons(self) -> Mapping[int, str]:
        """The reason why each absent worker left before the end; `EARLY` if by itself, or before the last pass."""
        # Restarted servers know no earlier pass, so a worker whose pass is unknown has missed none.
        latest = max(self._passes.values(), default=0)
        missed = {worker for worker in self._absent if self._passes.get(worker, latest) < latest}
        return {
            worker: EARLY if why == Why.DONE else why
            for worker, why in self._absent.items()
            if why != Why.DONE or worker in missed
        }
