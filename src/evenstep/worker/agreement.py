"""The agreement of workers of any framework before a run: that all can begin, and their smallest and largest batch."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, final

import numpy as np

from evenstep.cluster import Cluster, parse_slow
from evenstep.cluster.slowness import Chain, Disturbance
from evenstep.core.disagreement import Field, require_agreement
from evenstep.core.errors import ConfigError, naming
from evenstep.core.load import Static
from evenstep.core.load.checked import load_policy
from evenstep.core.load.limits import smallest_batch
from evenstep.core.sync.checked import sync_policy
from evenstep.core.values import UNLIMITED, IntArray, Problem
from evenstep.core.version import VERSION
from evenstep.launch.launch_settings import VARIABLES, LaunchSettings, read_cluster, require_emulable
from evenstep.schemes import Scheme, placed
from evenstep.worker.hold import Hold, identity_of

Exchange: TypeAlias = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
"""Exchanges this worker's record, as JSON, for the records of all workers, by rank; all workers call it together."""

DRAWN: Final = Field(
    phrase="a sampler that draws {}",
    then="evenstep shares out what all are to have, so give every worker the same sampler in every epoch, for all of"
    " the samples (as for a single process: num_replicas=1, rank=0) and seeded alike",
)
_MUST_AGREE: Final = {
    "version": Field(phrase="version {} of evenstep"),
    "scheme": Field(phrase="the scheme {}"),
    "batch_size": Field(
        phrase="a loader with a batch size of {}",
        then="start every worker with the same (sizes by worker are what batch_sizes= is for)",
    ),
    "global_batch_size": Field(phrase="a global_batch_size of {}", none="no global_batch_size"),
    "dataset": Field(phrase="a dataset of {} samples"),
    "length": Field(phrase="an epoch of {} samples"),
    "workers": Field(phrase="workers={}"),
    "sampler": Field(phrase="a sampler {}", none="no custom sampler"),
    "drawn": DRAWN,
    "replacement": Field(phrase="replacement={}"),
    "empty": Field(phrase="empty={}"),
    "shuffle": Field(phrase="shuffle={}"),
    "seed": Field(phrase="a seed of {} for the order of samples"),
    "drop_last": Field(phrase="drop_last={}"),
    "partition": Field(phrase="partition={}", none="no partition"),
    "uneven": Field(phrase="uneven={}"),
    "accumulation": Field(phrase="accumulation={}"),
    "cost": Field(phrase="costs of samples with the checksum {}", none="no costs of samples"),
    "parameters": Field(phrase="a model of {} parameters"),
    "shapes": Field(phrase="parameters whose shapes have the checksum {}"),
    "weights": Field(phrase="weights of {}"),
    "optimizer": Field(phrase="the optimizer {}"),
}
"""The fields of workers' records that must be the same on all. Not every framework, nor every call, has all of them."""


_Own = TypeVar("_Own")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """This worker's part of an agreement.

    `scheme` is the one that it was asked for; `hold` emulates slowness and, if `emulated`, another device. `failed` is
    the batch, if any, that its device could not hold in an earlier run. `record` is told to the other workers.
    """

    scheme: Scheme
    hold: Hold | None
    emulated: bool
    failed: int | None = None
    record: Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The settings that are the same on all workers, and this worker's `own`.

    `limits`: each worker's largest batch if known, int64 of shape [workers]. `workers`: the records of all workers.
    """

    scheme: Scheme
    problem: Problem
    limits: IntArray
    workers: Sequence[Mapping[str, Any]]
    own: Own


def agree(check: Callable[[], Own], exchange: Exchange, *, size: Callable[[Scheme], int], usual: int = 1) -> Agreed:
    """Check what this worker was given, and that all were given the same; all workers must call it together.

    Args:
        check: Checks everything that one worker can check alone.
        exchange: Exchanges the records.
        size: Returns the global batch size under the scheme, the same on every worker.
        usual: The smallest batch if none is asked for.

    Raises:
        ConfigError: Something cannot work on this worker or on another, which is named.
        DisagreementError: The workers were given different things.
    """
    own, records = tell(lambda: (made := check(), made.record), exchange)
    require_same(records)
    scheme = placed(own.scheme, [each["host"] for each in records], [each.get("gpu", "") for each in records])
    limits = np.array([each["largest_batch"] for each in records], dtype=np.int64)
    if scheme.load.maximum is not None:
        limits = np.minimum(limits, scheme.load.maximum)
    count, load, global_batch_size = len(records), scheme.load, size(scheme)
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
    problem = Problem(
        global_batch_size=global_batch_size,
        minimum=np.full(count, minimum, dtype=np.int64),
        maximum=maximum,
        # Micro-batches are then cut by cost, and sizes need not be whole ones of them.
        multiple=load.multiple if records[0].get("cost") is None else 1,
    )
    # Refuse sizes that cannot be divided or grouped, in the same way on every worker.
    load_policy(load, count).allocate(problem)
    sync_policy(scheme.sync, count)
    return Agreed(scheme=scheme, problem=problem, limits=limits, workers=records, own=own)


def require_same(records: Sequence[Mapping[str, Any]]) -> None:
    """Check that all workers were given the same.

    Raises:
        DisagreementError: They were not. The message names the minority and is the same on every worker.
    """
    everywhere = set.intersection(*map(set, records))
    require_agreement(records, {key: field for key, field in _MUST_AGREE.items() if key in everywhere})


def record_of(scheme: Scheme, *, host: str, device: str, hold: Hold | None) -> dict[str, Any]:
    """Return what each worker tells the others about itself, besides its smallest and largest batch.

    `device` identifies the worker's device, also in later runs.
    """
    return {
        "version": VERSION,
        "scheme": scheme.name,
        "host": host,
        "device": device,
        "identity": identity_of(device, hold),
    }


def tell(check: Callable[[], tuple[_Own, Mapping[str, Any]]], exchange: Exchange) -> tuple[_Own, list[dict[str, Any]]]:
    """Return the first result of `check`, whose second is told to the others, and the records of all workers.

    All workers must call it together.

    Raises:
        ConfigError: The check failed on another worker, which is named; its own error on the worker where it failed.
    """
    try:
        own, record = check()
    except Exception as error:  # Whatever failed, the others must not wait for this worker.
        said = str(error)
        if not isinstance(error, ConfigError):  # An error of a user's dataset or sampler needs its type.
            first, *_, last = (said.strip() or " ").splitlines() * 2  # In between is the traceback of a data worker.
            said = f"{type(error).__name__}: {first}" + (f" {last}" if last != first else "")
        with suppress(Exception):  # An error about telling them says less.
            exchange({"error": said})
        raise
    records = exchange(record)
    for rank, each in enumerate(records):
        if "error" in each:
            raise ConfigError(f"worker {rank}: {each['error']}")
    return own, records


def hold_of(
    emulate: Cluster | str | None, launched: LaunchSettings, *, rank: int, workers: int
) -> tuple[Hold | None, bool]:
    """Return what emulates slowness on this worker, if anything does, and whether it emulates another device.

    Args:
        emulate: A cluster, or the path of its file; None for the environment's, if there is one.
        launched: The environment's settings.
        rank: This worker.
        workers: The number of workers.

    Raises:
        ConfigError: This many workers cannot emulate it.
    """
    given = launched.emulate if emulate is None else emulate
    with naming(VARIABLES["emulate"] if emulate is None else "emulate"):
        cluster = given if given is None or isinstance(given, Cluster) else read_cluster(Path(given))
        if cluster is not None:
            require_emulable(cluster, workers)
    parts: list[Disturbance] = [] if cluster is None else [cluster.disturbance()]
    device = None if cluster is None else cluster.workers[rank].device
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
        largest_batch=UNLIMITED if device is None else device.largest_batch,
        memory=None if device is None else device.memory,
        change_seconds=0.0 if device is None else device.change_seconds,
        wait=time.sleep,
    )
    return hold, device is not None
