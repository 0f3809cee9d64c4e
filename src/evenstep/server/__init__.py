"""The parameter server: owns weights and optimizer state, applies what the coordinator commits, and serves workers."""
