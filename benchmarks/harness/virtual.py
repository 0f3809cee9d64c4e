"""Training in virtual time: the very policy and estimators of a load, without processes, clocks or communication.

An iteration takes as long as its slowest worker; what deciding and communicating cost is left out.
"""

from dataclasses import asdict, fields

import numpy as np

from evenstep.core.values import UNLIMITED, Problem, Reports


def train(load, cluster, global_batch_size, iterations, epoch_iterations):
    """Sizes and compute seconds, both of shape [iterations, workers], of epochs of so many iterations."""
    workers, disturbance = len(cluster), cluster.disturbance()
    policy, estimators = load.policy(workers), [load.estimator() for _ in range(workers)]
    all_sizes, all_seconds = [], []
    for k in range(iterations):
        problem = Problem(
            global_batch_size=global_batch_size,
            minimum=np.full(workers, load.minimum or 1, dtype=np.int64),
            maximum=np.full(workers, load.maximum or UNLIMITED, dtype=np.int64),
            multiple=load.multiple,
            epoch=k // epoch_iterations,
        )
        sizes = policy.allocate(problem).sizes
        seconds = [
            disturbance.seconds(worker=worker, iteration=k, batch_size=int(size), natural_seconds=0.0, now=0.0)
            for worker, size in enumerate(sizes)
        ]
        policy.observe(_reports(estimators, sizes, seconds))
        all_sizes.append(sizes)
        all_seconds.append(seconds)
    return np.array(all_sizes), np.array(all_seconds)


def _reports(estimators, sizes, seconds):
    """What the workers report; each estimator is fed with what is reported and no more digits, as in the runtime."""
    rows = []
    for estimator, size, taken in zip(estimators, sizes.tolist(), seconds, strict=True):
        microseconds = round(taken * 1e6)
        estimator.observe(size, microseconds / 1e6)
        rows.append(
            {
                "samples": size,
                "compute_microseconds": microseconds,
                "largest_size": UNLIMITED,
                **asdict(estimator.estimate()),
            }
        )
    table = [[row[each.name] for each in fields(Reports)] for row in rows]
    return Reports.from_table(np.array(table, dtype=np.int64))
