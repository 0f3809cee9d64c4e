"""What the sampling of the driving factors promises to the rest of the runtime."""

from typing import Protocol

from evenstep.core.values import Factors


class FactorSampler(Protocol):
    """Reads the factors of one worker, on the machine that it runs on.

    A worker calls `sample` once per iteration, in the thread that computes, as soon as its own compute has ended. What
    comes back is known before the next iteration and is for predicting that one.
    """

    def sample(self) -> Factors:
        """The factors now; 1 for what is not limited, not there, or cannot be read here. It never raises."""

    def close(self) -> None:
        """Let go of what is open; `sample` is not called afterwards."""
