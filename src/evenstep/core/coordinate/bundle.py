"""Which pushes of the workers of a group server go to its parent as one, and what each counts in their mean.

It knows each worker by the line that it speaks over, and knows no groups, epochs or samples: those are its parent's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from evenstep.core.errors import ProtocolError

Weights = tuple[tuple[int, float], ...]
"""The line of each push, with its weight in their mean gradient; 0 for an empty push."""


@final
class CombinedPush(NamedTuple):
    """Pushes that travel as one; `number` names them until they are answered."""

    number: int
    weights: Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Push:
    samples: int
    units: float
    number: int = -1
    """Of the combined push."""


@final
class Bundle:
    """Gathers pushes until no worker of the group server computes.

    A worker computes from an answer that leaves it with a claim to its next request. While one does, the group's
    barrier, which the parent keeps, cannot open, so no worker waits for a push that is kept back here. Combining saves
    traffic and does not affect correctness: a mean of some pushes, weighted by units, is worth the sum of their weights
    in any commit that they are all in, and a barrier commits all that it has.
    """

    def __init__(self) -> None:
        self._claims: dict[int, int] = {}  # How many each line holds.
        self._computing: set[int] = set()
        self._pushed: dict[int, _Push] = {}  # Not passed on.
        self._passed_on: dict[int, _Push] = {}  # Passed on and not answered.
        self._number = 0

    def join(self, line: int) -> None:
        """A worker joins, without a claim."""
        self._claims[line] = 0

    def leave(self, line: int) -> None:
        """The worker leaves: a push of it that was not passed on is lost, and other workers will do its claim again."""
        self.ask(line)
        del self._claims[line]
        self._pushed.pop(line, None)
        self._passed_on.pop(line, None)

    def ask(self, line: int) -> None:
        """The worker begins a pass, rests or stops, so it holds no claim any more."""
        self._claims[line] = 0
        self._computing.discard(line)

    def push(self, line: int, samples: int, units: float) -> None:
        """The worker has pushed what it computed on its first claim; ProtocolError if it does not compute."""
        if line not in self._computing:
            raise ProtocolError("a worker pushed although it had nothing to compute on, or had pushed already")
        self._claims[line] -= 1
        self._computing.discard(line)
        self._pushed[line] = _Push(samples=samples, units=units)

    def answer(self, line: int, claims: int, *, over: bool) -> None:
        """The parent has answered the worker's request, with this many further claims."""
        if line not in self._claims:
            return
        self._passed_on.pop(line, None)
        self._claims[line] = 0 if over else self._claims[line] + claims
        if self._claims[line]:
            self._computing.add(line)

    def waited_for(self) -> list[int]:
        """The lines that compute while others wait for them, ascending."""
        return sorted(self._computing) if self._pushed else []

    def refuse(self, number: int) -> None:
        """The parent refused these as one push, because one of their workers is gone there: they are sent again."""
        for line, push in [each for each in self._passed_on.items() if each[1].number == number]:
            self._pushed[line] = push
            del self._passed_on[line]

    def due(self) -> CombinedPush | None:
        """What goes to the parent now, once; None while a worker computes."""
        if self._computing or not self._pushed:
            return None
        self._number += 1
        pushes, self._pushed = dict(sorted(self._pushed.items())), {}
        self._passed_on |= {line: replace(push, number=self._number) for line, push in pushes.items()}
        return CombinedPush(self._number, _weights(pushes))


def _weights(pushes: Mapping[int, _Push]) -> Weights:
    counted = [push for push in pushes.values() if push.samples]
    units = sum(push.units for push in counted)
    return tuple(
        (line, (push.units / units if units else 1 / len(counted)) if push.samples else 0.0)
        for line, push in pushes.items()
    )
