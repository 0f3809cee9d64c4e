"""Predicts the next iteration by a small recurrent network that learns as it goes."""

import math

from baselines.averages import Average, Recent
from baselines.elman import Elman

_MIN_DATA, _WINDOW, _MEMORY, _MIN_SCALE = 50, 50, 200, 1e-3


class Recurrent:
    """An Elman network that predicts by how much the log pace will differ from an exponential average of it.

    It sees one number per iteration: by how much the last measurement differed from the average before it, over the
    root mean square of about the last 200 such differences. The prediction stays within the range of the last 50
    measurements; the average's own prediction stands until 50 differences are known. LB-BSP compares with a simple
    recurrent network; the paper does not say how large or how trained, all choices are ours.
    """

    def __init__(self):
        self._average, self._network, self._recent = Average(), Elman(), Recent(_WINDOW)
        self._square, self._count = 0.0, 0

    def observe(self, log):
        level = self._average.forecast()
        if level is not None:
            difference = log - level
            self._count += 1
            self._square += max(1.0 / self._count, 1.0 / _MEMORY) * (difference * difference - self._square)
            self._network.observe(difference / self._scale)
        self._average.observe(log)
        self._recent.logs.append(log)

    def forecast(self):
        level = self._average.forecast()
        if level is None or self._count < _MIN_DATA:
            return level
        return self._recent.clamp(level + self._network.prediction * self._scale)

    @property
    def _scale(self):
        return max(math.sqrt(self._square), _MIN_SCALE)
