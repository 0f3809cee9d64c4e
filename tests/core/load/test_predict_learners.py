"""What each predictor is for: traces on which it must beat the average, and traces on which it must not lose to it."""

import json

import numpy as np
import pytest

from evenstep.core.errors import ConfigError
from evenstep.core.load import Estimator
from evenstep.core.load.predict import PREDICTORS, Ema, Mean, Narx
from evenstep.core.values import Factors, Sample

LENGTH = 500
SKIPPED = 100


def misses(name, seconds, cpu=None, memory=None):
    """Predicted less measured speed of every iteration but the first, each predicted from those before it."""
    ones = np.ones(len(seconds))
    cpu, memory = ones if cpu is None else cpu, ones if memory is None else memory
    predictor, missed = PREDICTORS[name](), []
    for value, share, room in zip(seconds, cpu, memory, strict=True):
        factors = Factors(cpu_availability=float(share), memory_availability=float(room))
        prediction = predictor.predict(factors)
        if prediction is not None:
            missed.append(1.0 / prediction.seconds_per_sample - 1.0 / value)
        predictor.observe(Sample(samples=16, compute_seconds=16 * float(value), factors=factors))
    return np.array(missed)


def ratio(one, other, skipped=SKIPPED):
    """Of the root mean squares."""
    return float(np.sqrt(np.mean(one[skipped:] ** 2) / np.mean(other[skipped:] ** 2)))


def against_the_average(name, *trace, skipped=SKIPPED):
    return ratio(misses(name, *trace), misses("ema", *trace), skipped)


def wandering(seed, memory=0.9):
    """An AR(1) series of mean 0 and variance 1."""
    shocks = np.random.default_rng([seed, 1]).normal(size=LENGTH)
    series = np.zeros(LENGTH)
    for k in range(1, LENGTH):
        series[k] = memory * series[k - 1] + np.sqrt(1.0 - memory**2) * shocks[k]
    return series


def availability(seed):
    return np.clip(0.6 + 0.25 * wandering(seed), 0.1, 1.0)


def episodes(seed, least, most):
    """Seconds per sample: 1, and in every other stretch between 1.5 and 4."""
    generator = np.random.default_rng([seed, 2])
    seconds, slow = [], False
    while len(seconds) < LENGTH:
        seconds += [generator.uniform(1.5, 4.0) if slow else 1.0] * int(generator.integers(least, most + 1))
        slow = not slow
    return np.array(seconds[:LENGTH])


def switching(seed):
    return 1.0 / episodes(seed, 5, 40)


def test_the_mean_is_that_of_the_window():
    predictor = Mean(window=3)
    for seconds in (9.0, 1.0, 2.0, 6.0):
        predictor.observe(Sample(samples=2, compute_seconds=2 * seconds))
    prediction = predictor.predict(Factors())
    assert prediction.seconds_per_sample == pytest.approx(3.0)
    assert prediction.relative_error == pytest.approx(noise_of(9.0, 1.0, 2.0, 6.0) / np.sqrt(3.0))


def noise_of(*seconds):
    average = Ema()
    for value in seconds:
        average.observe(Sample(samples=2, compute_seconds=2 * value))
    return average.noise


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="use"):
        Mean(0)


@pytest.mark.parametrize("level", [0.03, 0.1])
def test_the_reported_error_of_a_steady_speed_is_the_real_one(noise, level):
    rates, errors = [], []
    for seed in range(100):
        predictor = Mean()
        for seconds in noise(level, seed, [60]):
            predictor.observe(Sample(samples=1, compute_seconds=float(seconds)))
        prediction = predictor.predict(Factors())
        rates.append(prediction.seconds_per_sample)
        errors.append(prediction.relative_error)
    assert np.mean(errors) == pytest.approx(np.std(rates), rel=0.4)


LEADING = {
    "in proportion": (lambda cpu: cpu, availability),
    "in proportion, switching": (lambda cpu: cpu, switching),
    "saturating": (lambda cpu: np.minimum(1.0, 1.6 * cpu**1.5), availability),
    "one iteration later in part": (lambda cpu: 0.6 * cpu + 0.4 * np.r_[cpu[0], cpu[:-1]], availability),
}


@pytest.mark.parametrize("name", LEADING)
@pytest.mark.parametrize("seed", [0, 1])
def test_narx_uses_a_processor_that_leads(noise, name, seed):
    speed, factor = LEADING[name]
    cpu = factor(seed)
    assert against_the_average("narx", noise(0.05, seed, [LENGTH]) / speed(cpu), cpu) < 0.6


@pytest.mark.parametrize("seed", [0, 1])
def test_narx_uses_memory_that_leads(noise, seed):
    memory = np.clip(0.35 + 0.2 * wandering(seed), 0.02, 1.0)
    speed = 0.2 + 0.8 / (1.0 + np.exp(-(memory - 0.25) / 0.04))
    assert against_the_average("narx", noise(0.05, seed, [LENGTH]) / speed, None, memory) < 0.7


def test_narx_bends_as_a_line_cannot(noise):
    """A speed that is best in the middle: no linear path leads there."""
    cpu = np.random.default_rng(5).uniform(0.05, 1.0, LENGTH)
    logs = np.log(0.02 + cpu)
    seconds = np.exp(0.5 * (logs - logs.mean()) ** 2) * noise(0.03, 5, [LENGTH])
    assert against_the_average("narx", seconds, cpu, skipped=200) < 0.5


NOT_LEADING = {
    "constant": lambda seed, noise: (noise(0.02, seed, [LENGTH]),),
    "jitter of 10 %": lambda seed, noise: (noise(0.1, seed, [LENGTH]),),
    "jitter of 30 %": lambda seed, noise: (noise(0.3, seed, [LENGTH]),),
    "episodes": lambda seed, noise: (episodes(seed, 10, 200) * noise(0.1, seed, [LENGTH]),),
    "episodes, jitter of 30 %": lambda seed, noise: (episodes(seed, 10, 200) * noise(0.3, seed, [LENGTH]),),
    "random walk": lambda seed, noise: (np.exp(np.cumsum(noise(0.03, seed, [LENGTH]) - 1.0)),),
    "factors of their own": lambda seed, noise: (noise(0.1, seed, [LENGTH]), availability(seed), switching(seed)),
    "factors of noise": lambda seed, noise: (
        noise(0.1, seed, [LENGTH]),
        np.random.default_rng([seed, 3]).uniform(size=LENGTH),
        np.random.default_rng([seed, 4]).uniform(size=LENGTH),
    ),
}


@pytest.mark.parametrize("name", NOT_LEADING)
@pytest.mark.parametrize("seed", [0, 1])
def test_narx_is_no_worse_than_the_average(noise, name, seed):
    trace = NOT_LEADING[name](seed, noise)
    network, average = misses("narx", *trace), misses("ema", *trace)
    assert ratio(network, average, skipped=0) <= 1.02
    assert ratio(network, average) <= 1.02


def fed(predictor, seconds, cpu):
    for value, share in zip(seconds, cpu, strict=True):
        predictor.observe(
            Sample(samples=16, compute_seconds=16 * float(value), factors=Factors(cpu_availability=float(share)))
        )
    return predictor


def test_narx_returns_to_the_average_when_the_factor_no_longer_leads(noise):
    cpu = availability(7)
    seconds = noise(0.05, 7, [LENGTH]) / cpu
    predictor = fed(Narx(), seconds, cpu)
    assert predictor.trusted
    average = fed(Ema(), seconds, cpu)
    factors = Factors(cpu_availability=0.15)
    slow = predictor.predict(factors)
    assert slow.seconds_per_sample == pytest.approx(1 / 0.15, rel=0.25)
    assert slow.seconds_per_sample != average.predict(factors).seconds_per_sample
    misled = noise(0.05, 8, [60])
    fed(predictor, misled, cpu[:60])
    fed(average, misled, cpu[:60])
    trusted = []
    for value, share in zip(noise(0.05, 9, [200]), availability(9)[:200], strict=True):
        fed(predictor, [value], [share])
        fed(average, [value], [share])
        trusted.append(predictor.trusted)
        if not predictor.trusted:
            assert predictor.predict(factors) == average.predict(factors)
    assert not all(trusted)


def test_narx_keeps_what_it_learned_over_a_restart(noise):
    cpu = availability(7)
    predictor = fed(Narx(), noise(0.03, 7, [LENGTH]) / cpu, cpu)
    predictor.restart()
    fed(predictor, 10.0 * noise(0.03, 8, [10]) / cpu[:10], cpu[:10])
    assert predictor.trusted
    for share in (min(cpu[:10]), max(cpu[:10])):
        prediction = predictor.predict(Factors(cpu_availability=float(share)))
        assert prediction.seconds_per_sample == pytest.approx(10.0 / share, rel=0.2)


def test_narx_says_by_how_much_its_level_may_be_wrong(noise):
    cpu = availability(7)
    true, errors = [], []
    predictor = Narx()
    for value, share in zip(noise(0.1, 7, [LENGTH]) / cpu, cpu, strict=True):
        prediction = predictor.predict(Factors(cpu_availability=float(share)))
        if predictor.trusted:
            true.append(np.log(prediction.seconds_per_sample * share))
            errors.append(prediction.relative_error)
        fed(predictor, [value], [share])
    assert 0.5 < np.mean(errors) / np.std(true) < 2.0


def test_narx_resumes_bit_for_bit_behind_an_estimator(noise):
    def iterate(estimator, k):
        factors = Factors(cpu_availability=float(cpu[k]))
        estimator.observe(32, 32e-3 * float(jitter[k] / cpu[k]), factors)
        return estimator.estimate(factors)

    cpu, jitter = availability(4), noise(0.05, 4, [LENGTH])
    one = Estimator(Narx)
    for k in range(200):
        iterate(one, k)
    other = Estimator(Narx)
    other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
    for k in range(200, 260):
        assert iterate(one, k) == iterate(other, k)
    assert one.state_dict() == other.state_dict()
