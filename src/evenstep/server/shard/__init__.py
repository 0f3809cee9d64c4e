"""What a parameter server holds: weights, optimizer state, snapshots."""
