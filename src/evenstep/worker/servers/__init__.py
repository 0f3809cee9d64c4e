"""A worker's client side of the parameter servers."""
