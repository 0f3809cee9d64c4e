"""Where a script steps within the micro-batches of an iteration."""

import numpy as np
import pytest

from evenstep import ConfigError
from evenstep.core.samples import Share, Window, micro_batches
from evenstep.schemes import in_batches, lb_bsp, static


def windows(*counts):
    for count in counts:
        share = Share(iteration=0, positions=tuple(range(2 * count)), samples=2 * count, sizes=np.array([2 * count]))
        yield from micro_batches(share, 2)


def steps(window, requested, *counts):
    taken = []
    for number, piece in enumerate(windows(*counts)):
        window.begins(piece)
        if requested(number, piece):
            taken.append(window.steps(piece))
    return taken


def test_a_script_that_steps_in_every_pass_steps_at_the_last():
    assert steps(Window(), lambda *_: True, 3, 1, 2) == [False, False, True, True, False, True]


def test_a_script_that_asks_steps_there_alone():
    assert steps(Window(asked=True), lambda _, piece: piece.last, 3, 1, 2) == [True, True, True]


def test_a_script_may_pass_over_a_step():
    assert steps(Window(), lambda number, _: number != 2, 3, 2) == [False, False, False, True]


@pytest.mark.parametrize("counts", [(4, 4), (2, 2, 4), (1, 2, 6), (6, 2)])
@pytest.mark.parametrize("asked", [False, True])
def test_a_script_that_counts_by_itself_is_told(counts, asked):
    if asked and counts in [(4, 4), (2, 2, 4)]:
        pytest.skip("it steps where steps are due")
    with pytest.raises(ConfigError, match=r"step under `if loader\.synchronises:`"):
        steps(Window(asked=asked), lambda number, _: (number + 1) % 4 == 0, *counts)


def test_the_schemes_are_those_of_the_parameter():
    assert in_batches(lb_bsp(predictor="last"), 2) == lb_bsp(predictor="last", micro_batch=2)
    assert in_batches(lb_bsp(multiple=3), 2).load.multiple == 6
    assert in_batches(static([4, 8]), 2).load.given_sizes == (4, 8)
