import numpy as np
import pytest

from evenstep.core.load.evidence import Evidence
from evenstep.core.load.solver import Lines

EQUAL, UNEVEN = np.array([50, 50]), np.array([60, 40])
TIMES = Lines(per_sample=np.array([1000, 1500]), fixed=np.array([0, 0]), flat=np.array([0, 0]))


def block(microseconds, samples=EQUAL):
    return np.array([samples, np.asarray(microseconds, dtype=np.int64)])


def told(*stretches, noise=0.0, seed=0):
    """Stretches of (how many, microseconds of worker 0, of worker 1), both with 50 samples."""
    evidence, generator = Evidence(), np.random.default_rng(seed)
    for many, *micros in stretches:
        for _ in range(many):
            evidence.observe(block(np.round(np.array(micros) * np.exp(generator.normal(0.0, noise, 2)))))
    return evidence


def test_too_few_iterations_contradict_nothing():
    assert Evidence().proves(TIMES, EQUAL, UNEVEN)
    assert told((4, 5000, 5000)).proves(TIMES, EQUAL, UNEVEN)
    assert not told((4, 5000, 5000)).allows(TIMES, EQUAL, UNEVEN)


def test_a_gain_that_the_iterations_show_is_proven_and_another_is_not():
    assert told((20, 50_000, 75_000)).proves(TIMES, EQUAL, UNEVEN)
    assert not told((20, 50_000, 50_000)).proves(TIMES, EQUAL, UNEVEN)


@pytest.mark.parametrize(("slower", "at_most"), [(2.0, 3), (1.5, 8), (1.2, 50)])
def test_the_larger_the_change_the_fewer_iterations_prove_it(slower, at_most):
    rate = round(1000 * slower)
    times = Lines(per_sample=np.array([1000, rate]), fixed=np.array([0, 0]), flat=np.array([0, 0]))
    first = round(100 * rate / (1000 + rate))
    proposed = np.array([first, 100 - first])
    evidence = told((60, 50_000, 50_000), noise=0.1)
    assert not evidence.proves(times, EQUAL, proposed)
    generator = np.random.default_rng(1)
    iterations = 0
    while not evidence.proves(times, EQUAL, proposed):
        iterations += 1
        micros = np.round(np.array([50_000, 50_000 * slower]) * np.exp(generator.normal(0.0, 0.1, 2)))
        evidence.observe(block(micros))
    assert iterations <= at_most


def test_simpler_sizes_are_allowed_once_they_are_no_worse_for_a_while():
    same = Lines(per_sample=np.array([1, 1]), fixed=np.array([10**6, 10**6]), flat=np.array([0, 0]))
    for many, allowed in ((10, False), (30, True)):
        evidence = told((many, 1000, 1000), noise=0.02)
        assert evidence.allows(same, UNEVEN, EQUAL) == allowed
    assert not told((30, 50_000, 75_000)).allows(TIMES, UNEVEN, EQUAL)


def test_other_workers_begin_anew():
    evidence = told((3, 5000, 5000))
    evidence.observe(block([5000] * 3, samples=np.array([30, 30, 40])))
    assert len(evidence.window) == 1


def test_extreme_times_stay_within_64_bits():
    evidence = told((20, 1, 10**15), (20, 10**15, 1))
    with np.errstate(over="raise"):
        assert not evidence.proves(TIMES, EQUAL, EQUAL)
        evidence.proves(TIMES, EQUAL, UNEVEN)
        evidence.allows(TIMES, EQUAL, UNEVEN)


def test_a_leap_rests_on_iterations_at_about_the_present_sizes():
    """Under a wrong fixed part, sizes that were in use before seem to prove themselves."""
    seems = Lines(per_sample=np.array([1000, 6000]), fixed=np.array([0, 0]), flat=np.array([0, 0]))
    small, leap, step = np.array([86, 14]), np.array([86, 14]), np.array([66, 34])
    evidence = Evidence()
    for _ in range(20):
        evidence.observe(block([86_000, 84_000], small))
    assert evidence.proves(seems, EQUAL, leap) is False
    assert evidence.proves(seems, EQUAL, step)
    for _ in range(2):
        evidence.observe(block([50_000, 300_000]))
    assert evidence.proves(seems, EQUAL, leap)
