"""The driving factors of a worker's speed: what of its processors and memory it can have, once per iteration."""

from evenstep.worker.factors.base import FactorSampler
from evenstep.worker.factors.sampler import factor_sampler

__all__ = ["FactorSampler", "factor_sampler"]
