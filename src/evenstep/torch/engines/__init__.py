"""How gradients and weights are exchanged under each kind of scheme."""
