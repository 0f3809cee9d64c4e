"""How LB-BSP's tuner for GPU clusters proceeds: its step, its window, and what tells it to change them."""

from dataclasses import dataclass
from typing import Any, Final, Self, cast, final

from evenstep.core.load.move import Move
from evenstep.core.values import State

_EVEN_PPM: Final = 20_000
_GROWN_PPM: Final = 50_000
_STEADY: Final = 3


@final
@dataclass(slots=True, kw_only=True)
class Tuning:
    """What the tuner goes by now; `directions` has one entry for each worker.

    Attributes:
        step: How many samples a move is at most.
        window: How many iterations a move rests on, at the least.
        directions: For each worker, the steps it got less those it gave since the step is what it is.
        last: The last move, if it can still be taken back.
        reference_ppm: The largest gap that is no sign of a change: at rest what it had settled at, before that the
            largest since the step is what it is; None as long as the step is the first.
        rests: Whether only a change can move samples.
    """

    step: int
    window: int
    directions: list[int]
    last: Move | None = None
    reference_ppm: int | None = None
    rests: bool = False

    @classmethod
    def from_state(cls, state: State) -> Self:
        """From what `dataclasses.asdict` made of one."""
        fields = cast("dict[str, Any]", state)
        last = None if fields["last"] is None else Move(**fields["last"])
        return cls(**{**fields, "directions": list(fields["directions"]), "last": last})

    def wants(self, move: Move) -> bool:
        """Whether the move is worth making without any change of the workers."""
        return not self.rests and move.gap_ppm > _EVEN_PPM

    def has_grown(self, move: Move) -> bool:
        """Whether the gap is larger than can be without a change, or a last move that made it so."""
        return self.reference_ppm is not None and move.gap_ppm > self.reference_ppm + _GROWN_PPM

    def oscillates(self, move: Move) -> bool:
        """Whether a worker would go back the way it came at this step."""
        return self.directions[move.giver] > 0 or self.directions[move.taker] < 0

    def goes_on(self, move: Move) -> bool:
        """Whether a worker has gone this way so often that the step must be too small."""
        return -self.directions[move.giver] >= _STEADY or self.directions[move.taker] >= _STEADY

    def change_step(self, step: int, window: int) -> None:
        """Another step and window; directions are counted anew."""
        self.step, self.window = step, window
        self.directions = [0] * len(self.directions)
