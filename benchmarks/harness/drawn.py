"""Clusters that are drawn from a seed, of the kinds that the cluster files in examples/clusters describe."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from evenstep.cluster import Cluster, ClusterWorker, Link
from evenstep.cluster.slowness import MEASURED_CURVES, AffineCurve, Device, Episodic, Jitter, PointCurve

MEASURED_GPUS = sorted(MEASURED_CURVES)
KINDS = ("equal", "two generations", "one slow", "mixed", "measured GPUs")
_SHARES = (0.15, 0.3, 0.2, 0.25, 0.1)
_SPREADS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.3)
_OFTEN = (0.15, 0.2, 0.2, 0.2, 0.15, 0.1)
_BANDWIDTHS = (1e9, 10e9, 25e9, 100e9)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A cluster, what it trains, and how it was drawn."""

    number: int
    cluster: Cluster
    global_batch_size: int
    message_bytes: int | None
    about: dict

    def with_seed(self, seed):
        """The same cluster, whose jitter and episodes are drawn by another seed."""
        workers = tuple(
            dataclasses.replace(
                worker,
                disturbances=tuple(
                    dataclasses.replace(each, seed=1000 * seed + at) for at, each in enumerate(worker.disturbances)
                ),
            )
            for worker in self.cluster.workers
        )
        return dataclasses.replace(self.cluster, workers=workers)


def draw(seed, number, *, workers=None, milliseconds=None, links=True):
    """Cluster `number` of this seed; `workers` and `milliseconds` of an average iteration may be given."""
    generator = np.random.default_rng([seed, number])
    kind = str(generator.choice(KINDS, p=_SHARES))
    count = int(generator.integers(2, 17))
    batch = int(generator.choice((16, 32, 64, 128)))
    usual = float(np.exp(generator.uniform(np.log(20), np.log(500)))) / 1000
    fixed = float(generator.choice((0.0, generator.uniform(0.02, 0.4))))
    count, usual = workers or count, usual if milliseconds is None else milliseconds / 1000
    slowness = _slowness(generator, kind, count)
    spread = float(generator.choice(_SPREADS, p=_OFTEN))
    episodes, disturbed = _episodes(generator, count)
    linked = links and bool(generator.random() < 0.5)
    link = Link(name="lan", bits_per_second=float(generator.choice(_BANDWIDTHS)), latency_seconds=1e-4)
    megabytes = float(np.exp(generator.uniform(np.log(0.5), np.log(50))))
    if kind == "measured GPUs":
        names = [str(generator.choice(MEASURED_GPUS)) for _ in range(count)]
        curves = [PointCurve.measured(name) for name in names]
        usual = float(np.mean([curve.seconds(batch) for curve in curves]))
    else:
        curves = [
            AffineCurve(
                fixed_seconds=fixed * usual * factor, seconds_per_sample=(1 - fixed) * usual * factor / batch
            )
            for factor in slowness
        ]  # fmt: skip
    jitter = Jitter(spread=spread, seed=0)
    cluster = Cluster(
        workers=tuple(
            ClusterWorker(
                device=Device(curve=curve),
                link=link if linked else None,
                disturbances=(jitter, episodes) if slowed else (jitter,),
            )
            for curve, slowed in zip(curves, disturbed, strict=True)
        ),
        links=(link,) if linked else (),
    )
    about = {
        "kind": kind, "workers": count, "batch_size": batch, "usual_milliseconds": round(1000 * usual, 1),
        "slowness": names if kind == "measured GPUs" else [round(each, 2) for each in slowness],
        "fixed_share": None if kind == "measured GPUs" else round(fixed, 2), "jitter": spread,
        "episodes": _told(episodes, disturbed),
        "bandwidth": link.bits_per_second if linked else None,
        "megabytes": round(megabytes, 1) if linked else None,
    }  # fmt: skip
    return Drawn(
        number=number, cluster=cluster, global_batch_size=batch * count,
        message_bytes=round(megabytes * 1e6) if linked else None, about=about,
    )  # fmt: skip


def _slowness(generator, kind, count):
    """How many times as long as the fastest kind each worker takes."""
    slow = float(np.exp(generator.uniform(np.log(1.2), np.log(4))))
    if kind == "two generations":
        older = int(generator.integers(1, count))
        return [1.0] * (count - older) + [slow] * older
    if kind == "one slow":
        return [1.0] * (count - 1) + [slow]
    if kind == "mixed":
        return [float(each) for each in generator.uniform(1, 3, size=count)]
    return [1.0] * count


def _episodes(generator, count):
    """Neighbours that take a part of a machine now and then, and which workers have them: often none."""
    period = int(generator.choice((60, 200, 500)))
    shortest, longest = sorted(int(each) for each in generator.uniform(0.05, 0.6, size=2) * period)
    episodes = Episodic(
        factor=float(generator.uniform(1.5, 4)), period=period, shortest=shortest, longest=longest, seed=0
    )
    disturbed = generator.random(count) < float(generator.choice((0.0, 0.5, 1.0), p=(0.6, 0.2, 0.2)))
    return episodes, [bool(each) for each in disturbed]


def _told(episodes, disturbed):
    if not any(disturbed):
        return None
    return {
        "workers": sum(disturbed), "factor": round(episodes.factor, 2), "period": episodes.period,
        "length": [episodes.shortest, episodes.longest],
    }  # fmt: skip
