"""What the training script noted down with `loader.note`: losses, accuracies, whatever it wants to see again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A value at a time (seconds of the worker's clock), after so many iterations of the worker that noted it.

    `weight` is the samples of the iteration that it was noted in, 0 where that was a copy of another worker's sample. A
    `value` that was no number, or infinite, is NaN.
    """

    at: float
    worker: int
    iteration: int
    weight: int
    value: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The notes by their names, worker after worker."""

    notes: Mapping[str, tuple[Note, ...]] = field(default_factory=dict)

    @classmethod
    def from_events(cls, events: Mapping[int, Sequence[Mapping[str, Any]]]) -> Self:
        """From every worker's events `note`."""
        notes: dict[str, list[Note]] = {}
        for worker, each in events.items():
            for event in each:
                for name, value in event["values"].items():
                    note = Note(
                        at=event["at"],
                        worker=worker,
                        iteration=event["iteration"],
                        weight=event["samples"],
                        value=float("nan") if value is None else value,
                    )
                    notes.setdefault(name, []).append(note)
        return cls(notes={name: tuple(each) for name, each in notes.items()})
