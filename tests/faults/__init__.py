"""The grid of faults: what befalls a worker, when, under which scheme and launcher, and what must come of it."""
