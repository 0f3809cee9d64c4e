"""This process among the workers, and agreeing with them before anything is built."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evenstep.runtime.c10d import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """This worker's rank among `count` workers, and the groups they speak over (None for a single process).

    `host_group` carries integers between the hosts' CPUs; `device_group` carries gradients and is the same group on
    the CPU.
    """

    rank: int
    count: int
    host: str
    timeout_seconds: float
    host_group: dist.ProcessGroup | None = None
    device_group: dist.ProcessGroup | None = None
    store: Store | None = None
    """Where the workers met, and tell each other that they live, where they have groups."""
    meet: Callable[[bytes], list[bytes]] | None = None
    """Where there is no group: brings everybody's record for this worker's."""

    def leave(self) -> None:
        """Leave the groups; the others must leave too."""
        for group in {id(group): group for group in (self.host_group, self.device_group)}.values():
            if group is not None:
                dist.destroy_process_group(group)


def gather(workers: Workers, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every worker's record, as JSON over the host group or the servers; all workers must call it together."""
    if workers.meet is not None:
        return [json.loads(text) for text in workers.meet(json.dumps(record).encode())]
    if workers.host_group is None:
        return [json.loads(json.dumps(record))]
    text = json.dumps(record).encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(workers.count)]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=workers.host_group)
    longest = max(int(length) for length in lengths)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(workers.count)]
    dist.all_gather(texts, mine, group=workers.host_group)
    return [
        json.loads(bytes(text[: int(length)].tolist()).decode()) for text, length in zip(texts, lengths, strict=True)
    ]


def minority(values: list[str]) -> list[int]:
    """The ranks whose value is not the commonest one (where several are, not the lowest rank's).

    >>> minority(["a", "b", "a"]), minority(["a", "b"]), minority(["a", "a"])
    ([1], [1], [])
    """
    if len(set(values)) == 1:
        return []
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return [rank for rank, value in enumerate(values) if value != usual]


def name_workers(ranks: list[int]) -> str:
    """`worker 3`, or `workers 3, 5 and 7`.

    >>> name_workers([3]), name_workers([3, 5, 7])
    ('worker 3', 'workers 3, 5 and 7')
    """
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return f"workers {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
