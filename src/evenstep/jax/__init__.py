"""JAX: data parallelism over processes, with uneven shares. It needs `jax`, which importing this package imports."""

from evenstep.jax.session import Session

__all__ = ["Session"]
