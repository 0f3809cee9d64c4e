"""Forecasts a worker's next iteration from its past paces and the machine's state before it: LB-BSP's NARX."""

import math
from dataclasses import dataclass, field
from typing import Final, final

import numpy as np

from evenstep.core.load.narx_network import NarxNetwork
from evenstep.core.state import Stateful
from evenstep.core.values import Factors, FloatArray, Sample

_LAGS: Final = 3
WIDTH: Final = _LAGS + 1 + 4 * 2
"""The number of inputs of the network."""


@final
@dataclass(slots=True, kw_only=True)
class Narx(Stateful):
    """LB-BSP (arXiv 1806.02508; SoCC'20): v_k = F(v_{k-1}, ..; c_k, c_{k-1}, ..; m_k, m_{k-1}, ..) by a small network.

    A nonlinear autoregressive model with exogenous inputs: past speeds v, and past and present shares c of processors
    and m of memory that the worker can have. It learns one step ahead, one step of its filter per iteration. The paper
    does not give layer sizes, lags, optimiser or schedule; ours are given here and in `NarxNetwork`.

    All inputs are logarithms, so that a speed in proportion to a factor is a straight line. The network forecasts the
    difference of the log pace from an exponential average of weight `fast`, and stays within the range of the last
    `window` paces. Its inputs are the last three log paces and a slower average, relative to that average; and for each
    factor its value, and relative to the factor's average its value, the previous one and a slower average.

    The average itself is the forecast until the network has learned from `trusted_from` iterations, and whenever the
    network's recent one-step error is not smaller than the average's by a factor of `margin`. This guard is ours: where
    neither factors nor past speeds predict the speed, a network can only add noise.
    """

    fast: float = 0.2
    slow: float = 0.03
    window: int = 100
    judged_from: int = 25
    trusted_from: int = 50
    margin: float = 0.97
    smallest_factor: float = 0.02
    _network: NarxNetwork = field(init=False, default_factory=lambda: NarxNetwork(width=WIDTH))
    _logs: list[float] = field(init=False, default_factory=list)
    _count: int = field(init=False, default=0)
    # Averages of the log pace and of the factors' logarithms, and those logarithms in the last iteration.
    _fast: FloatArray = field(init=False, default_factory=lambda: np.zeros(3))
    _slow: FloatArray = field(init=False, default_factory=lambda: np.zeros(3))
    _before: FloatArray = field(init=False, default_factory=lambda: np.zeros(2))
    # Mean squared one-step errors of the network's forecast and of the average.
    _errors: FloatArray = field(init=False, default_factory=lambda: np.zeros(2))

    def observe(self, sample: Sample, factors: Factors) -> None:
        """Take in one measured iteration, oldest first, with the factors known before it."""
        if sample.samples <= 0:
            return
        log, now = math.log(max(sample.compute_seconds, 1e-9) / sample.samples), self._known(factors)
        if len(self._logs) >= _LAGS:
            self._learn(log, now)
        self._count += 1
        state = np.array([log, *now])
        self._fast = self._fast + max(1.0 / self._count, self.fast) * (state - self._fast)
        self._slow = self._slow + max(1.0 / self._count, self.slow) * (state - self._slow)
        self._before = now
        self._logs = [*self._logs, log][-self.window :]

    def forecast(self, factors: Factors) -> int:
        """Nanoseconds per sample of the next iteration, given the factors before it; 0 before the first measurement."""
        if not self._logs:
            return 0
        log = float(self._fast[0])
        if self.trusted:
            log = self._clamped(log + self._network.predict(self._inputs(self._known(factors))))
        return max(round(min(math.exp(log) * 1e9, 1e12)), 1)

    @property
    def trusted(self) -> bool:
        """True if forecasts are the network's, not the average's."""
        network, average = self._errors
        return self._network.learned >= self.trusted_from and bool(network < self.margin**2 * average)

    def _learn(self, log: float, now: FloatArray) -> None:
        level, judged = float(self._fast[0]), self._network.learned >= self.judged_from
        correction = self._network.learn(self._inputs(now), log - level)
        if judged:
            errors = np.array([log - self._clamped(level + correction), log - level])
            weight = max(1.0 / (self._network.learned - self.judged_from), 1.0 / self.trusted_from)
            self._errors = self._errors + weight * (errors * errors - self._errors)

    def _inputs(self, now: FloatArray) -> list[float]:
        level, average = float(self._fast[0]), self._fast[1:]
        lags = [log - level for log in self._logs[: -_LAGS - 1 : -1]]
        relative = np.stack((now - average, self._before - average, average - self._slow[1:], now), axis=1)
        return [*lags, level - float(self._slow[0]), *relative.ravel().tolist()]

    def _clamped(self, log: float) -> float:
        return min(max(log, min(self._logs)), max(self._logs))

    def _known(self, factors: Factors) -> FloatArray:
        """The logarithms of the factors, each raised a little so that the logarithm of 0 exists."""
        return np.log(self.smallest_factor + np.array([factors.cpu_availability, factors.memory_availability]))
