"""Sketches of samples: what decoders and processors change is no difference, and another sample is one."""

import math

import numpy as np
import pytest

from evenstep.core.sketch import Leaf, alike, leaf_of, unlike


def leaf(values, digest=0, shape=None):
    values = np.asarray(values, dtype=float)
    return Leaf(
        kind="f",
        shape=values.shape if shape is None else shape,
        digest=digest,
        mean=float(values.mean()),
        spread=float(values.std()),
        values=tuple(values[:8].tolist()),
    )


IMAGE = np.random.default_rng(0).normal(size=100)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (leaf(IMAGE), True),
        (leaf(IMAGE * (1 + 1e-5)), True),
        (leaf(IMAGE + np.random.default_rng(1).normal(scale=0.01, size=100)), True),
        (leaf(np.random.default_rng(2).normal(size=100)), False),
        (leaf(IMAGE[::-1]), False),
        (leaf(IMAGE, digest=1), False),
        (leaf(IMAGE, shape=(10, 10)), False),
    ],
)
def test_near_values_are_alike(other, same):
    assert alike((leaf(IMAGE),), (other,)) is same


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_missing_and_infinite_values_are_alike_where_both_have_them(value):
    def missing(first):
        return (Leaf(kind="f", shape=(2,), mean=value, spread=math.nan, values=(first, 1.0)),)

    assert alike(missing(value), missing(value))
    assert not alike(missing(value), missing(0.0))


def test_the_first_worker_that_differs_is_found_and_one_without_a_sketch_is_like_all():
    one, other = (leaf(IMAGE),), (leaf(IMAGE + 1),)
    assert unlike([one, one, one]) is None
    assert unlike([one, one, other, other]) == 2
    assert unlike([(), one, other]) == 2
    assert unlike([(), one, ()]) is None
    assert unlike([one, one + one]) == 1


@pytest.mark.parametrize("kind", ["float32", "complex64", "uint8", "int64", "bool"])
def test_the_leaf_of_an_array_says_which_values_it_has(kind):
    values = (np.random.default_rng(0).normal(size=(300, 200)) * 50).clip(0).astype(kind)
    assert alike((leaf_of(values, values.shape),), (leaf_of(values.copy(), values.shape),))
    assert not alike((leaf_of(values, values.shape),), (leaf_of(values.T.copy(), values.shape),))
    assert not alike((leaf_of(values, values.shape),), (leaf_of(values, values.T.shape),))


def test_a_number_has_a_leaf_and_a_text_has_none():
    assert leaf_of(np.asarray(2.5), ()).mean == 2.5
    assert leaf_of(np.asarray("a text"), ()) is None
