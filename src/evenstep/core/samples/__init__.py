"""Which samples: the slices of an epoch, who takes which part of each, and what to fetch ahead for it.

Everything here speaks of *positions*: position p of an epoch is the p-th sample of that epoch's order. The order itself
(a permutation, the user's sampler) belongs to the loader.
"""

from evenstep.core.samples.assignment import part_of, reassign, short_slice_sizes, split
from evenstep.core.samples.ledger import Ledger, Slice
from evenstep.core.samples.lookahead import Lookahead, Share
from evenstep.core.samples.micro_batch import MicroBatch, micro_batches
from evenstep.core.samples.period import ends_period
from evenstep.core.samples.shares import Shares
from evenstep.core.samples.weighting import WEIGHTINGS, by_samples

__all__ = [
    "WEIGHTINGS",
    "Ledger",
    "Lookahead",
    "MicroBatch",
    "Share",
    "Shares",
    "Slice",
    "by_samples",
    "ends_period",
    "micro_batches",
    "part_of",
    "reassign",
    "short_slice_sizes",
    "split",
]
