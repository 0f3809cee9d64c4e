"""A run on servers in virtual time, with communication that takes no time: what `evenstep simulate` does."""

import math

from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import Silent
from harness.track import Track

_MARGIN = 2.0
"""The epoch is so much longer than what all workers do at their undisturbed speeds, so that it does not end before."""


def replay(scheme, cluster, global_batch_size, seconds):
    """The workers' tracks until so many seconds have passed in an epoch that does not end."""
    size = global_batch_size // len(cluster)
    samples = sum(size * seconds / worker.device.curve.seconds(size) for worker in cluster.workers)
    scenario = Scenario(
        cluster=cluster,
        scheme=scheme,
        global_batch_size=global_batch_size,
        iterations=math.ceil(_MARGIN * samples / global_batch_size) + 10,
    )
    kept = [_Kept() for _ in cluster.workers]
    simulate(scenario, log=Log(workers=kept, server=Silent()))
    return [each.until(seconds) for each in kept]


class _Kept:
    """One worker's track, from its events."""

    def __init__(self):
        self.now, self.track = 0.0, Track()

    def record(self, event):
        if event.kind == "iteration":
            self.now += event.iteration_seconds
            self.track.add(self.now, event.samples, event.compute_seconds)

    def close(self):
        pass

    def until(self, seconds):
        count = sum(ended <= seconds for ended in self.track.ended)
        return Track(
            ended=self.track.ended[:count], samples=self.track.samples[:count], compute=self.track.compute[:count]
        )
