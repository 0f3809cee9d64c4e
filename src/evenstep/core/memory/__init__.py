"""How much does a device hold? Learned from the memory peaks of batches that ran, or searched for before a run."""

from evenstep.core.memory.largest import LargestBatches
from evenstep.core.memory.model import ROUNDING_BYTES, MemoryModel, size_after_failure

__all__ = ["ROUNDING_BYTES", "LargestBatches", "MemoryModel", "size_after_failure"]
