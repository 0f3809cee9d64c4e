"""This process among the workers, and what they gather from all: records, rows, and means over uneven shares."""

import json
import math
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.launch.c10d import Store
from evenstep.worker.peers import Peers
from evenstep.worker.worker import Worker

Value = TypeVar("Value", bound=float | torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Worker):
    """This worker, and the process groups over which it speaks to the others (None for a single process).

    Attributes:
        host_group: Carries integers between the hosts' CPUs.
        device_group: Carries gradients; it is the same group if Gloo carries them.
        given_group: The script's own group, which stays when the worker leaves.
        on_host: Whether all workers train on the CPU, over Gloo.
        store: The store in which the workers met and show that they are alive, if they have groups.
        machines: The machine of each worker, if they have groups; `pids` are valid between workers of one machine.
        hosts: What tells the host of each worker from others, if they have groups.
        connections: The inodes of the connections of groups that were made here.
        meet: Exchanges this worker's record for those of all workers, if there are no groups.
        rows: Stacks this worker's tensor with those of all workers, if they come and go, so that there are no groups.
        peers: The processes of each worker, if these are several. The groups then have one process of each worker.
        everyone: All processes as workers of their own, if workers have several.
        inside: This process among those of its own replica, over which the model is split, if replicas of several
            processes come and go.
    """

    host_group: dist.ProcessGroup | None = None
    device_group: dist.ProcessGroup | None = None
    given_group: dist.ProcessGroup | None = None
    on_host: bool = False
    store: Store | None = None
    machines: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    connections: frozenset[int] = frozenset()
    meet: Callable[[bytes], list[bytes]] | None = None
    rows: Callable[[torch.Tensor], torch.Tensor] | None = None
    peers: Peers | None = None
    everyone: "Workers | None" = None
    inside: "Workers | None" = None

    @property
    def processes(self) -> "Workers":
        """This process among all processes; the same where every worker is one."""
        return self.everyone or self

    @property
    def leads(self) -> bool:
        """True if this process keeps the records of its worker."""
        return self.peers is None or not self.peers.place_of(self.processes.rank)[1]

    @property
    def gathers(self) -> bool:
        """True if tensors can be gathered, because workers wait for each other."""
        return self.count == 1 or self.host_group is not None or self.rows is not None

    def named(self, text: str) -> str:
        """A message in which workers' numbers are those of processes, as it is or with their workers."""
        return text if self.peers is None else self.peers.named(text)

    def leave(self) -> None:
        """Leave the groups; the others must leave too. Those beside a `given_group` stay: see `new_group`."""
        if self.given_group is not None:
            return
        if self.everyone is not None:
            self.everyone.leave()
        for group in {id(group): group for group in (self.host_group, self.device_group)}.values():
            if group is not None:
                dist.destroy_process_group(group)


def new_group(parts: Sequence[Sequence[int]], backend: str, seconds: float) -> dist.ProcessGroup:
    """Make a process group of each of these parts, of which this process is in one, and return its own.

    All members of all parts must call it together. Where these are all processes, each of them counts the groups, and
    torch names them by that count. Otherwise torch names a group by its members and by how many groups these have now:
    once a group is destroyed, the next one of the same members would find its addresses in the store.
    """
    some = sum(map(len, parts)) < dist.get_world_size()
    limit = timedelta(seconds=seconds)
    groups = [dist.new_group(part, limit, backend, use_local_synchronization=some) for part in parts]
    own: dist.ProcessGroup = groups[next(n for n, part in enumerate(parts) if dist.get_rank() in part)]
    return own


def place_of(*needed: str, group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Rank and number of workers: from the process group, else from torchrun's environment, else of a single process.

    The process group is `group`, or the default one.

    Raises:
        ConfigError: torchrun's environment lacks the rank, or a variable that is `needed`.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    missing = [name for name in ("RANK", *needed) if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is set but {' and '.join(missing)} is not: start the script with torchrun")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def gather(workers: Workers, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every worker's record, as JSON over the host group or the servers; all workers must call this together."""
    text = json.dumps(record).encode()
    if workers.meet is not None:
        return [json.loads(each) for each in workers.meet(text)]
    if workers.host_group is None and workers.rows is None:
        return [json.loads(text)]
    longest = int(of_all(workers, torch.tensor([len(text)])).max())
    texts = of_all(workers, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8))
    return [json.loads(each.tobytes()) for each in texts.numpy()]


def exchange(workers: Workers, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The record of every worker, of which each process gives one; all must call this together.

    Raises:
        ConfigError: The record of a process says that something cannot work there, if workers have several.
        DisagreementError: The peers of a worker were given different things.
    """
    records = gather(workers.processes, record)
    return records if workers.peers is None else workers.peers.merged(records)


def of_all(workers: Workers, tensor: torch.Tensor) -> torch.Tensor:
    """Every worker's tensor on the CPU, all of one shape, stacked; all workers must call this together."""
    if workers.rows is not None:
        return workers.rows(tensor)
    if workers.host_group is None:
        return tensor.unsqueeze(0)
    tensors = [torch.empty_like(tensor) for _ in range(workers.count)]
    dist.all_gather(tensors, tensor, group=workers.host_group)
    return torch.stack(tensors)


def mean_over_workers(workers: Workers, value: Value, count: float) -> Value:
    """The mean of all workers' values, weighted by counts; summed in a fixed order, so all get the same bits.

    Raises:
        ConfigError: The value or the count is not a real number, a count is negative or not finite, all counts are 0,
            or the workers' values differ in shape.
    """
    try:
        count = float(count)
        mine = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"mean_over_workers takes a number or a tensor, and its count, not {shown(value)} and {shown(count)}"
        ) from None
    if not (math.isfinite(count) and count >= 0):
        raise ConfigError(f"a mean over workers is weighted by counts >= 0, not {count}")
    if mine.is_complex():
        raise ConfigError("mean_over_workers takes real values: give it torch.view_as_real of complex ones")
    if not workers.gathers:
        warnings.warn(
            "workers of parameter servers do not wait for each other, so mean_over_workers gives each its own value:"
            " after the loop they have the same weights, and one of them can measure for all",
            stacklevel=3,
        )
        return value
    # A value of count 0 may be a NaN.
    values = mine.double().cpu().flatten() if count else torch.zeros(mine.numel(), dtype=torch.float64)
    length = len(values)
    first = values if length == 1 else torch.zeros(1, dtype=torch.float64)
    rows = of_all(workers, torch.cat([first, torch.tensor([count, length], dtype=torch.float64)]))
    if (rows[:, 2] != length).any():  # Gloo would abort the process.
        raise ConfigError(
            f"mean_over_workers takes values of one shape on all workers, here {list(mine.shape)}: give it the mean or"
            " the sum of each batch"
        )
    counts = rows[:, 1:2]
    if not counts.any():
        raise ConfigError("there is no mean over workers that counted nothing: leave out such a metric on all of them")
    values = rows[:, :1] if length == 1 else of_all(workers, values)
    mean = (values * (counts / counts.sum())).sum(dim=0).view(mine.shape)
    if not isinstance(value, torch.Tensor):
        return cast("Value", float(mean))
    return cast("Value", mean.to(mine.device, mine.dtype if mine.is_floating_point() else torch.get_default_dtype()))


def rows_of_all(workers: Workers, values: torch.Tensor) -> list[torch.Tensor]:
    """The rows of each worker's tensor, in worker order; workers may have different numbers. A scalar is one row.

    Raises:
        ConfigError: Workers do not wait for each other, or the rows differ in shape or dtype.
    """
    if not workers.gathers:
        raise ConfigError(
            "workers of parameter servers do not wait for each other: gather after the run, on one of them"
        )
    own = values.detach().cpu()
    own = own if own.dim() else own[None]
    form = f"{list(own.shape[1:])} of {own.dtype}"
    told = of_all(workers, torch.tensor([len(own), zlib.crc32(form.encode())]))
    if (told[:, 1] != told[0, 1]).any():  # Gloo would abort the process.
        raise ConfigError(f"workers gather rows of other shapes or dtypes, here {form}: pad them to one shape before")
    lengths = told[:, 0].tolist()
    padded = own.new_zeros((max(lengths), *own.shape[1:]))
    padded[: len(own)] = own
    parts = zip(of_all(workers, padded), lengths, strict=True)
    return [rows[:length].to(values.device) for rows, length in parts]
