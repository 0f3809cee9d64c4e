"""The pure core that decides: values in, decisions out. It has no torch, clock, thread, socket or global randomness."""
