"""Predictors that LB-BSP compares NARX with, for `predictors.py` alone."""

from functools import partial

from baselines.ar import Autoregressive
from baselines.averages import Average
from baselines.holt import Holt
from baselines.rnn import Recurrent

BASELINES = {
    "last": partial(Average, 1.0), "ema": Average, "holt": Holt, "ar": Autoregressive, "rnn": Recurrent,
}  # fmt: skip
