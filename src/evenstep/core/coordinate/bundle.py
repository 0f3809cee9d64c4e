"""Which pushes of the workers behind a group server go to its parent as one, and what each counts in their mean.

It knows workers by the line that each speaks over, and nothing of groups, epochs or samples: all that is its parent's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from evenstep.core.errors import ProtocolError

Weights = tuple[tuple[int, float], ...]
"""The line of each push, with its weight in their mean gradient; 0 for an empty push."""


@final
class CombinedPush(NamedTuple):
    """Pushes that travel as one.

    `number` names them until they are answered. `holder`: the line that has their mean already, by a collective.
    """

    number: int
    weights: Weights
    holder: int | None = None


@final
class Ring(NamedTuple):
    """Workers who sum up gradients by a collective, for the first of them; no other has had this `number`."""

    number: int
    lines: tuple[int, ...]


@final
class Agreed(NamedTuple):
    """What those who offered their gradients do: sum them up in a ring, or (None) push each its own."""

    weights: Weights
    ring: Ring | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Push:
    samples: int
    units: int
    number: int = -1
    """Of what it travels in."""
    summed: bool = False


@final
class Bundle:
    """Gathers pushes until none of the workers behind the group server computes any more.

    A worker computes from an answer that leaves it with a claim to its next request. As long as one does, the group's
    barrier, which the parent keeps, cannot open; so nothing is held back that somebody waits for. What it is worth is
    traffic, not correctness: a mean of some pushes, weighted by units, is worth the sum of their weights in any commit
    that they are all in, and a barrier commits all that it has.

    Where workers sum up by a collective they offer gradients before they push them, so that it is begun by all who take
    part, or by none. Of a sum nothing can be taken back: if one of them leaves before it has been passed on, all begin
    the iteration anew, and the next ring is of those who are here then.
    """

    def __init__(self) -> None:
        self._claims: dict[int, int] = {}
        """How many each line holds, of those who are here."""
        self._computing: set[int] = set()
        self._pushed: dict[int, _Push] = {}
        """What has not been passed on."""
        self._passed_on: dict[int, _Push] = {}
        """What has been, and is not answered."""
        self._number = 0
        self._offered: dict[int, _Push] = {}
        self._ring = Ring(0, ())
        self._summing: frozenset[int] = frozenset()
        """Who has agreed to sum up, until it is passed on."""

    def join(self, line: int) -> None:
        """A worker is here, with nothing to compute on."""
        self._claims[line] = 0

    def leave(self, line: int) -> frozenset[int]:
        """It is gone: what it has pushed and was not passed on was never heard of, and others will do it again.

        Returns the lines that must begin anew, since their gradients are in one sum with its own.
        """
        voided = self.ask(line)
        del self._claims[line]
        self._pushed.pop(line, None)
        self._passed_on.pop(line, None)
        return voided

    def ask(self, line: int) -> frozenset[int]:
        """It begins a pass, rests or stops, so it holds nothing any more.

        Returns the lines that must begin anew, as when it leaves: it has left its loop in the middle of a sum.
        """
        self._claims[line] = 0
        self._computing.discard(line)
        self._offered.pop(line, None)
        if line not in self._summing:
            return frozenset()
        others, self._summing = self._summing - {line}, frozenset()
        for other in others:
            # Nothing of theirs counts from now on, whichever of them is told first.
            self.ask(other)
            self._pushed.pop(other, None)
        return others

    def offer(self, line: int, samples: int, units: int) -> None:
        """It has gradients to sum up with the others', and pushes once it is told how.

        Raises:
            ProtocolError: It does not compute.
        """
        self._require_computing(line)
        self._computing.discard(line)
        self._offered[line] = _Push(samples=samples, units=units)

    def agreed(self) -> Agreed | None:
        """What all who have offered do now, which is not said again; None as long as somebody computes."""
        if self._computing or not self._offered:
            return None
        offers, self._offered = self._offered, {}
        lines = tuple(sorted(offers))
        # Making a ring takes longer than a few pushes: not where some only have nothing left to do in this pass.
        if lines != self._ring.lines and len(lines) > 1 and lines == tuple(sorted(self._claims)):
            self._ring = Ring(self._ring.number + 1, lines)
        ring = self._ring if lines == self._ring.lines else None
        if ring is not None:
            self._summing = frozenset(lines)
        self._computing.update(lines)
        return Agreed(_weights(offers), ring)

    def push(self, line: int, samples: int, units: int) -> None:
        """It has pushed what it computed on its first claim.

        Raises:
            ProtocolError: It does not compute.
        """
        self._require_computing(line)
        self._claims[line] -= 1
        self._computing.discard(line)
        self._pushed[line] = _Push(samples=samples, units=units)

    def answer(self, line: int, claims: int, *, over: bool) -> None:
        """The parent has answered its request, with so many claims more."""
        if line not in self._claims:
            return
        self._passed_on.pop(line, None)
        self._claims[line] = 0 if over else self._claims[line] + claims
        if self._claims[line]:
            self._computing.add(line)

    def waited_for(self) -> list[int]:
        """The lines that compute while others wait for them, ascending."""
        return sorted(self._computing) if self._pushed or self._offered else []

    def refuse(self, number: int) -> frozenset[int]:
        """The parent could not take these in as one, since one of their workers is gone there: they go once more.

        Returns the lines that must begin anew instead, since their gradients are a sum.
        """
        refused = {line: push for line, push in self._passed_on.items() if push.number == number}
        for line, push in refused.items():
            del self._passed_on[line]
            if not push.summed:
                self._pushed[line] = push
        return frozenset(line for line, push in refused.items() if push.summed)

    def due(self) -> CombinedPush | None:
        """What goes to the parent now, and is not due again; None as long as somebody computes or is to agree.

        A sum goes as soon as all in it have pushed, and by itself: who has come meanwhile has no part in it.
        """
        if self._summing:
            if not self._pushed.keys() >= self._summing:
                return None
            lines, self._summing = self._summing, frozenset()
            return self._passed(lines, holder=min(lines))
        if self._computing or self._offered or not self._pushed:
            return None
        return self._passed(self._pushed, holder=None)

    def _passed(self, lines: Iterable[int], *, holder: int | None) -> CombinedPush:
        self._number += 1
        pushes = {line: self._pushed.pop(line) for line in sorted(lines)}
        for line, push in pushes.items():
            self._passed_on[line] = replace(push, number=self._number, summed=holder is not None)
        return CombinedPush(self._number, _weights(pushes), holder)

    def _require_computing(self, line: int) -> None:
        if line not in self._computing:
            raise ProtocolError("a worker pushed although it had nothing to compute on, or had pushed already")


def _weights(pushes: Mapping[int, _Push]) -> Weights:
    counted = [push for push in pushes.values() if push.samples]
    units = sum(push.units for push in counted)
    return tuple(
        (line, (push.units / units if units else 1 / len(counted)) if push.samples else 0.0)
        for line, push in sorted(pushes.items())
    )
