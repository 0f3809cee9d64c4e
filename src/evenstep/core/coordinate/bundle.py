"""Combines pushes of a group server's workers into one push to its parent, with the weight of each in their mean.

Workers are known by the line that they speak over. Groups, epochs and samples are the parent's business.
"""

from typing import NamedTuple, final

from evenstep.core.errors import ProtocolError

Weights = tuple[tuple[int, float], ...]
"""The line of each push and its weight in the mean gradient; 0 for an empty push."""


@final
class CombinedPush(NamedTuple):
    """Pushes that travel as one; `number` names them until they are answered."""

    number: int
    weights: Weights


class _Gathered(NamedTuple):
    """A worker's push; `number` identifies the combined push in which it was passed on, 0 if it was not yet."""

    samples: int
    units: float
    number: int = 0


@final
class Bundle:
    """Gathers pushes until no worker of the group server computes.

    A worker computes from an answer that leaves it with a claim to its next request. While one does, the group's
    barrier, which the parent keeps, cannot open, so no worker waits for a push that is kept back here. Combining saves
    traffic and does not affect correctness: a mean of pushes, weighted by units, counts as the sum of their weights in
    any commit that contains them all, and a barrier commits all that it has.
    """

    def __init__(self) -> None:
        self._claims: dict[int, int] = {}  # The number that each line holds.
        self._pushes: dict[int, _Gathered] = {}  # Not answered.
        self._number = 0

    def join(self, line: int) -> None:
        """A worker joins, without a claim."""
        self._claims[line] = 0

    def leave(self, line: int) -> None:
        """The worker leaves. If its push was not passed on, it is lost, and other workers will repeat its claim."""
        self.ask(line)
        del self._claims[line]
        self._pushes.pop(line, None)

    def ask(self, line: int) -> None:
        """The worker begins a pass, rests or stops, so it holds no claim any more."""
        self._claims[line] = 0

    def push(self, line: int, samples: int, units: float) -> None:
        """The worker has pushed the result of its first claim; ProtocolError if it does not compute."""
        if line not in self._computing:
            raise ProtocolError("a worker pushed although it had nothing to compute on, or had pushed already")
        self._claims[line] -= 1
        self._pushes[line] = _Gathered(samples, units)

    def answer(self, line: int, claims: int, *, over: bool) -> None:
        """The parent has answered the worker's request, with this many further claims."""
        if line not in self._claims:
            return
        if line in self._pushes and self._pushes[line].number:
            del self._pushes[line]
        self._claims[line] = 0 if over else self._claims[line] + claims

    def waited_for(self) -> list[int]:
        """The lines that compute while others wait for them, ascending."""
        return sorted(self._computing) if self._of(0) else []

    @property
    def _computing(self) -> list[int]:
        return [line for line, held in self._claims.items() if held and line not in self._pushes]

    def _of(self, number: int) -> dict[int, _Gathered]:
        """The pushes of this combined one, by line; of 0, those that were not passed on."""
        return {line: push for line, push in sorted(self._pushes.items()) if push.number == number}

    def refuse(self, number: int) -> None:
        """The parent refused this combined push because one of its workers has left there: its parts are sent again."""
        for line, push in self._of(number).items():
            self._pushes[line] = push._replace(number=0)

    def due(self) -> CombinedPush | None:
        """The push to send to the parent now, returned once; None while a worker computes."""
        pushes = self._of(0)
        if self._computing or not pushes:
            return None
        self._number += 1
        self._pushes |= {line: push._replace(number=self._number) for line, push in pushes.items()}
        counted = {line: push.units for line, push in pushes.items() if push.samples}
        units = sum(counted.values())
        weights = {line: each / units if units else 1 / len(counted) for line, each in counted.items()}
        return CombinedPush(self._number, tuple((line, weights.get(line, 0.0)) for line in pushes))
