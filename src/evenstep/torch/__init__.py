"""Trains for real, on PyTorch. It measures, exchanges and applies; what to decide is asked of the core."""
