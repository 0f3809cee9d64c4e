"""Predicts that the speed goes on changing as it lately did: a level and a trend."""

from baselines.averages import Recent


class Holt:
    """Holt's double exponential smoothing (Holt 1957) of the logarithm of the pace, with a damped trend.

    With y the newest logarithm, p = level + damping * trend the prediction of it, and e = y - p:

        level = p + alpha * e,   trend = damping * trend + alpha * beta * e

    The trend cannot run away: it is damped (Gardner and McKenzie 1985), and the prediction stays within 10 % of the
    range of the last ten measurements. The first weights of the level are 1/n, as in a plain mean.
    """

    def __init__(self, alpha=0.3, beta=0.15, damping=0.95):
        self._alpha, self._beta, self._damping = alpha, beta, damping
        self._recent, self._count, self._level, self._trend = Recent(10), 0, 0.0, 0.0

    def observe(self, log):
        self._recent.logs.append(log)
        self._count += 1
        damped = self._damping * self._trend
        error = log - (self._level + damped)
        self._level += damped + max(1.0 / self._count, self._alpha) * error
        self._trend = damped + (0.0 if self._count == 1 else self._alpha * self._beta * error)

    def forecast(self):
        return self._recent.clamp(self._level + self._damping * self._trend, slack=0.1) if self._count else None
