"""Reports that are one iteration late, as from a device whose times are read when the next iteration is under way."""

import numpy as np

from evenstep.core.load import Experts
from evenstep.core.values import UNLIMITED, Problem

SLOW = np.array([4.0, 4.0, 2.0, 1.0]) * 1e-3


def run_late(reports_of, iterations, seconds, batch=256, workers=4):
    """Each row carries sizes and times of the iteration before; the first none."""
    policy = Experts().policy(workers)
    ones = np.ones(workers, dtype=np.int64)
    problem = Problem(global_batch_size=batch, minimum=ones, maximum=ones * UNLIMITED)
    late, all_sizes = reports_of([0] * workers, [0.0] * workers), []
    for k in range(iterations):
        sizes = policy.allocate(problem).sizes
        policy.observe(late)
        late = reports_of(sizes.tolist(), [seconds(i, k, int(size)) for i, size in enumerate(sizes)])
        all_sizes.append(sizes)
    return np.array(all_sizes)


def test_new_sizes_are_never_paired_with_old_times(reports_of):
    sizes = run_late(reports_of, 40, lambda worker, k, size: SLOW[worker] * size)
    assert (sizes[:3] == 64).all()
    assert (np.abs(sizes[3:] - [32, 32, 64, 128]) <= 1).all()


def test_the_warm_up_counts_measured_iterations_only(reports_of):
    sizes = run_late(reports_of, 10, lambda worker, k, size: (SLOW[worker] if k else SLOW[3 - worker]) * size)
    assert (sizes[:3] == 64).all()
    assert (np.abs(sizes[3] - [32, 32, 64, 128]) <= 1).all()


def test_a_change_of_speed_is_followed_one_iteration_later_than_on_time(reports_of):
    sizes = run_late(reports_of, 60, lambda i, k, size: 1e-3 * size * (3.0 if i == 1 and k >= 30 else 1.0))
    assert (sizes[3:32] == 64).all()
    assert np.abs(sizes[34:] - [76.8, 25.6, 76.8, 76.8]).max() <= 5.0


def test_the_cost_of_a_change_is_measured_all_the_same(reports_of):
    compiled = [set() for _ in SLOW]

    def seconds(worker, k, size):
        new = size not in compiled[worker]
        compiled[worker].add(size)
        return 0.01 * SLOW[worker] * size + 0.5 * new

    sizes = run_late(reports_of, 100, seconds)
    assert (np.diff(sizes, axis=0) != 0).any(axis=1).sum() <= 3
    assert np.abs(sizes[-1] - [32, 32, 64, 128]).max() <= 8
