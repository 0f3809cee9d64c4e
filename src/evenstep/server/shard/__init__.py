"""The contents of a parameter server: weights, optimizer state, snapshots."""
