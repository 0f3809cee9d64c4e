"""Which samples? The slices of an epoch, each worker's part of a slice, and the samples to fetch ahead.

Everything here uses *positions*: position p of an epoch is the p-th sample of that epoch's order. The order itself
(a permutation, the user's sampler) belongs to the loader.
"""

from evenstep.core.samples.costs import Costs, CostSharing, EpochCosts, SampleTimes
from evenstep.core.samples.drawn import Drawn, Indices
from evenstep.core.samples.ledger import Ledger
from evenstep.core.samples.lookahead import Lookahead, PrivateParts
from evenstep.core.samples.micro_batches import micro_batches
from evenstep.core.samples.own import OwnShares, words_of
from evenstep.core.samples.per_sample import PerSample
from evenstep.core.samples.share import WEIGHTINGS, Request, Share, Shares, by_samples
from evenstep.core.samples.window import Window, whole_batches

__all__ = [
    "WEIGHTINGS",
    "CostSharing",
    "Costs",
    "Drawn",
    "EpochCosts",
    "Indices",
    "Ledger",
    "Lookahead",
    "OwnShares",
    "PerSample",
    "PrivateParts",
    "Request",
    "SampleTimes",
    "Share",
    "Shares",
    "Window",
    "by_samples",
    "micro_batches",
    "whole_batches",
    "words_of",
]
