"""PyTorch tensors as the messages of the protocol carry them; workers and servers use it alike."""
