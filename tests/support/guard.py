"""How long anything may take in a test before it counts as hanging."""

GUARD_SECONDS = 900.0
"""Many times what it takes on a busy machine: it ends a test that hangs, and is no measure of how fast anything is."""
