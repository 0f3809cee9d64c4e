import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import evenstep.core.load.predict as predict
from evenstep.core.errors import ConfigError
from evenstep.core.load.predict import PREDICTORS, Change, Ema
from evenstep.core.load.predict.base import Noise, seconds_per_sample
from evenstep.core.load.predict.change import Verdict
from evenstep.core.values import Factors, Sample
from evenstep.testing.conformance import check_predictor

UNDER_TEST = {**PREDICTORS, "ema of weight 1": lambda: Ema(alpha=1.0), "change of an ema": lambda: Change(Ema())}
POSITIVE = st.floats(min_value=0.0, max_value=1e308, exclude_min=True)


def fed(predictor, seconds):
    for value in seconds:
        predictor.observe(Sample(samples=1, compute_seconds=value))
    return predictor


def rate(predictor):
    return predictor.predict(Factors()).seconds_per_sample


def error(predictor):
    return predictor.predict(Factors()).relative_error


@pytest.mark.parametrize("name", UNDER_TEST)
def test_conforms(name):
    check_predictor(UNDER_TEST[name])


def test_every_public_predictor_stands_in_the_table():
    made = {type(factory()).__name__ for factory in PREDICTORS.values()}
    classes = {name for name in predict.__all__ if isinstance(getattr(predict, name), type)}
    assert classes == made


@pytest.mark.parametrize("name", UNDER_TEST)
@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=20))
def test_finite_and_positive_after_anything_finite_and_positive(name, measured):
    predictor = UNDER_TEST[name]()
    for seconds, samples in measured:
        predictor.observe(Sample(samples=samples, compute_seconds=seconds))
    prediction = predictor.predict(Factors())
    assert 0.0 < prediction.seconds_per_sample < math.inf
    assert 0.0 <= prediction.relative_error < math.inf


@given(st.lists(POSITIVE, min_size=1, max_size=20))
def test_an_average_of_weight_one_is_the_last_value(seconds):
    noise = Noise()
    for value in seconds:
        sample = Sample(samples=1, compute_seconds=value)
        noise.observe(sample, seconds_per_sample(sample))
    last = seconds_per_sample(Sample(samples=1, compute_seconds=seconds[-1]))
    assert fed(Ema(alpha=1.0), seconds).predict(Factors()) == (last, noise.level)


def test_an_average_starts_as_a_plain_mean():
    assert rate(fed(Ema(alpha=0.25), [1.0, 2.0, 6.0])) == pytest.approx(3.0)
    assert rate(fed(Ema(alpha=0.25), [1.0, 1.0, 1.0, 1.0, 5.0])) == pytest.approx(2.0)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.5, math.nan])
def test_an_average_refuses_a_weight_that_is_none(alpha):
    with pytest.raises(ConfigError, match="alpha"):
        Ema(alpha=alpha)


@pytest.mark.parametrize("level", [0.03, 0.1, 0.3])
def test_the_reported_error_is_the_real_one(noise, level):
    rates, errors = [], []
    for seed in range(200):
        predictor = fed(Ema(alpha=0.05), noise(level, seed, [60]))
        rates.append(rate(predictor))
        errors.append(error(predictor))
    assert np.mean(errors) == pytest.approx(np.std(rates), rel=0.25)


def test_the_error_starts_wide_and_shrinks_quickly():
    errors = [error(fed(Ema(alpha=0.05), [1.0] * count)) for count in (1, 2, 3, 5, 10)]
    assert errors[0] >= 0.3
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.03


def test_other_sizes_do_not_count_as_noise():
    predictor = Ema()
    for size in (64, 64, 64, 32, 32, 32, 128, 128, 128):
        predictor.observe(Sample(samples=size, compute_seconds=10.0 + size))
    assert predictor.noise < 0.07


def settled():
    return fed(PREDICTORS["change"](), [1.0, 1.01, 0.99] * 10)


def test_a_single_outlier_moves_nothing():
    predictor = settled()
    before = rate(predictor)
    assert rate(fed(predictor, [10.0])) == before
    assert rate(fed(predictor, [1.0])) == pytest.approx(1.0, rel=0.01)


def test_outliers_on_both_sides_move_nothing():
    predictor = settled()
    before = rate(predictor)
    assert rate(fed(predictor, [10.0, 0.1])) == before


@pytest.mark.parametrize("factor", [3.0, 1.3, 1.0 / 3.0])
def test_two_in_a_row_start_the_average_afresh(factor):
    assert rate(fed(settled(), [factor, factor * 1.01])) == pytest.approx(factor * 1.005)


def test_of_a_change_in_mid_iteration_only_the_later_counts():
    assert rate(fed(settled(), [2.0, 3.0])) == 3.0


def test_the_verdicts():
    predictor = settled()
    verdicts = [predictor.judge(Sample(samples=1, compute_seconds=s)) for s in (1.0, 3.0, 1.0, 3.0, 3.0, 5.0, 9.0)]
    assert verdicts == [
        Verdict.USUAL,
        Verdict.DOUBTFUL,
        Verdict.USUAL,
        Verdict.DOUBTFUL,
        Verdict.CHANGED,
        Verdict.DOUBTFUL,
        Verdict.CHANGED_SINCE,
    ]


def test_the_noise_survives_a_change():
    predictor = settled()
    assert fed(predictor, [3.0, 3.0]).noise < 0.05


def test_a_worker_that_becomes_noisier_is_not_all_outliers_for_ever(noise):
    predictor = fed(settled(), noise(0.3, 1, [60]))
    verdicts = [predictor.judge(Sample(samples=1, compute_seconds=s)) for s in noise(0.3, 2, [200])]
    assert sum(verdict is Verdict.USUAL for verdict in verdicts) > 190


def test_two_alternating_speeds_are_averaged_in_the_end():
    assert rate(fed(settled(), [1.0, 2.0] * 100)) == pytest.approx(1.5, rel=0.1)
