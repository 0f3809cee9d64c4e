"""Behind a barrier: who was late at it, and how long each of the others really waited.

What a worker writes down as waiting is how much longer the slowest one *computed*, since that is all that workers tell
each other. A worker that waits for its data, or whose script does something of its own, is late just the same, and
the others would count that as communication. With everybody's events side by side it can be told apart.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from evenstep.report.iterations import FloatArray, Iterations


def own_parts(done: Iterations) -> FloatArray:
    """From the end of the synchronisation before to the beginning of this one; seconds, shape [parts, iterations].

    The parts are those of `evenstep.core.account.OWN`.

    All leave a synchronisation together, so the one with the most of these is the one that the others wait for.
    """
    before = np.concatenate([[0.0], done.rest_seconds[:-1]])
    return np.array([done.compute_seconds, done.input_seconds, before])


def true_waits(iterations: Mapping[int, Iterations]) -> dict[int, Iterations]:
    """The same iterations, with all the time that a worker waited for the latest one as its waiting.

    The waiting and the communication of an iteration keep their sum. Iterations that not all have finished stay as
    they are; those before the first that all have told of are left out.
    """
    start = max(float(done.numbers[0]) for done in iterations.values())
    iterations = {worker: done[int(np.searchsorted(done.numbers, start)) :] for worker, done in iterations.items()}
    length = min(len(done) for done in iterations.values())
    own = {worker: own_parts(done[:length]).sum(axis=0) for worker, done in iterations.items()}
    latest = np.max(list(own.values()), axis=0)
    return {worker: _waiting(done, latest - own[worker]) for worker, done in iterations.items()}


def _waiting(done: Iterations, late: FloatArray) -> Iterations:
    wait = done.wait_seconds.copy()
    synchronised = done.wait_seconds + done.comm_seconds
    wait[: len(late)] = np.minimum(late, synchronised[: len(late)])
    return replace(done, wait_seconds=wait, comm_seconds=synchronised - wait)
