"""Predicts the next iteration by a linear model of the last few, fitted to a recent window."""

import numpy as np

from baselines.averages import Recent

_LARGEST_ORDER = 5
_MIN_DATA = 20
_LAGS = np.arange(1, _LARGEST_ORDER + 1)
_RIDGE, _MIN_RIDGE, _MIN_SCATTER = 0.5, 1e-9, 0.01


class Autoregressive:
    """An autoregressive model of the log pace on the last `window` measurements: y_k = c + sum_j a_j * y_{k-j}.

    Fitted anew after every measurement by least squares with a small ridge on the a_j. The order, 0 to 5, is the one of
    the least AICc (Hurvich and Tsai 1989), all orders on the same data. With fewer than 20 measurements it is their
    mean. The prediction stays within the range of the window. LB-BSP compares with models of this kind; the paper does
    not say how they are fitted, all choices are ours.
    """

    def __init__(self, window=60):
        self._recent = Recent(window)

    def observe(self, log):
        self._recent.logs.append(log)

    def forecast(self):
        logs = np.array(self._recent.logs)
        if len(logs) < _MIN_DATA:
            return float(logs.mean()) if len(logs) else None
        return self._recent.clamp(_next(logs))


def _next(logs):
    """By the model of the best order: all have one Cholesky factor, of which each has a leading block."""
    mean = float(logs.mean())
    centred = logs - mean
    # Row k: 1 and the values before k, newest first; the last row is what the next value is predicted from.
    before = np.lib.stride_tricks.sliding_window_view(centred, _LARGEST_ORDER)[:, ::-1]
    rows = np.column_stack([np.ones(len(before)), before])
    past, now, targets = rows[:-1], rows[-1], centred[_LARGEST_ORDER:]
    gram = past.T @ past
    gram[_LAGS, _LAGS] += _RIDGE * float(centred @ centred) / len(centred) + _MIN_RIDGE
    factor = np.linalg.cholesky(gram)
    moments, present = np.linalg.solve(factor, np.column_stack([past.T @ targets, now])).T
    # Running sums: entry p is that of order p.
    squares = float(targets @ targets) - np.cumsum(moments * moments)
    count, terms = len(targets), np.arange(1, _LARGEST_ORDER + 2)
    scatter = np.maximum(squares / (count - terms), _MIN_SCATTER**2)
    # One parameter more than terms: the scatter.
    penalties = 2.0 * (terms + 1) * count / (count - terms - 2)
    order = int(np.argmin(count * np.log(scatter * (count - terms) / count) + penalties))
    return mean + float(np.cumsum(moments * present)[order])
