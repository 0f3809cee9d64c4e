"""What workers of any framework agree on before a run: that all can begin, how small and large batches may be."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from evenstep.cluster import Cluster, parse_slow
from evenstep.cluster.slowness import Chain, Disturbance
from evenstep.core.errors import ConfigError, naming
from evenstep.core.load import Static
from evenstep.core.load.limits import smallest_batch
from evenstep.core.values import UNLIMITED, IntArray, Problem
from evenstep.launch.launch_settings import VARIABLES, LaunchSettings, read_cluster, require_emulable
from evenstep.schemes import Scheme
from evenstep.worker.hold import Hold


class Told(Protocol):
    """What a worker was given, of which `record` is what the other workers are told, as JSON."""

    @property
    def record(self) -> Mapping[str, Any]: ...


_Own = TypeVar("_Own", bound=Told)


def tell(
    check: Callable[[], _Own], gather: Callable[[Mapping[str, Any]], list[dict[str, Any]]]
) -> tuple[_Own, list[dict[str, Any]]]:
    """What `check` returns, and the records of all workers; all workers must call it together.

    Raises:
        ConfigError: The check failed on another worker, which is named; its own error on the worker where it failed.
    """
    own: _Own | None = None
    failure: Exception | None = None
    try:
        own = check()
    except Exception as error:  # Whatever it is, the others must not wait for this worker.
        failure = error
    try:
        records = gather({"error": _sentence(failure)} if own is None else own.record)
    except Exception:
        if failure is None:
            raise
    if failure is not None:
        raise failure  # It says more than that the others cannot be told.
    assert own is not None
    for rank, record in enumerate(records):
        if "error" in record:
            raise ConfigError(f"worker {rank}: {record['error']}")
    return own, records


def _sentence(failure: Exception | None) -> str:
    """What the other workers are told; an error of a user's dataset or sampler needs its type."""
    return str(failure) if isinstance(failure, ConfigError) else f"{type(failure).__name__}: {failure}"


def limits_of(scheme: Scheme, records: Sequence[Mapping[str, Any]]) -> IntArray:
    """The largest batch of each worker if known, int64 of shape [workers]: its record's, and the scheme's maximum."""
    limits = np.array([record["largest_batch"] for record in records], dtype=np.int64)
    return limits if scheme.load.maximum is None else np.minimum(limits, scheme.load.maximum)


def tells_plans(scheme: Scheme, records: Sequence[Mapping[str, Any]], rank: int) -> bool:
    """Whether this worker records everybody's sizes: the first on its host, since hosts may have directories apart.

    On servers all do: sizes reach each at another time, and a worker may leave.
    """
    return scheme.served is not None or all(each["host"] != records[rank]["host"] for each in records[:rank])


def problem_of(
    scheme: Scheme, global_batch_size: int, limits: IntArray, records: Sequence[Mapping[str, Any]], *, usual: int = 1
) -> Problem:
    """What the sizes of these workers must satisfy at first. `usual`: the smallest batch if nothing else is asked for.

    Raises:
        ConfigError: The global batch is too small for all of them, or not the sum of the sizes that the user gave.
    """
    count, load = len(records), scheme.load
    if isinstance(load, Static):
        load.require(count, global_batch_size)
    maximum = np.minimum(limits, [record["largest_first"] for record in records])
    needed = max(record["smallest_batch"] for record in records)
    minimum = smallest_batch(load, global_batch_size, maximum, needed=needed, usual=usual)
    if global_batch_size < count * minimum:
        raise ConfigError(
            f"the global batch size {global_batch_size} is less than {count} workers with at least {minimum} sample"
            f"{'s' if minimum > 1 else ''} each: raise the batch size or start fewer workers"
        )
    return Problem(
        global_batch_size=global_batch_size,
        minimum=np.full(count, minimum, dtype=np.int64),
        maximum=maximum,
        multiple=load.multiple,
    )


def hold_of(
    emulate: Cluster | str | None, launched: LaunchSettings, *, rank: int, workers: int
) -> tuple[Hold | None, bool]:
    """What emulates slowness on this worker, if anything does, and whether it emulates another device.

    Args:
        emulate: A cluster, or the path of its file; None for that of the environment, if there is one.
        launched: The environment's settings.
        rank: This worker.
        workers: The number of workers.

    Raises:
        ConfigError: This many workers cannot emulate it.
    """
    parts: list[Disturbance] = []
    largest_batch, memory, change_seconds, emulated = UNLIMITED, None, 0.0, False
    with naming("emulate" if emulate is not None else VARIABLES["emulate"]):
        cluster = _cluster(emulate if emulate is not None else launched.emulate, workers)
    if cluster is not None:
        parts.append(cluster.disturbance())
        largest_batch, memory = cluster.largest_batch(rank), cluster.memory(rank)
        device = cluster.workers[rank].device
        emulated, change_seconds = device is not None, 0.0 if device is None else device.change_seconds
    for text in launched.slow:
        slow = parse_slow(text, VARIABLES["slow"])
        if slow.worker is not None and slow.worker >= workers:
            raise ConfigError(
                f"{VARIABLES['slow']} {text} names worker {slow.worker} but the last one is {workers - 1}"
            )
        parts.append(slow)
    if not parts:
        return None, False
    hold = Hold(
        disturbance=Chain(parts=tuple(parts)),
        worker=rank,
        largest_batch=largest_batch,
        memory=memory,
        change_seconds=change_seconds,
        clock=time.perf_counter,
        wait=time.sleep,
    )
    return hold, emulated


def _cluster(emulate: Cluster | str | None, workers: int) -> Cluster | None:
    """The cluster to emulate, if there is one; ConfigError if this many workers cannot emulate it."""
    if emulate is None:
        return None
    cluster = emulate if isinstance(emulate, Cluster) else read_cluster(Path(emulate))
    if len(cluster) != workers:
        raise ConfigError(
            f"the cluster to emulate describes {len(cluster)} workers but {workers} were started: make them the same"
        )
    require_emulable(cluster)
    return cluster
