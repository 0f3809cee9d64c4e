"""The user's fixed sizes: from what a worker is (rank, host, GPU) to how much it gets."""

from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.core.workers import name_workers

KINDS = ("rank", "host", "gpu")
"""What a key may name, the closest description first."""


def sizes_by_rank(
    batch_sizes: Sequence[int] | Mapping[Any, int], described: Sequence[Mapping[str, str]]
) -> tuple[int, ...]:
    """Every worker's size, in the order of the ranks.

    Args:
        batch_sizes: One size per worker, or sizes by `rank:2` (or plain 2), `host:node7`, `gpu:NAME`. Where several
            keys describe a worker, rank wins over host and host over gpu.
        described: Each worker's `rank`, `host` and `gpu` (empty where it has none).

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
    present = [f"{kind}:{worker[kind]}" for worker in described for kind in KINDS if worker[kind]]
    for key in by_key:
        if key.partition(":")[0] not in KINDS:
            raise ConfigError(f"batch_sizes has the key {key!r}: write rank:NUMBER, host:NAME or gpu:NAME")
        if key not in present:
            raise ConfigError(f"batch_sizes has {key!r}, which matches no worker: {nearest(key, present)}")
    chosen = [
        next((key for kind in KINDS if (key := f"{kind}:{worker[kind]}") in by_key), None) for worker in described
    ]
    unmatched = [rank for rank, key in enumerate(chosen) if key is None]
    if unmatched:
        worker = described[unmatched[0]]
        raise ConfigError(
            f"batch_sizes says nothing of {name_workers(unmatched)}: add a key such as 'host:{worker['host']}'"
        )
    return tuple(by_key[key] for key in chosen if key is not None)
