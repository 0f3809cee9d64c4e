"""Compares the workers' replicas of the models: a script may change weights, or how they are stepped, on one alone."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import cos, sqrt
from typing import Any, Final, final

import numpy as np

from evenstep.core.replicas import Looks, Sketch, require_same_weights

PIECE: Final = 2**18
"""The number of elements that are converted to float64 at a time."""
_ROUNDING: Final = {2: 2.0**-7, 4: 2.0**-23, 8: 2.0**-52}
"""The relative rounding error by the bytes of a number; of two bytes, that of bfloat16."""
_NOTHING: Final = nullcontext()


@final
class Replicas:
    """This worker's replicas, whose weights are to be those of the other workers.

    Attributes:
        looks: Says when to look.

    Args:
        records: Returns the records of all workers, by rank, given this worker's; all must call it together.
        sketches: Returns the sketches of the weights that all workers must have alike, by name.
        remedy: How a script keeps them alike, as the end of a message.
    """

    def __init__(
        self,
        records: Callable[[Mapping[str, Any]], list[dict[str, Any]]],
        sketches: Callable[[], Mapping[str, Sketch]],
        remedy: str = "also the learning rate, which may follow no loss of one worker's batch",
    ) -> None:
        self._records, self._sketches, self._remedy = records, sketches, remedy
        self.looks = Looks()

    def look(self, iteration: int, meeting: AbstractContextManager[None] = _NOTHING) -> None:
        """Compare the weights if it is time; all workers call it in the same iterations, before the optimizer steps."""
        if iteration >= self.looks.at:
            self.looks.follow(iteration)
            self.compare(meeting)

    def compare(self, meeting: AbstractContextManager[None] = _NOTHING) -> None:
        """Compare the weights, if there are any; all workers call it together, and wait for each other in `meeting`.

        Raises:
            DisagreementError: They differ by more than rounding explains.
        """
        own = self._sketches()
        if not own:
            return
        with meeting:
            told = self._records({"weights": list(own.values())})
        require_same_weights([each["weights"] for each in told], list(own), self._remedy)


def sketch(pieces: Iterable[Any], factors: Any, rounding: float) -> Sketch:  # noqa: ANN401 - of any library
    """Return the sketch of a parameter, by which replicas of it can be compared.

    Args:
        pieces: Its elements, `PIECE` at a time, as vectors of float64: a product in float32 may be rounded to ten bits
            on some of the workers' devices (TF32).
        factors: A float64 vector of the same library, by which differences do not cancel out, of `PIECE` elements.
        rounding: The relative rounding error of the parameter's dtype.

    >>> sketch([np.array([3.0, 4.0])], np.array([0.5, 0.25, 1.0]), rounding=0.0)
    (2.5, 5.0, 0.0)
    """
    total = squares = 0.0
    for number, piece in enumerate(pieces):
        total += cos(number) * float(piece @ factors[: len(piece)])
        squares += float(piece @ piece)
    return total, sqrt(squares), rounding


def sketches_of(arrays: Mapping[str, Any]) -> dict[str, Sketch]:
    """Return the sketches of NumPy arrays of floating-point numbers, by name."""
    factors, found = np.sin(np.arange(1.0, PIECE + 1)), {}
    for name, each in arrays.items():
        pieces = np.split(each.ravel(), range(PIECE, each.size, PIECE))
        found[name] = sketch((piece.astype(np.float64) for piece in pieces), factors, _ROUNDING[each.itemsize])
    return found
