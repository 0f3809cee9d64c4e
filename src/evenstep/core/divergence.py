"""When training has diverged to weights that are finite: decided from the gradient that arrives at a model's logits."""

from typing import Final, final

_WINDOW: Final = 20
"""Iterations that are looked at in a window; fewer are noise alone."""
_PART: Final = 8
"""A window takes this part of the run so far, so that a long run has few of them, and few false alarms."""
_IN_A_ROW: Final = 3
_AS_WRONG: Final = 0.94
"""The part of the first window's error at which a model knows no more than it did."""
_OVERSHOT: Final = 0.1
"""In logits. Models that have little to learn stay below it; those that diverge jump over it."""
_OVER_FIRST: Final = 3.0
"""And over this times what the model begins with, which is no jump, and may last while the rate warms up."""


@final
class Divergence:
    """Watches one worker's iterations for outputs that are as wrong as those of the first ones, and too large.

    Source: ours. With cross entropy over logits z, g the gradient of the mean loss at z and p the probabilities,

        error = sum |g| = mean over samples of 2 (1 - p of the truth),   excess = sum g z / sum |g|

    The error is 0 to 2 whatever the size of batch and layout of z, and says how wrong the outputs are. The sign of the
    excess says whether the loss would fall if all logits were smaller; sum g z is at least what the loss is above that
    of logits of 0, which know nothing. Where training goes well the excess is negative, since logits grow, and if it is
    not the error is small. After SGD has diverged, into dead units or confident nonsense, the error is what it was at
    the beginning, and every step still throws the logits too far. Training has diverged when the means of three windows
    in a row have an excess above 0 and an error of at least 0.94 of the first window's, once the excess of some window
    has been above 0.1, and above three times that of the very first iteration. What has little to learn, or is at rest
    while the rate warms up, does not fulfil the last of these.

    Calibrated on digits and letters under SGD with and without momentum and Adam, at 0.5 to 8 times the tuned rate;
    benchmarks/divergence_study.py looks at other seeds.
    """

    __slots__ = (
        "_bad",
        "_began",
        "_due",
        "_error",
        "_excess",
        "_first",
        "_jump",
        "_overshot",
        "_since",
        "_told",
        "_window",
    )

    def __init__(self) -> None:
        self._due = 0
        self._window = 0
        self._began = 0
        self._error = 0.0
        self._excess = 0.0
        self._first: float | None = None
        self._jump: float | None = None
        self._overshot = False
        self._bad = 0
        self._since = 0
        self._told = False

    def due(self, iteration: int) -> bool:
        """Whether to look at this iteration: ever fewer of a long run, which then costs nothing."""
        return iteration >= self._due

    def observe(self, iteration: int, error: float, excess: float) -> int | None:
        """Take in an iteration that is due, with finite figures; the error's unit does not matter.

        Returns:
            The iteration since which training seems to be diverging, once; else None.
        """
        if self._jump is None:
            self._jump = max(_OVERSHOT, _OVER_FIRST * excess)
        if self._window == 0:
            self._began, self._error, self._excess = iteration, 0.0, 0.0
        self._due = iteration + max(1, iteration // (_PART * _WINDOW))
        self._window += 1
        self._error += error
        self._excess += excess
        if self._window < _WINDOW:
            return None
        error, excess = self._error / self._window, self._excess / self._window
        self._window = 0
        self._overshot = self._overshot or excess > self._jump
        return self._judge(error, excess)

    def _judge(self, error: float, excess: float) -> int | None:
        """As `observe`, of a window's means."""
        if self._first is None:
            self._first = error
            return None
        if not (self._overshot and excess > 0.0 and error >= _AS_WRONG * self._first):
            self._bad = 0
            return None
        if self._bad == 0:
            self._since = self._began
        self._bad += 1
        if self._bad < _IN_A_ROW or self._told:
            return None
        self._told = True
        return self._since
