"""Public helpers for tests and benchmarks of schemes, models and clusters; nothing in evenstep itself uses them."""
