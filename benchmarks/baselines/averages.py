"""What baselines have in common: they see the logarithm of one pace after another, and say the next."""

from collections import deque


class Recent:
    """The last `length` logarithms, oldest first."""

    def __init__(self, length):
        self.logs = deque(maxlen=length)

    def clamp(self, log, slack=0.0):
        """The number, clipped to the range of these, which is wider by `slack` on each side."""
        return min(max(log, min(self.logs) - slack), max(self.logs) + slack)


class Average:
    """An exponential average whose weights are max(1/n, weight); 1 is the last value."""

    def __init__(self, weight=0.2):
        self._weight, self._count, self.level = weight, 0, 0.0

    def observe(self, log):
        self._count += 1
        self.level += max(1.0 / self._count, self._weight) * (log - self.level)

    def forecast(self):
        return self.level if self._count else None
