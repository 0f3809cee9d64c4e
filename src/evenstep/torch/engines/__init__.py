"""The exchange of gradients and weights under each kind of scheme."""
