"""Predictors that the first LB-BSP paper compares NARX with, for `predictors.py` alone."""

from baselines.ar import Autoregressive
from baselines.holt import Holt
from baselines.rnn import Recurrent

BASELINES = {"holt": Holt, "ar": Autoregressive, "rnn": Recurrent}
