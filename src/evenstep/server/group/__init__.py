"""A group server: it sums the gradients of one group and pushes them to the parameter servers."""
