"""The speed of each worker by iteration, measured in a run or described by a cluster file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
import numpy.typing as npt

from evenstep.cluster import Cluster, ClusterWorker
from evenstep.cluster.slowness import AffineCurve, Constant, Device, Disturbance, Episodic, From, Trace
from evenstep.core.errors import ConfigError
from evenstep.core.load.elasticity import Elasticity
from evenstep.report.account.account import Account
from evenstep.report.iterations import FloatArray, Iterations
from evenstep.report.recorded import RecordedRun

MIN_ITERATIONS: Final = 20
"""Shorter runs say too little: `lb-bsp` has only just settled, and slowness has not shown its pattern."""

_WARM_UP: Final = 2  # Iterations, which are not counted.
_LEAST_SECONDS: Final = 1e-6  # The resolution of the log.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Workers, and the variation of each one's time.

    Attributes:
        cluster: The workers for the simulator; each takes as long as in the iterations of `seconds`, repeated from the
            start.
        seconds: Each worker's compute seconds at equal sizes, shape [workers, iterations].
        exchange_seconds: Seconds of an iteration besides compute, alike on all workers: communication and the script.
        global_batch_size: In samples.
        proportional: Whether times are only assumed to be in proportion to sizes, because no sizes changed.
        measured: The scheme of the run, and its samples/s after the first iterations; None for a cluster file.
        others: Seconds per iteration by which each worker exceeds the others for input and script, shape [workers].
    """

    cluster: Cluster
    seconds: FloatArray
    exchange_seconds: float
    global_batch_size: int
    proportional: bool = False
    measured: tuple[str, float] | None = None
    others: FloatArray


def _disturbed(worker: ClusterWorker, factors: FloatArray, other: float) -> ClusterWorker:
    """The worker, whose iterations take `factors` times their usual seconds, and `other` seconds more."""
    parts: list[Disturbance] = [Trace(factors=tuple(factors.tolist()))]
    if other > 0:
        parts.append(Constant(factor=1.0, extra_seconds=other))
    return replace(worker, disturbances=tuple(parts))


def longest(workers: int) -> int:
    """The most iterations to simulate for this number of workers: 20,000 in total, but at least 100 per worker."""
    return max(100, 20_000 // workers)  # Their simulation takes seconds.


def measured_machines(run: RecordedRun, described: Cluster | None = None) -> Machines:
    """The machines of a recorded run, with hosts, links and memory from a cluster file if there is one.

    Of a long run, only the latest `longest` iterations count.

    A worker's time has a fixed part and a part in proportion to its samples, estimated from changes of its sizes;
    without any, it counts as proportional. The factor of an iteration is its time over the usual time.

    Raises:
        ConfigError: The run is too short, has one worker, lacks the records of some, or has a different number of
            workers than the cluster file.
    """
    if run.unrecorded:
        raise ConfigError(
            f"{run.unrecorded} of the run's workers have no iterations in this folder: copy the worker-*.jsonl of all"
            " hosts into one"
        )
    done = {worker: each[_WARM_UP:] for worker, each in run.counted.items()}
    length = min(len(each) for each in done.values())
    if len(done) < 2:
        raise ConfigError("the run has one worker, which waits for no other: there is no scheme to choose")
    if length < MIN_ITERATIONS:
        raise ConfigError(
            f"the run has {length + _WARM_UP} iterations, and advice needs {MIN_ITERATIONS + _WARM_UP}: train a little"
            " longer (50 are enough)"
        )
    if described is not None and len(described) != len(done):
        raise ConfigError(
            f"the run has {len(done)} workers and the cluster file {len(described)}: give the file of the run's cluster"
        )
    seconds = max(float(each.iteration_seconds.sum()) for each in done.values())
    speed = sum(float(each.samples.sum()) for each in done.values()) / max(seconds, _LEAST_SECONDS)
    done = {worker: each[-longest(len(done)) :] for worker, each in done.items()}
    whole = _whole(list(done.values()), run)
    kept = [(each.measured[own], each.compute_seconds[own]) for each, own in zip(done.values(), whole, strict=True)]
    if min(len(samples) for samples, _ in kept) < MIN_ITERATIONS:
        raise ConfigError("too few iterations had a whole global batch: give a run with longer epochs")
    others = np.array([float(np.mean(each.own_parts[1:].sum(axis=0))) for each in done.values()])
    exchange = min(float(np.mean(each.comm_seconds)) for each in done.values())
    follows = Elasticity(len(run.iterations))
    for worker, each in enumerate(run.counted.values()):
        computed = (each.compute_seconds > 0) & (each.measured > 0)
        sizes = each.measured[computed] * len(run.iterations) / run.global_batch_size
        follows.observe(worker, each.compute_seconds[computed], sizes)
    machines = _of_columns(
        kept,
        follows,
        others,
        0.0 if described is not None and described.links else exchange,
        run.global_batch_size,
        described,
    )
    return replace(machines, measured=(run.scheme, speed))


def accounted_machines(account: Account) -> Machines:
    """The machines of a run behind a barrier, from its account, as in `measured_machines`.

    Raises:
        ConfigError: The run is too short, or has one worker.
    """
    kept = [each[..., _WARM_UP:][..., -longest(account.workers) :] for each in account.gain.sampled]
    samples, seconds, others, exchange = kept
    if account.workers < 2 or len(exchange) < MIN_ITERATIONS:
        raise ConfigError(f"advice needs two workers and {MIN_ITERATIONS + _WARM_UP} iterations")
    return _of_columns(
        list(zip(samples, seconds, strict=True)),
        account.gain.elasticity,
        others.mean(axis=1),
        float(exchange.mean()),
        account.global_batch_size,
    )


def _of_columns(
    kept: Sequence[tuple[FloatArray, FloatArray]],
    elasticity: Elasticity,
    others: FloatArray,
    exchange: float,
    global_batch_size: int,
    described: Cluster | None = None,
) -> Machines:
    """The machines of workers with these columns of samples and compute seconds, up to the end of the shortest."""
    # The part of each worker's time that follows its sizes, 0 to 1; all of it if no sizes have changed.
    follows = elasticity.medians.tolist() if elasticity.known else [1.0] * len(kept)
    equal = global_batch_size / len(kept)
    length, beyond, at_equal, workers = min(len(samples) for samples, _ in kept), others - others.min(), [], []
    for rank, (samples, seconds) in enumerate(kept):
        fixed = 1 - follows[rank]
        usual = max(float(np.median(seconds / (fixed + (1 - fixed) * samples / equal))), _LEAST_SECONDS)
        curve = AffineCurve(fixed_seconds=fixed * usual, seconds_per_sample=(1 - fixed) * usual / equal)
        expected = np.maximum(curve.fixed_seconds + curve.seconds_per_sample * samples, _LEAST_SECONDS)
        factors = (np.maximum(seconds, _LEAST_SECONDS) / expected)[:length]
        worker = ClusterWorker() if described is None else described.workers[rank]
        device = Device(curve=curve) if worker.device is None else replace(worker.device, curve=curve)
        workers.append(_disturbed(replace(worker, device=device), factors, float(beyond[rank])))
        at_equal.append(curve.seconds(equal) * factors)
    return Machines(
        cluster=replace(Cluster(workers=()) if described is None else described, workers=tuple(workers)),
        seconds=np.array(at_equal),
        exchange_seconds=exchange + float(others.min()),
        global_batch_size=global_batch_size,
        proportional=not elasticity.known,
        others=beyond,
    )


def described_machines(
    cluster: Cluster, global_batch_size: int, *, exchange_seconds: float = 0.0, others: FloatArray | None = None
) -> Machines:
    """The machines of a cluster file, with the disturbances that it describes; `others` are 0 if not given.

    They cover 400 iterations, or the longest period after which a disturbance repeats if that is longer, but at most
    `longest` iterations.

    Raises:
        ConfigError: It has only one worker, or a worker without a device.
    """
    if len(cluster) < 2:
        raise ConfigError("the cluster has one worker, which waits for no other: there is no scheme to choose")
    equal = global_batch_size / len(cluster)
    lengths = [400]  # Iterations of a described disturbance, unless it repeats after more.
    for part in {part for worker in cluster.workers for part in worker.disturbances}:
        if isinstance(part, Episodic):
            lengths.append(part.period)
        elif isinstance(part, From):
            lengths.append(2 * part.first if part.until is None else part.until + part.first)
        elif isinstance(part, Trace):
            lengths.append(len(part.factors))
    count = min(max(lengths), longest(len(cluster)))
    others = np.zeros(len(cluster)) if others is None else others
    at_equal, workers = [], []
    for rank, each in enumerate(cluster.workers):
        if each.device is None:
            raise ConfigError(
                f"worker {rank} has no device, so its speed is unknown: add one to the cluster file, or give the run"
                " directory of a run on these machines"
            )
        usual, disturbed = each.device.curve.seconds(equal), each.disturbance()
        seconds = [
            disturbed.seconds(worker=rank, iteration=at, batch_size=equal, natural_seconds=usual) for at in range(count)
        ]
        factors = np.array(seconds) / usual
        at_equal.append(usual * factors)
        workers.append(_disturbed(each, factors, float(others[rank])))
    return Machines(
        cluster=replace(cluster, workers=tuple(workers)),
        seconds=np.array(at_equal),
        exchange_seconds=exchange_seconds,
        global_batch_size=global_batch_size,
        others=others,
    )


def _whole(done: Sequence[Iterations], run: RecordedRun) -> list[npt.NDArray[np.bool_]]:
    """The iterations of each worker that count: not those on an epoch's short last slice or without samples."""
    if run.servers is not None:
        return [each.samples >= max(0.5 * float(np.median(each.samples)), 1.0) for each in done]
    samples = np.array([each.samples for each in done])
    whole = (samples.sum(axis=0) >= run.global_batch_size) & (samples > 0).all(axis=0)
    return [whole] * len(done)
