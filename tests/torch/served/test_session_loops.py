"""Shares and several loaders on parameter servers: one process behind a barrier, elsewhere exactly once."""

import numpy as np
import pytest
from support import session_loops
from support.processes import results
from support.served import run_served
from support.training import Run

pytestmark = pytest.mark.multiprocess

RUN = Run(samples=77, epochs=2)
BARRIER = {"scheme": "bsp:engine=server"}


@pytest.mark.parametrize("loop", [session_loops.make_batches, session_loops.train_in_turn_alike])
def test_behind_a_barrier_it_is_the_mathematics_of_one_process(tmp_path, loop):
    expected = session_loops.alone(loop, RUN)
    for value in results(run_served(session_loops.attempt, 3, loop, RUN, BARRIER, run_dir=tmp_path)):
        assert not isinstance(value, str), value
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)


def test_without_a_barrier_each_position_is_one_workers(tmp_path):
    values = results(run_served(session_loops.positions, 3, RUN, {"scheme": "ssp:bound=1"}, run_dir=tmp_path))
    for epoch in range(RUN.epochs):
        assert sorted(position for value in values for position in value[epoch]) == list(range(RUN.samples))


def test_of_shares_that_never_end_no_position_is_computed_twice(tmp_path):
    values = results(run_served(session_loops.some_of_endless, 3, RUN, {"scheme": "ssp"}, 6, run_dir=tmp_path))
    positions = [position for value in values for position in value]
    assert len(positions) == len(set(positions)) > 6 * 3


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (session_loops.train_in_turn, "the servers know those of the first"),
        (session_loops.take_one_of_each, "training on servers goes with one at a time"),
        (session_loops.give_another_later, "all loaders must be known before the first batch"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_what_the_servers_cannot_share_out_is_refused(tmp_path, loop, sentence):
    for said in results(run_served(session_loops.attempt, 2, loop, RUN, BARRIER, run_dir=tmp_path)):
        assert sentence in said
