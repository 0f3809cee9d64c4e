"""The loader that hands out each worker's part of a global batch."""
