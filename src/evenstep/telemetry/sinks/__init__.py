"""Formats of other tools, fed from the event log. They cost training nothing, and work live and afterwards.

A sink is a `Recorder` for the events of all workers and servers of a run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from evenstep.telemetry.events import Event, IterationDone, Noted, Run


@final
@dataclass(frozen=True, slots=True)
class Point:
    """Values of one worker in one iteration; `wall` is in seconds since 1970."""

    worker: int
    iteration: int
    wall: float
    values: Mapping[str, float]


@final
class Points:
    """The points of curves in the events of a run, with scripts' notes under `noted/`."""

    def __init__(self) -> None:
        self._zeros: dict[int, float] = {}

    def of(self, event: Event) -> Point | None:
        """The point of an event; None for an event without one."""
        match event:
            case Run():
                self._zeros[event.worker] = event.wall_offset
                return None
            case IterationDone():
                at, values = event.at + event.iteration_seconds, dict(_scalars(event))
            case Noted():
                at = event.at
                values = {f"noted/{name}": value for name, value in event.values.items() if value is not None}
            case _:
                return None
        return Point(event.worker, event.iteration, at + self._zeros.get(event.worker, 0.0), values)


def _scalars(event: IterationDone) -> Iterator[tuple[str, float]]:
    """Names and values: batch size, speed, the parts in seconds, and on servers staleness and lead."""
    yield "batch_size", event.samples
    if event.compute_seconds > 0:
        yield "speed_samples_per_second", event.samples / event.compute_seconds
    for part in ("iteration", "input", "compute", "wait", "comm"):
        yield f"{part}_seconds", getattr(event, f"{part}_seconds")
    for name in ("staleness", "behind", "lead"):
        if (value := getattr(event, name)) is not None:
            yield name, value
