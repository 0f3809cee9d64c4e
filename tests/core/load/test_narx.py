"""What NARX is for: traces on which it must beat the average, and traces on which it must not lose to it."""

import json

import numpy as np
import pytest

from evenstep.core.load.narx import Narx
from evenstep.core.values import Factors, Sample

LENGTH = 500
SKIPPED = 100


def misses(predictor, seconds, cpu=None, memory=None):
    """Predicted less measured speed of every iteration but the first, each predicted from those before it."""
    ones = np.ones(len(seconds))
    cpu, memory = ones if cpu is None else cpu, ones if memory is None else memory
    missed = []
    for value, share, room in zip(seconds, cpu, memory, strict=True):
        factors = Factors(cpu_availability=float(share), memory_availability=float(room))
        forecast = predictor.forecast(factors)
        if forecast:
            missed.append(1e9 / forecast - 1.0 / value)
        predictor.observe(Sample(samples=16, compute_seconds=16 * float(value)), factors)
    return np.array(missed)


class Average:
    """The exponential average of weight 0.2."""

    def __init__(self):
        self.mean, self.count = 0.0, 0

    def forecast(self, factors):
        return self.mean * 1e9

    def observe(self, sample, factors):
        self.count += 1
        self.mean += max(0.2, 1 / self.count) * (sample.compute_seconds / sample.samples - self.mean)


def ratio(one, other, skipped=SKIPPED):
    """Of the root mean squares."""
    return float(np.sqrt(np.mean(one[skipped:] ** 2) / np.mean(other[skipped:] ** 2)))


def against_the_average(*trace, skipped=SKIPPED):
    return ratio(misses(Narx(), *trace), misses(Average(), *trace), skipped)


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
    assert against_the_average(noise(0.05, seed, [LENGTH]) / speed(cpu), cpu) < 0.6


@pytest.mark.parametrize("seed", [0, 1])
def test_narx_uses_memory_that_leads(noise, seed):
    memory = np.clip(0.35 + 0.2 * wandering(seed), 0.02, 1.0)
    speed = 0.2 + 0.8 / (1.0 + np.exp(-(memory - 0.25) / 0.04))
    assert against_the_average(noise(0.05, seed, [LENGTH]) / speed, None, memory) < 0.7


def test_narx_bends_as_a_line_cannot(noise):
    """A speed that is best in the middle: no linear path leads there."""
    cpu = np.random.default_rng(5).uniform(0.05, 1.0, LENGTH)
    logs = np.log(0.02 + cpu)
    seconds = np.exp(0.5 * (logs - logs.mean()) ** 2) * noise(0.03, 5, [LENGTH])
    assert against_the_average(seconds, cpu, skipped=200) < 0.5


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
    network, average = misses(Narx(), *trace), misses(Average(), *trace)
    assert ratio(network, average, skipped=0) <= 1.02
    assert ratio(network, average) <= 1.02


def fed(predictor, seconds, cpu):
    for value, share in zip(seconds, cpu, strict=True):
        sample = Sample(samples=16, compute_seconds=16 * float(value))
        predictor.observe(sample, Factors(cpu_availability=float(share)))
    return predictor


def test_narx_returns_to_the_average_when_the_factor_no_longer_leads(noise):
    cpu = availability(7)
    predictor = fed(Narx(), noise(0.05, 7, [LENGTH]) / cpu, cpu)
    assert predictor.trusted
    assert 1e-9 * predictor.forecast(Factors(cpu_availability=0.15)) == pytest.approx(1 / 0.15, rel=0.25)
    fed(predictor, noise(0.05, 8, [60]), cpu[:60])
    trusted = []
    for value, share in zip(noise(0.05, 9, [200]), availability(9)[:200], strict=True):
        fed(predictor, [value], [share])
        trusted.append(predictor.trusted)
        if not predictor.trusted:
            assert predictor.forecast(Factors(cpu_availability=0.15)) == predictor.forecast(Factors())
    assert not all(trusted)


def test_nothing_is_forecast_before_the_first_measurement():
    assert Narx().forecast(Factors()) == 0


def test_extremes_stay_within_what_a_report_holds():
    for seconds in (0.0, 1e-12, 1.0, 1e12):
        for samples in (1e-3, 1.0, 1e9):
            predictor = Narx()
            for _ in range(60):
                predictor.observe(Sample(samples=samples, compute_seconds=seconds), Factors(cpu_availability=0.0))
            assert 1 <= predictor.forecast(Factors(memory_availability=0.0)) <= 10**12


def test_narx_resumes_bit_for_bit(noise):
    cpu, seconds = availability(4), noise(0.05, 4, [LENGTH])
    one, other = fed(Narx(), seconds[:200] / cpu[:200], cpu[:200]), Narx()
    other.load_state_dict(json.loads(json.dumps(one.state_dict(), allow_nan=False)))
    for k in range(200, 260):
        forecasts = [fed(each, [seconds[k] / cpu[k]], [cpu[k]]).forecast(Factors()) for each in (one, other)]
        assert forecasts[0] == forecasts[1]
    assert one.state_dict() == other.state_dict()
