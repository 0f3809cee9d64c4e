"""What the members of this folder demand of the values they are made of: one wording for each kind of mistake."""

import math

from evenstep.core.errors import ConfigError


def require_at_least(name: str, value: float, least: float) -> None:
    """Raise ConfigError unless `value` is finite and at least `least`."""
    if not least <= value < math.inf:
        raise ConfigError(f"{name} must be a finite number of at least {least}, not {value!r}")


def require_positive(name: str, value: float) -> None:
    """Raise ConfigError unless `value` is finite and greater than 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a finite number greater than 0, not {value!r}")


def require_worker(worker: int | None) -> None:
    """Raise ConfigError unless `worker` is None (every worker) or a worker's id."""
    if worker is not None and worker < 0:
        raise ConfigError(f"worker must be a worker's id from 0, or None for every worker, not {worker!r}")
