"""What happened once in a run and is worth a line: who came and went, what broke, what was decided and why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from evenstep.core.supervision import Why


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """`text` happened `at` a time (seconds of the writer's clock; None where it is not known), to a worker or to all.

    `kind` is the event's name, `iteration` that of the worker where there is one. `writer` is the worker whose clock it
    is; None for that of the servers and the launcher. `routine`: it comes often, or a worker's state says it too.
    """

    kind: str
    text: str
    at: float | None
    worker: int | None
    iteration: int | None
    writer: int | None
    routine: bool


_ROUTINE: Final = ("join", "snapshot", "checkpoint", "disturbance")


def happening_of(event: Mapping[str, Any], *, writer: int | None) -> Happening | None:
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
        writer=writer,
        routine=event["event"] in _ROUTINE or (event["event"] == "leave" and event["why"] == Why.DONE),
    )


def slowness_text(factor: float, extra_seconds: float) -> str:
    """How much slower a worker is made, in a few words; empty where it is not."""
    parts = []
    if factor != 1:
        parts.append(f"{factor:.3g}x slower" if factor > 1 else f"{1 / factor:.3g}x faster")
    if extra_seconds:
        parts.append(f"slower by {1000 * extra_seconds:.3g} ms an iteration")
    return " and ".join(parts)


def _disturbed(event: Mapping[str, Any]) -> str:
    how = slowness_text(event["factor"], event["extra_seconds"])
    return f"worker {event['worker']} is made {how}" if how else f"worker {event['worker']} is made slower no longer"


def _colon(kind: str, text: str) -> str:
    return f"{kind}: {text}" if text else kind


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
    "worker_failed": lambda event: f"worker {event['worker']} {event['how']}",
    "out_of_memory": lambda event: f"worker {event['worker']} ran out of memory with {event['samples']} samples",
    "checkpoint": lambda event: (
        f"went on from the checkpoint {event['name']}" if event["restored"] else f"checkpoint {event['name']} saved"
    ),
    "disturbance": _disturbed,
    "error": lambda event: f"worker {event['worker']} failed: {_colon(event['type'], event['text'])}",
}
