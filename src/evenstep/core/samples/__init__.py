"""Which samples: the slices of an epoch, who takes which part of each, and what to fetch ahead for it.

Everything here uses *positions*: position p of an epoch is the p-th sample of that epoch's order. The order itself
(a permutation, the user's sampler) belongs to the loader.
"""

from evenstep.core.samples.assignment import part_of, reassign, short_slice_sizes, slice_sizes, split
from evenstep.core.samples.balanced import balanced
from evenstep.core.samples.costs import Costs, CostSharing, EpochCosts, SampleTimes
from evenstep.core.samples.drawn import Drawn, Indices
from evenstep.core.samples.ledger import Ledger, Slice
from evenstep.core.samples.lookahead import Lookahead
from evenstep.core.samples.per_sample import THOUSAND, PerSample
from evenstep.core.samples.private import PrivateShares, private_sizes
from evenstep.core.samples.share import (
    WEIGHTINGS,
    Loads,
    MicroBatch,
    Request,
    Share,
    Shares,
    by_samples,
    ends_period,
    micro_batches,
    whole_batch,
)

__all__ = [
    "THOUSAND",
    "WEIGHTINGS",
    "CostSharing",
    "Costs",
    "Drawn",
    "EpochCosts",
    "Indices",
    "Ledger",
    "Loads",
    "Lookahead",
    "MicroBatch",
    "PerSample",
    "PrivateShares",
    "Request",
    "SampleTimes",
    "Share",
    "Shares",
    "Slice",
    "balanced",
    "by_samples",
    "ends_period",
    "micro_batches",
    "part_of",
    "private_sizes",
    "reassign",
    "short_slice_sizes",
    "slice_sizes",
    "split",
    "whole_batch",
]
