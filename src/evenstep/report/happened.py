"""What happened once in a run and is worth a line: who came and went, what broke, what was decided and why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """`text` happened `at` a time (seconds of the writer's clock; None where it is not known), to a worker or to all.

    `kind` is the event's name, `iteration` that of the worker where there is one.
    """

    kind: str
    text: str
    at: float | None
    worker: int | None
    iteration: int | None


def happening_of(event: Mapping[str, Any]) -> Happening | None:
    """What is worth telling of an event; None where that is nothing."""
    tell = _TOLD.get(event["event"])
    if tell is None:
        return None
    return Happening(
        kind=event["event"],
        text=tell(event),
        at=event.get("at"),
        worker=event.get("worker"),
        iteration=event.get("iteration"),
    )


def _regrouped(event: Mapping[str, Any]) -> str:
    groups = "; ".join(" ".join(map(str, group)) for group in event["groups"])
    return f"groups are now {groups} ({event['reason']})"


_TOLD: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "join": lambda event: f"worker {event['worker']} came",
    "leave": lambda event: f"worker {event['worker']} {event['why']}",
    "regroup": _regrouped,
    "snapshot": lambda event: f"snapshot at version {event['version']}",
    "snapshot_failed": lambda event: f"no snapshot could be written ({event['text']})",
    "restored": lambda event: f"went on from the snapshot of version {event['version']}",
    "lost": lambda event: f"{event['commits']} commits were lost",
    "servers_restarted": lambda event: str(event["text"]),
    "servers_lost": lambda event: str(event["text"]),
    "server_failed": lambda event: str(event["text"]),
    "out_of_memory": lambda event: f"worker {event['worker']} ran out of memory with {event['samples']} samples",
    "diverging": lambda event: (
        f"worker {event['worker']} took training to be diverging since its iteration {event['since']}"
    ),
    "error": lambda event: f"worker {event['worker']} failed: {event['text']}",
}
