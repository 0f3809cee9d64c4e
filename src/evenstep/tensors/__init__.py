"""Converts between PyTorch tensors and the messages of the protocol, for workers and servers."""
