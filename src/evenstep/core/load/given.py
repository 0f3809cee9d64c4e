"""The sizes that a user has given, as one for each worker."""

from collections.abc import Mapping, Sequence
from typing import Final

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.core.workers import name_workers

_KINDS: Final = ("rank", "host", "gpu")
"""What a key of `batch_sizes` may name; the first that matches wins."""


def sizes_by_rank(
    batch_sizes: Sequence[int] | Mapping[object, int], described: Sequence[Mapping[str, str]]
) -> tuple[int, ...]:
    """The sizes of all workers. `batch_sizes`: one per worker, or by `rank:2` (or 2), `host:node7`, `gpu:NAME`.

    Raises:
        ConfigError: A key matches no worker, or a worker matches no key.
    """
    if not isinstance(batch_sizes, Mapping):
        if len(batch_sizes) != len(described):
            raise ConfigError(
                f"batch_sizes has {len(batch_sizes)} sizes but there are {len(described)} workers: give one for each"
            )
        return tuple(batch_sizes)
    by_key = {(f"rank:{key}" if isinstance(key, int) else str(key)): size for key, size in batch_sizes.items()}
    present = [f"{kind}:{worker[kind]}" for worker in described for kind in _KINDS if worker[kind]]
    for key in by_key:
        if key.partition(":")[0] not in _KINDS:
            raise ConfigError(f"batch_sizes has the key {key!r}: write rank:NUMBER, host:NAME or gpu:NAME")
        if key not in present:
            raise ConfigError(f"batch_sizes has {key!r}, which matches no worker: {nearest(key, present)}")
    chosen = [
        next((key for kind in _KINDS if (key := f"{kind}:{worker[kind]}") in by_key), None) for worker in described
    ]
    unmatched = [rank for rank, key in enumerate(chosen) if key is None]
    if unmatched:
        worker = described[unmatched[0]]
        raise ConfigError(
            f"batch_sizes says nothing of {name_workers(unmatched)}: add a key such as 'host:{worker['host']}'"
        )
    return tuple(by_key[key] for key in chosen if key is not None)
