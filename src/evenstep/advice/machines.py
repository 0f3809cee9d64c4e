"""How fast each worker is, iteration by iteration: measured in a run, or described by a cluster file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
import numpy.typing as npt

from evenstep.cluster import Cluster, ClusterWorker
from evenstep.cluster.slowness import AffineCurve, Constant, Device, Disturbance, Episodic, From, Trace
from evenstep.core.errors import ConfigError
from evenstep.report.account import Elasticity
from evenstep.report.iterations import FloatArray, Iterations
from evenstep.report.recorded import RecordedRun

MIN_ITERATIONS: Final = 20
"""A shorter run says too little: `lb-bsp` has only just settled, and slowness has not shown its pattern."""

_WARM_UP: Final = 2
_LEAST_SECONDS: Final = 1e-6
_DESCRIBED: Final = 400
_FEWEST: Final = 100
_MOST: Final = 20_000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Workers, and how the time of each varied.

    Attributes:
        cluster: The workers for the simulator, without what makes their times vary from iteration to iteration.
        factors: How many times as long as usual each iteration took, shape [workers, iterations].
        exchange_seconds: What an iteration takes beside compute, on all workers alike: communication, and the script.
        global_batch_size: In samples.
        measured: The samples/s of the run, and the scheme under which it was made; None for a cluster file.
        others: Seconds per iteration that each worker takes for input and script beyond the others, shape [workers].
    """

    cluster: Cluster
    factors: FloatArray
    exchange_seconds: float
    global_batch_size: int
    measured: tuple[str, float] | None = None
    others: FloatArray

    def disturbed(self) -> Cluster:
        """The cluster, whose workers take as long as in these iterations, and from their start again."""
        workers = tuple(
            replace(each, disturbances=(*each.disturbances, *self._of(rank)))
            for rank, each in enumerate(self.cluster.workers)
        )
        return replace(self.cluster, workers=workers)

    def seconds(self) -> FloatArray:
        """Each worker's compute seconds at equal sizes, shape [workers, iterations]."""
        equal = self.global_batch_size / len(self.cluster)
        usual = [0.0 if each.device is None else each.device.curve.seconds(equal) for each in self.cluster.workers]
        return np.asarray(np.array(usual)[:, np.newaxis] * self.factors)

    def _of(self, rank: int) -> list[Disturbance]:
        parts: list[Disturbance] = [Trace(factors=tuple(self.factors[rank].tolist()))]
        if self.others[rank] > 0:
            parts.append(Constant(factor=1.0, extra_seconds=float(self.others[rank])))
        return parts


def longest(workers: int) -> int:
    """The most iterations to simulate for this number of workers: 20,000 of all together, but at least 100 of each."""
    return max(_FEWEST, _MOST // workers)


def measured_machines(run: RecordedRun, described: Cluster | None = None) -> Machines:
    """The machines of a recorded run; hosts, links and memory as a cluster file describes them, if there is one.

    Of a long run the latest iterations count, as many as `longest` says.

    A worker's time is a fixed part and a part in proportion to its samples, as the changes of its sizes show; without
    any it is taken for proportional. What an iteration took beyond its usual time is its factor.

    Raises:
        ConfigError: The run is too short, has one worker, lacks the records of some, or is of another number of workers
            than the cluster file.
    """
    if run.unrecorded:
        raise ConfigError(
            f"{run.unrecorded} of the run's workers have no iterations in this folder: copy the worker-*.jsonl of all"
            " hosts into one"
        )
    elasticities = _elasticities(run)
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
    equal = run.global_batch_size / len(done)
    whole = _whole(list(done.values()), run)
    kept = [_columns(each, counts) for each, counts in zip(done.values(), whole, strict=True)]
    length = min(len(samples) for samples, _ in kept)
    if length < MIN_ITERATIONS:
        raise ConfigError("too few iterations had a whole global batch: give a run with longer epochs")
    curves = [_curve(*each, 1 - share, equal) for each, share in zip(kept, elasticities, strict=True)]
    factors = np.array([_factors(*each, curve)[:length] for each, curve in zip(kept, curves, strict=True)])
    described_workers = (None,) * len(done) if described is None else described.workers
    workers = tuple(_worker(curve, each) for curve, each in zip(curves, described_workers, strict=True))
    others = np.array([float(np.mean(each.own_parts[1:].sum(axis=0))) for each in done.values()])
    exchange = min(float(np.mean(each.comm_seconds)) for each in done.values()) + float(others.min())
    linked = described is not None and bool(described.links)
    cluster = Cluster(workers=workers) if described is None else replace(described, workers=workers)
    return Machines(
        cluster=cluster,
        factors=factors,
        exchange_seconds=float(others.min()) if linked else exchange,
        global_batch_size=run.global_batch_size,
        measured=(run.scheme, speed),
        others=others - others.min(),
    )


def described_machines(cluster: Cluster, global_batch_size: int) -> Machines:
    """The machines of a cluster file, with the disturbances that it describes.

    They are looked at over 400 iterations, or over the longest time in which a disturbance repeats if that is longer;
    over `longest` iterations at most.

    Raises:
        ConfigError: It has one worker, or one without a device.
    """
    if len(cluster) < 2:
        raise ConfigError("the cluster has one worker, which waits for no other: there is no scheme to choose")
    equal = global_batch_size / len(cluster)
    count = _horizon(cluster)
    factors, workers = [], []
    for rank, each in enumerate(cluster.workers):
        if each.device is None:
            raise ConfigError(
                f"worker {rank} has no device, so its speed is unknown: add one to the cluster file, or give the run"
                " directory of a run on these machines"
            )
        usual, disturbed = each.device.curve.seconds(equal), each.disturbance()
        seconds = [
            disturbed.seconds(worker=rank, iteration=at, batch_size=equal, natural_seconds=usual, now=0.0)
            for at in range(count)
        ]
        factors.append(np.array(seconds) / usual)
        workers.append(replace(each, disturbances=()))
    return Machines(
        cluster=replace(cluster, workers=tuple(workers)),
        factors=np.array(factors),
        exchange_seconds=0.0,
        global_batch_size=global_batch_size,
        others=np.zeros(len(cluster)),
    )


def _horizon(cluster: Cluster) -> int:
    lengths = [_DESCRIBED]
    for part in {part for worker in cluster.workers for part in worker.disturbances}:
        if isinstance(part, Episodic):
            lengths.append(part.period)
        elif isinstance(part, From):
            lengths.append(2 * part.first if part.until is None else part.until + part.first)
        elif isinstance(part, Trace):
            lengths.append(len(part.factors))
    return min(max(lengths), longest(len(cluster)))


def _worker(curve: AffineCurve, described: ClusterWorker | None) -> ClusterWorker:
    if described is None:
        return ClusterWorker(device=Device(curve=curve))
    device = Device(curve=curve) if described.device is None else replace(described.device, curve=curve)
    return replace(described, device=device, disturbances=())


def _whole(done: Sequence[Iterations], run: RecordedRun) -> list[npt.NDArray[np.bool_]]:
    """Which iterations of each worker count: not those on the short last slice of an epoch, or without samples."""
    if run.servers is not None:
        return [each.samples >= max(0.5 * float(np.median(each.samples)), 1.0) for each in done]
    samples = np.array([each.samples for each in done])
    whole = (samples.sum(axis=0) >= run.global_batch_size) & (samples > 0).all(axis=0)
    return [whole] * len(done)


def _elasticities(run: RecordedRun) -> list[float]:
    """The part of each worker's time that follows its sizes, 0 to 1; 1 if no sizes have changed."""
    follows = Elasticity(len(run.iterations))
    for worker, done in enumerate(run.counted.values()):
        computed = (done.compute_seconds > 0) & (done.measured > 0)
        sizes = done.measured[computed] * len(run.iterations) / run.global_batch_size
        follows.observe(worker, done.compute_seconds[computed], sizes)
    return follows.medians.tolist() if follows.known else [1.0] * len(run.iterations)


def _columns(done: Iterations, counts: npt.NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
    return done.measured[counts], done.compute_seconds[counts]


def _curve(samples: FloatArray, seconds: FloatArray, share: float, equal: float) -> AffineCurve:
    """The usual time, of which that share at `equal` samples is fixed."""
    relative = share + (1 - share) * samples / equal
    usual = max(float(np.median(seconds / relative)), _LEAST_SECONDS)
    return AffineCurve(fixed_seconds=share * usual, seconds_per_sample=(1 - share) * usual / equal)


def _factors(samples: FloatArray, seconds: FloatArray, curve: AffineCurve) -> FloatArray:
    """How many times as long as usual each iteration took."""
    usual = curve.fixed_seconds + curve.seconds_per_sample * samples
    return np.asarray(np.maximum(seconds, _LEAST_SECONDS) / np.maximum(usual, _LEAST_SECONDS))
