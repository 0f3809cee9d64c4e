"""Training in virtual time without communication: what `evenstep simulate` does, iteration by iteration, as arrays."""

import numpy as np

from evenstep.schemes import Scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import Silent


def train(load, cluster, global_batch_size, iterations, epoch_iterations):
    """Sizes and compute seconds, both of shape [iterations, workers], of epochs of so many iterations."""
    scenario = Scenario(
        cluster=cluster,
        scheme=Scheme(name="virtual", load=load),
        global_batch_size=global_batch_size,
        iterations=iterations,
        epoch_samples=global_batch_size * epoch_iterations,
    )
    kept = [_Iterations() for _ in cluster.workers]
    simulate(scenario, log=Log(workers=kept, server=Silent()))
    sizes = np.array([each.sizes for each in kept], dtype=np.int64).T
    return sizes, np.array([each.seconds for each in kept]).T


class _Iterations:
    """One worker's sizes and compute seconds."""

    def __init__(self):
        self.sizes, self.seconds = [], []

    def record(self, event):
        if event.kind == "iteration":
            self.sizes.append(event.samples)
            self.seconds.append(event.compute_seconds)

    def close(self):
        pass
