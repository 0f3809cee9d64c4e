"""How much does a device hold? Learned from the peaks of the batches that ran, and searched for before a run."""

from evenstep.core.memory.largest import LargestBatches
from evenstep.core.memory.model import ROUNDING_BYTES, MemoryModel, size_after_failure

__all__ = ["ROUNDING_BYTES", "LargestBatches", "MemoryModel", "size_after_failure"]
