"""The pass over the data that each worker is in or waits for."""

from typing import final

from evenstep.core.errors import DisagreementError
from evenstep.core.samples.pass_costs import PassCosts


@final
class Passes:
    """The current pass and the workers in it, and the workers that wait for later ones.

    Attributes:
        number, epoch: the current pass, or the last one, and its epoch; -1 before the first.
        costs: the costs of the pass's positions, as reported by the first worker in it; None if all cost alike.
        inside: number of workers in it.
    """

    def __init__(self) -> None:
        self.number = -1
        self.epoch = -1
        self.costs: PassCosts | None = None
        self.inside = 0
        self._pass_of: dict[int, int] = {}
        self._later: dict[int, tuple[int, PassCosts | None]] = {}  # Epoch and costs of the passes waited for.

    def __contains__(self, worker: int) -> bool:
        return worker in self._pass_of

    def is_inside(self, worker: int) -> bool:
        """True if the worker is in the current pass."""
        return self._pass_of.get(worker) == self.number

    @property
    def waiting(self) -> int:
        """The number of workers that wait for a later pass."""
        return len(self._pass_of) - self.inside

    def check_epoch(self, worker: int, number: int, epoch: int) -> None:
        """Check that a worker runs the pass of that number as the same epoch as the others.

        Raises:
            DisagreementError: It does not.
        """
        theirs = self.epoch if number == self.number else self._later.get(number, (epoch, None))[0]
        if theirs != epoch:
            raise DisagreementError(
                f"worker {worker} runs its loop {number} as epoch {epoch} where the others run epoch {theirs}:"
                " loop over the same epochs on all workers"
            )

    def enter(self, worker: int, number: int, epoch: int, costs: PassCosts | None = None) -> None:
        """The worker enters the current pass, or waits for the later one of that number."""
        self._pass_of[worker] = number
        if number == self.number:
            self.inside += 1
            self.costs = self.costs or costs
        else:
            epoch, known = self._later.get(number, (epoch, None))
            self._later[number] = epoch, known or costs

    def leave(self, worker: int) -> None:
        """The worker leaves its pass, if it is in one, or no longer waits for one."""
        number = self._pass_of.pop(worker, None)
        if number == self.number:
            self.inside -= 1
        elif number is not None and number not in self._pass_of.values():
            del self._later[number]

    def open_next(self) -> list[int]:
        """Open the next pass that a worker waits for, and return its workers, ascending."""
        self.number = min(self._later)
        self.epoch, self.costs = self._later.pop(self.number)
        workers = sorted(filter(self.is_inside, self._pass_of))
        self.inside = len(workers)
        return workers
