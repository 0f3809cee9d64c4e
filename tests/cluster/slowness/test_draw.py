"""Draws that belong to where they are used."""

import pytest

from evenstep.cluster.slowness import Jitter
from evenstep.cluster.slowness.draw import Purpose, uniform, uniforms

BEFORE = [0.9316359262578268, 1.040785002439193, 0.8356611523664493]


@pytest.mark.parametrize("index", [0, 1, 2**40])
def test_one_draw_is_the_first_of_one(index: int) -> None:
    for purpose in Purpose:
        assert [uniform(7, int(purpose), 3, index)] == uniforms(1, seed=7, purpose=purpose, worker=3, index=index)


def test_jitter_is_what_it_has_always_been() -> None:
    factors = [
        Jitter(spread=0.1, seed=3).seconds(worker=2, iteration=k, batch_size=1, natural_seconds=1.0) for k in range(3)
    ]
    assert factors == pytest.approx(BEFORE, rel=1e-12)
