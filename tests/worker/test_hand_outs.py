"""Batches of several loaders in one queue: each loader's own, and what a loop that is left takes back."""

import numpy as np
import pytest

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Share
from evenstep.worker.hand_outs import HandedOut, HandOuts, Origin


def batch_of(origin, length=4):
    share = Share(iteration=0, positions=tuple(range(length)), samples=length, sizes=np.array([length, 3]))
    return HandedOut(share=share, piece=share, epoch=0, origin=origin)


class Inputs:
    """The inputs of a forward pass: the batch itself, or something of this length."""

    def __init__(self, batch=None, length=None):
        self._batch, self._length = batch, length

    def same(self, batch):
        return batch is self._batch

    def alike(self, batches):
        return [each for each in batches if len(each.piece.positions) == self._length]


def forward(hand_outs, batch=None, length=None):
    """A forward pass and its backward."""
    found = hand_outs.of_forward(0, lambda: Inputs(batch, length))
    if found is not hand_outs.in_hand:
        hand_outs.skip_to(found)
    found.passed[0] = found.passed.get(0, 0) + 1
    return found


def test_each_loader_has_its_own_batch_in_hand():
    hand_outs, one, other = HandOuts(), Origin(0), Origin(1)
    for _ in range(2):
        first, second = batch_of(one), batch_of(other)
        assert hand_outs.put(first)
        assert not hand_outs.put(second)
        assert hand_outs.latest_of(one) is first
        assert hand_outs.latest_of(other) is second
        assert forward(hand_outs, first) is first
        assert forward(hand_outs, second) is second
        assert (hand_outs.latest_of(one), hand_outs.latest_of(other)) == (first, second)


def test_a_loop_that_is_left_takes_back_its_own_batches_alone():
    hand_outs, one, other = HandOuts(), Origin(0), Origin(1)
    left, kept, more = batch_of(one), batch_of(other, 5), batch_of(other, 6)
    for batch in (left, kept, more):
        hand_outs.put(batch)
    hand_outs.abandon(one)
    assert forward(hand_outs, length=5) is kept


def handed_out(*lengths):
    """Batches of one loader, all fetched before the first is computed."""
    hand_outs, one = HandOuts(), Origin(0)
    batches = [batch_of(one, length) for length in lengths]
    for batch in batches:
        hand_outs.put(batch)
    return hand_outs, batches


def test_copies_are_known_by_their_length_in_any_order():
    hand_outs, (first, second, third) = handed_out(4, 5, 6)
    assert forward(hand_outs, length=4) is first
    assert forward(hand_outs, length=4) is first  # A second pass.
    assert forward(hand_outs, length=6) is third
    with pytest.raises(ConfigError, match="compute each batch before the next one begins"):
        forward(hand_outs, length=5)
    assert not second.passed


def test_a_part_of_a_batch_is_of_none():
    hand_outs, _ = handed_out(4, 5)
    with pytest.raises(ConfigError, match="cannot be told from its inputs"):
        forward(hand_outs, length=2)


def test_a_part_of_a_batch_is_of_its_batch_if_all_weigh_alike():
    hand_outs, (first, second) = handed_out(4, 4)
    assert forward(hand_outs, length=2) is first
    assert forward(hand_outs, length=2) is second


def test_copies_of_equal_length_are_computed_in_their_order():
    hand_outs, (first, second, third) = handed_out(4, 4, 4)
    second.units = third.units = 7  # They weigh differently.
    assert [forward(hand_outs, length=4) for _ in range(3)] == [first, second, third]


def test_a_second_pass_before_the_backward_is_of_the_same_batch():
    hand_outs, (first, second) = handed_out(4, 4)
    second.units = 7
    assert forward(hand_outs, length=4) is first
    first.open = True
    assert forward(hand_outs, length=4) is first
    first.open = False
    assert forward(hand_outs, length=4) is second


def test_what_is_computed_once_more_than_every_batch_before_is_beyond_the_loop():
    hand_outs, batches = handed_out(4, 5, 6)
    for batch in batches:
        for _ in range(2):
            assert not hand_outs.beyond(0, Inputs(length=len(batch.piece.positions)))
            forward(hand_outs, batch)
    assert hand_outs.beyond(0, Inputs(length=4))
    assert not hand_outs.beyond(0, Inputs(batch=batches[-1]))
    assert not hand_outs.beyond(1, Inputs(length=4))
