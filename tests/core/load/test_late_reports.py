"""Reports that are one iteration late, as from a device whose times are read when the next iteration is under way."""

import numpy as np

from evenstep.core.load import Predicted
from evenstep.core.values import UNLIMITED, Problem, Reports

SLOW = np.array([4.0, 4.0, 2.0, 1.0]) * 1e-3


def run_late(iterations, seconds, batch=256, workers=4):
    """Each row carries sizes and times of the iteration before, and the estimate that rests on them; the first none."""
    load = Predicted()
    policy, estimators = load.policy(workers), [load.estimator() for _ in range(workers)]
    problem = Problem(
        global_batch_size=batch,
        minimum=np.ones(workers, dtype=np.int64),
        maximum=np.full(workers, UNLIMITED, dtype=np.int64),
    )
    previous = [(0, 0.0)] * workers
    all_sizes, all_rates = [], []
    for k in range(iterations):
        sizes = policy.allocate(problem).sizes
        table = []
        for estimator, (samples, measured) in zip(estimators, previous, strict=True):
            estimator.observe(samples, measured)
            e = estimator.estimate()
            estimated = (e.nanoseconds_per_sample, e.fixed_nanoseconds, e.error_ppm, e.flat_size)
            table.append([samples, round(measured * 1e6), *estimated, UNLIMITED])
        policy.observe(Reports.from_table(np.array(table, dtype=np.int64)))
        previous = [(int(size), seconds(i, k, int(size))) for i, size in enumerate(sizes)]
        all_sizes.append(sizes)
        all_rates.append([row[2] for row in table])
    return np.array(all_sizes), np.array(all_rates)


def test_new_sizes_are_never_paired_with_old_times():
    sizes, rates = run_late(40, lambda worker, k, size: SLOW[worker] * size)
    known = rates.all(axis=1)
    assert known[3:].all()
    assert (rates[known] == np.round(SLOW * 1e9)).all()
    assert sizes[-1].tolist() == [32, 32, 64, 128]
    assert (np.diff(sizes, axis=0) != 0).any(axis=1).sum() == 1


def test_the_warm_up_counts_measured_iterations_only():
    def seconds(worker, k, size):
        return SLOW[worker] * size * (100.0 if k < 2 else 1.0)

    _, rates = run_late(10, seconds)
    assert not rates[:3].any()
    assert (rates[3] == np.round(SLOW * 1e9)).all()


def test_a_change_of_speed_is_followed_one_iteration_later_than_on_time():
    sizes, _ = run_late(60, lambda worker, k, size: 1e-3 * size * (3.0 if worker == 1 and k >= 30 else 1.0))
    assert (sizes[:33] == 64).all()
    assert np.abs(sizes[33:] - [76.8, 25.6, 76.8, 76.8]).max() <= 1.0


def test_flat_starts_do_not_suffer():
    def seconds(worker, k, size):
        return 1e-3 * max(size, 48) * (3.0 if worker == 0 and 40 <= k < 80 else 1.0)

    sizes, _ = run_late(160, seconds)
    makespan = np.maximum(sizes, 48).max(axis=1)
    assert (makespan[-20:] <= 1.02 * 64).all()
