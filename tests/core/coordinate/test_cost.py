from itertools import count

import numpy as np
import pytest
from support.lines import Lines

from evenstep.core.coordinate import Answer, Arrival, Coordinator
from evenstep.core.load import Equal
from evenstep.core.sync import Barrier, Bounded, Dynamic, Unbounded
from evenstep.core.values import UNLIMITED, Problem


def lines_per_event(sync, workers):
    """Of all joining, beginning, pushing twice as far as they run, half of them leaving, and the others breaking."""
    generator = np.random.default_rng(0)
    limits = np.ones(workers, dtype=np.int64)
    problem = Problem(global_batch_size=2 * workers, minimum=limits, maximum=limits * UNLIMITED)
    coordinator = Coordinator(sync=sync, load=Equal(), problem=problem, length=20 * workers)
    in_hand, events, number = {}, count(), count()

    def carry_out(commands):
        next(events)
        in_hand.update({each.worker: (each.claims[0], each.version) for each in commands if isinstance(each, Answer)})

    with Lines() as lines:
        for worker in range(workers):
            coordinator.join(worker)
        for worker in range(workers):
            carry_out(coordinator.begin(worker, 0, 0, 0.0))
        for now in (1.0, 2.0):
            for worker in generator.permutation(sorted(in_hand)).tolist():
                claim, version = in_hand.pop(worker)
                key = (worker, 0, next(number))
                arrival = Arrival(
                    key=key, claim=claim.number, version=version, samples=2, units=2, row=(2, 2, 0, UNLIMITED)
                )
                carry_out(coordinator.push(arrival, now))
        for worker in range(workers // 2):
            carry_out(coordinator.leave(worker, 3.0))
        for worker in range(workers // 2, workers - 1):
            carry_out(coordinator.stop(worker, 4.0))
            carry_out(coordinator.begin(worker, 1, 1, 5.0))
    return lines.executed / next(events)


@pytest.mark.parametrize(
    "sync", [Barrier(), Bounded(bound=0), Dynamic(lower=0, upper=2), Unbounded()], ids=lambda sync: type(sync).__name__
)
def test_an_event_among_five_hundred_workers_costs_what_one_among_ten_costs(sync):
    assert lines_per_event(sync, 500) <= 1.5 * lines_per_event(sync, 10)
