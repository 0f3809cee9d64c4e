"""A run on servers in virtual time: the very coordinator and disturbances, and communication that takes no time."""

import heapq

import numpy as np

from evenstep.core.server import Answer, Arrival, Coordinator
from evenstep.core.values import UNLIMITED, Problem
from harness.reports import row
from harness.track import Track


def replay(scheme, cluster, global_batch_size, seconds):
    """The workers' tracks until so many seconds have passed in an epoch that does not end."""
    workers, disturbance = len(cluster), cluster.disturbance()
    problem = Problem(
        global_batch_size=global_batch_size,
        minimum=np.ones(workers, dtype=np.int64),
        maximum=np.full(workers, UNLIMITED, dtype=np.int64),
    )
    coordinator = Coordinator(sync=scheme.sync, load=scheme.load, problem=problem, length=10**12)
    tracks, computing, counts = [Track() for _ in range(workers)], [], [0] * workers

    def carry_out(commands, now):
        for command in commands:
            if isinstance(command, Answer) and command.claims:
                begin(command, now)

    def begin(answer, now):
        """An iteration that this worker has pushed is over, and the next one begins."""
        worker, claim = answer.worker, answer.claims[0]
        size = claim.samples
        if worker in pushed:
            tracks[worker].add(now, *pushed.pop(worker))
        taken = disturbance.seconds(
            worker=worker, iteration=counts[worker], batch_size=size, natural_seconds=0.0, now=0.0
        )
        counts[worker] += 1
        heapq.heappush(computing, (now + taken, worker, claim.number, answer.version, size, taken))

    pushed = {}
    for worker in range(workers):
        coordinator.join(worker)
    for worker in range(workers):
        carry_out(coordinator.begin(worker, 0, 0, 0.0), 0.0)
    while computing[0][0] <= seconds:
        now, worker, claim, version, size, taken = heapq.heappop(computing)
        pushed[worker] = (size, taken)
        arrival = Arrival(
            key=(worker, 0, counts[worker]), claim=claim, version=version, samples=size, units=size,
            row=tuple(row(size, taken)),
        )  # fmt: skip
        carry_out(coordinator.push(arrival, now), now)
    return tracks
