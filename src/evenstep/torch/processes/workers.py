"""This process among the workers, and agreeing with them before anything is built."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evenstep.launch.c10d import Store
from evenstep.worker.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Worker):
    """This worker and the groups that it and the others speak over (None for a single process).

    `host_group` carries integers between the hosts' CPUs; `device_group` carries gradients and is the same group on
    the CPU.
    """

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
