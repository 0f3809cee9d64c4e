"""Which pass over the data each worker is in, or waits for."""

from dataclasses import dataclass, field
from typing import final

from evenstep.core.errors import DisagreementError
from evenstep.core.samples.pass_costs import PassCosts


@dataclass(slots=True)
class _Gathering:
    """The workers that wait for a pass to open, and what its positions cost."""

    epoch: int
    workers: set[int] = field(default_factory=set)
    costs: PassCosts | None = None


@final
class Passes:
    """The current pass and the workers in it, and the workers that wait for later ones.

    Attributes:
        number, epoch: the current pass, or the last one, and its epoch; -1 before the first.
        costs: what the positions of the pass cost, as the first worker in it said; None if all cost alike.
        inside: how many workers are in it.
    """

    def __init__(self) -> None:
        self.number = -1
        self.epoch = -1
        self.costs: PassCosts | None = None
        self.inside = 0
        self._pass_of: dict[int, int] = {}
        self._gatherings: dict[int, _Gathering] = {}

    def __contains__(self, worker: int) -> bool:
        return worker in self._pass_of

    def is_inside(self, worker: int) -> bool:
        """Whether the worker is in the current pass."""
        return self._pass_of.get(worker) == self.number

    @property
    def waiting(self) -> int:
        """How many workers wait for a later pass."""
        return len(self._pass_of) - self.inside

    def check_epoch(self, worker: int, number: int, epoch: int) -> None:
        """Check that a worker runs the pass of that number as the same epoch as the others.

        Raises:
            DisagreementError: It does not.
        """
        known = {number: each.epoch for number, each in self._gatherings.items()} | {self.number: self.epoch}
        theirs = known.get(number, epoch)
        if theirs != epoch:
            raise DisagreementError(
                f"worker {worker} runs its loop {number} as epoch {epoch} where the others run epoch {theirs}:"
                " loop over the same epochs on all workers"
            )

    def enter(self, worker: int, number: int, epoch: int, costs: PassCosts | None = None) -> None:
        """The worker enters the current pass, or waits for the later one of that number.

        `costs`: what the positions of that pass cost, which all workers of a run say alike.
        """
        self._pass_of[worker] = number
        if number == self.number:
            self.inside += 1
            self.costs = self.costs or costs
        else:
            gathering = self._gatherings.setdefault(number, _Gathering(epoch))
            gathering.workers.add(worker)
            gathering.costs = gathering.costs or costs

    def leave(self, worker: int) -> None:
        """The worker leaves its pass, or no longer waits for one, if it does."""
        number = self._pass_of.pop(worker, None)
        if number == self.number:
            self.inside -= 1
        elif number is not None:
            gathering = self._gatherings[number]
            gathering.workers.discard(worker)
            if not gathering.workers:
                del self._gatherings[number]

    def open_next(self) -> list[int]:
        """Open the next pass that a worker waits for; returns its workers, ascending."""
        self.number = min(self._gatherings)
        gathering = self._gatherings.pop(self.number)
        self.epoch = gathering.epoch
        self.costs = gathering.costs
        self.inside = len(gathering.workers)
        return sorted(gathering.workers)
