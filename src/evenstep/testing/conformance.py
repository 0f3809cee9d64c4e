"""The promises of each interface as a function: pass it a factory, and it raises AssertionError where one is broken."""

import json
import math
from collections.abc import Callable
from itertools import product
from typing import Final, cast

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import LoadPolicy, Predictor
from evenstep.core.values import UNLIMITED, Factors, IntArray, Problem, Reports, Sample, State

_ITERATIONS: Final = 60
_WITHIN: Final = 0.01


def check_predictor(factory: Callable[[], Predictor]) -> None:
    """Check what every predictor promises, over predictors made by `factory`.

    It predicts nothing before it has observed; a constant speed is predicted within one per cent; every finite
    measurement leaves a finite, positive prediction; a checkpoint goes through JSON and goes on bit for bit; a restart
    forgets the old speed.
    """
    assert factory().predict(Factors()) is None, "a predictor that has observed nothing must predict None"
    _check_constant_speed(factory)
    _check_extremes(factory)
    _check_predictor_state(factory)


def check_load_policy(factory: Callable[[int], LoadPolicy], *, workers: int = 4, global_batch_size: int = 128) -> None:
    """Check what every load policy promises, over policies made by `factory(workers)`.

    Sizes satisfy the problem, or a ConfigError says why they cannot; the same reports lead to the same sizes; a caller
    that writes into what it got or gave changes nothing; a checkpoint goes through JSON and goes on bit for bit.

    Args:
        factory: makes a new policy for a number of workers.
        workers: how many workers; at least 2.
        global_batch_size: a batch that the policy accepts for them, a multiple of 8 and of at least 16 per worker.
    """
    one, other = factory(workers), factory(workers)
    resumed = factory(workers)
    generator = np.random.default_rng(0)
    for iteration in range(_ITERATIONS):
        for problem in _problems(workers, global_batch_size):
            sizes = _check_sizes(one, problem, must_succeed=problem.global_batch_size == global_batch_size)
            again = _check_sizes(other, problem, must_succeed=False)
            assert _same(sizes, again), f"the same reports led to the sizes {sizes} and {again}"
            resumed.load_state_dict(_through_json(one.state_dict()))
            after = _check_sizes(resumed, problem, must_succeed=False)
            assert _same(sizes, after), f"sizes {sizes} became {after} after a checkpoint"
            if sizes is not None:
                sizes[:] = -1
        reports = _reports(generator, workers, known=iteration >= 3)
        one.observe(reports)
        other.observe(reports)
    assert _through_json(one.state_dict()) == _through_json(other.state_dict())


def _check_constant_speed(factory: Callable[[], Predictor]) -> None:
    for rate in (1e-6, 0.0123, 4.5):
        predictor = factory()
        for count in (*range(1, _ITERATIONS), 1000):
            predictor.observe(Sample(samples=count, compute_seconds=rate * count))
        _check_near(predictor, rate)
        predictor.restart()
        for count in range(1, _ITERATIONS):
            predictor.observe(Sample(samples=count, compute_seconds=7.0 * rate * count))
        _check_near(predictor, 7.0 * rate)


def _check_near(predictor: Predictor, rate: float) -> None:
    prediction = predictor.predict(Factors())
    assert prediction is not None, "a predictor that has observed must predict"
    assert abs(prediction.seconds_per_sample / rate - 1.0) < _WITHIN, f"a constant {rate} s became {prediction}"


def _check_extremes(factory: Callable[[], Predictor]) -> None:
    extremes = list(product((5e-324, 1e-9, 1.0, 1e308), (5e-324, 1e-9, 1.0, 1e308)))
    predictor = factory()
    for seconds, samples in [*extremes, *reversed(extremes)]:
        sample = Sample(samples=samples, compute_seconds=seconds, factors=Factors(cpu_availability=0.0))
        for candidate in (predictor, fresh := factory()):
            candidate.observe(sample)
        for candidate in (predictor, fresh):
            prediction = candidate.predict(Factors(memory_availability=0.0))
            assert prediction is not None, "a predictor that has observed must predict"
            assert 0.0 < prediction.seconds_per_sample < math.inf, f"{sample} led to {prediction}"
            assert 0.0 <= prediction.relative_error < math.inf, f"{sample} led to {prediction}"


def _check_predictor_state(factory: Callable[[], Predictor]) -> None:
    generator = np.random.default_rng(0)
    rates = np.exp(generator.normal(0.0, 0.1, _ITERATIONS)) * np.where(np.arange(_ITERATIONS) < _ITERATIONS // 2, 1, 3)
    rates[10] *= 10.0
    one, other = factory(), factory()
    for rate in rates:
        resumed = factory()
        resumed.load_state_dict(_through_json(one.state_dict()))
        factors = Factors(cpu_availability=float(generator.uniform()))
        size = int(generator.integers(1, 100))
        sample = Sample(samples=size, compute_seconds=float(rate) * size, factors=factors)
        predictions = []
        for predictor in (one, other, resumed):
            predictor.observe(sample)
            predictions.append(predictor.predict(factors))
        assert predictions[0] == predictions[1], "the same measurements led to different predictions"
        assert predictions[0] == predictions[2], "a predictor went on differently after a checkpoint"
        assert _through_json(one.state_dict()) == _through_json(resumed.state_dict())


def _problems(workers: int, batch: int) -> list[Problem]:
    """The usual problem, an epoch's last slice, multiples, and limits that bind."""
    ones = np.ones(workers, dtype=np.int64)
    share = batch // workers
    return [
        Problem(global_batch_size=batch, minimum=ones, maximum=ones * UNLIMITED),
        Problem(global_batch_size=workers + 3, minimum=ones, maximum=ones * UNLIMITED),
        Problem(global_batch_size=batch, minimum=ones, maximum=ones * batch, multiple=1),
        Problem(global_batch_size=batch - 8, minimum=0 * ones, maximum=ones * UNLIMITED, multiple=4),
        Problem(global_batch_size=batch - 1, minimum=ones * (share // 2), maximum=ones * (share + 2)),
    ]


def _check_sizes(policy: LoadPolicy, problem: Problem, *, must_succeed: bool) -> IntArray | None:
    try:
        sizes = policy.allocate(problem).sizes
    except ConfigError:
        assert not must_succeed, f"the policy refused {problem}"
        return None
    assert sizes.dtype == np.int64, f"sizes must be int64, not {sizes.dtype}"
    assert sizes.shape == problem.minimum.shape, f"{problem.workers} workers got sizes of shape {sizes.shape}"
    assert int(sizes.sum()) == problem.global_batch_size, f"{sizes} do not sum to {problem.global_batch_size}"
    assert (sizes >= problem.minimum).all(), f"{sizes} break a minimum of {problem}"
    assert (sizes <= problem.maximum).all(), f"{sizes} break a maximum of {problem}"
    assert not (sizes % problem.multiple).any(), f"{sizes} are not multiples of {problem.multiple}"
    return sizes


def _reports(generator: np.random.Generator, workers: int, *, known: bool) -> Reports:
    rates = generator.integers(10**4, 10**8, workers) * known
    return Reports(
        samples=generator.integers(1, 100, workers),
        compute_microseconds=generator.integers(1, 10**6, workers),
        nanoseconds_per_sample=rates,
        fixed_nanoseconds=rates * generator.integers(0, 20, workers) * generator.integers(0, 2),
        error_ppm=generator.integers(0, 10**5, workers),
        flat_size=generator.integers(0, 5, workers) * generator.integers(0, 2),
        largest_size=np.full(workers, UNLIMITED, dtype=np.int64),
    )


def _same(one: IntArray | None, other: IntArray | None) -> bool:
    return one is other if one is None or other is None else bool(np.array_equal(one, other))


def _through_json(state: State) -> State:
    return cast("State", json.loads(json.dumps(state, allow_nan=False)))
