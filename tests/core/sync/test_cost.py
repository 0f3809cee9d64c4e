from itertools import count

import numpy as np
import pytest
from support.lines import Lines

from evenstep.core.sync import Barrier, Bounded, Dynamic, Push, Release, Unbounded


def lines_per_push(part, workers):
    """Of one push by each worker and a second by half of those that run then, and of half of the workers leaving."""
    generator = np.random.default_rng(0)
    policy = part.policy(workers)
    running = {worker for worker in range(workers) if policy.on_join(worker, 0.0)}
    number = count()
    pushes = 0
    with Lines() as lines:
        for now, pushing in ((1.0, workers), (2.0, workers // 2)):
            for worker in generator.permutation(sorted(running))[:pushing].tolist():
                push = Push(worker=worker, iteration=next(number), samples=1, units=1, share=1 / workers, version=0)
                running.remove(worker)
                commands = policy.on_push(push, now)
                running |= {command.worker for command in commands if isinstance(command, Release)}
                pushes += 1
        for worker in range(workers // 2):
            policy.on_leave(worker, 3.0)
    return lines.executed / pushes


@pytest.mark.parametrize(
    "part",
    [Barrier(), Bounded(bound=0), Dynamic(lower=0, upper=2), Dynamic(lower=0, upper=2, bounded=False), Unbounded()],
    ids=["barrier", "bounded", "dynamic", "dynamic without a bound", "unbounded"],
)
def test_a_push_among_two_thousand_workers_costs_what_one_among_ten_costs(part):
    assert lines_per_push(part, 2_000) <= 1.5 * lines_per_push(part, 10)
