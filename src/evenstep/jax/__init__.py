"""JAX: data parallelism over processes, with uneven shares. Importing this package imports `jax`."""

from evenstep.jax.session import Session

__all__ = ["Session"]
