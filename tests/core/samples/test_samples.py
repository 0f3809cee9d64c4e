"""Slices, parts and lookahead: exactly once, kept where possible, for any history of sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.errors import ConfigError
from evenstep.core.load.shares import short_slice_sizes
from evenstep.core.samples import WEIGHTINGS, Ledger, Lookahead, Request
from evenstep.core.samples.lookahead import part_of, reassign, slice_sizes, split


def compositions(total, parts, minimum=0):
    """Sizes that sum to the total."""
    spare = total - parts * minimum
    cuts = st.lists(st.integers(0, spare), min_size=parts - 1, max_size=parts - 1).map(sorted)
    return cuts.map(lambda at: np.diff([0, *at, spare]) + minimum)


@st.composite
def histories(draw):
    workers = draw(st.integers(1, 6))
    total = draw(st.integers(workers, 40))
    count = draw(st.integers(2, 5))
    return [draw(compositions(total, workers)) for _ in range(count)]


@given(histories())
def test_reassigning_gives_the_sizes_and_keeps_what_is_held(history):
    owners = split(history[0])
    for sizes in history[1:]:
        after = reassign(owners, sizes)
        assert np.bincount(after, minlength=len(sizes)).tolist() == sizes.tolist()
        for worker, size in enumerate(sizes):
            held = part_of(owners, worker, 0)
            assert set(held[:size]) <= set(part_of(after, worker, 0))
        owners = after


@given(histories())
def test_a_slice_that_is_divided_anew_begins_with_what_each_worker_has_taken(history):
    sizes, after = history[:2]
    whole, taken = int(sizes.sum()), np.minimum(sizes, after)
    ledger = Ledger(length=whole, global_batch_size=whole)
    slices = [Lookahead(ledger, worker=worker, sizes=lambda: sizes, depth=0) for worker in range(len(sizes))]
    shares = [(each.share(), each.redivide(after, taken)) for each in slices]
    for (one, other), few in zip(shares, taken.tolist(), strict=True):
        assert one.positions[:few] == other.positions[:few]
    counted = [position for _, share in shares for position in share.positions[: share.samples]]
    assert sorted(counted) == list(range(whole))


def test_only_what_must_move_moves():
    # One sample goes from worker 0 to worker 3; prefix sums would have moved three.
    owners = split(np.array([3, 3, 3, 3]))
    after = reassign(owners, np.array([2, 3, 3, 4]))
    assert (owners != after).sum() == 1
    assert part_of(after, 3, 100) == (102, 109, 110, 111)


@given(histories(), st.integers(0, 40), st.integers(1, 3))
def test_short_slices_are_shared_within_the_planned_sizes(history, length, minimum):
    sizes = history[0]
    length = min(length, int(sizes.sum()))
    short = short_slice_sizes(sizes, length, minimum)
    assert short.sum() == length
    assert (short <= sizes).all()
    assert (short >= 0).all()


def test_nobody_computes_on_less_than_the_minimum_where_that_is_possible():
    assert short_slice_sizes(np.array([8, 8, 8, 8]), 5, 2).tolist() == [3, 2, 0, 0]
    assert short_slice_sizes(np.array([4, 4, 8, 16]), 7, 2).tolist() == [2, 0, 2, 3]
    assert short_slice_sizes(np.array([8, 8]), 1, 2).tolist() == [1, 0]


@given(histories(), st.integers(1, 90), st.integers(1, 3))
def test_slices_of_any_length_are_shared_out_whole_and_even_ones_among_all(history, length, minimum):
    sizes = history[0] + minimum
    cut = slice_sizes(sizes, length, minimum, even=True)
    assert cut.sum() == length
    assert (cut >= min(minimum, length // len(sizes))).all()
    assert (cut <= np.maximum(sizes, -(-length * sizes // sizes.sum()) + 1)).all()


@given(st.integers(1, 90), st.integers(2, 20))
def test_an_even_epoch_has_the_same_samples_in_as_many_slices_and_none_below_half(length, size):
    plain = Ledger(length=length, global_batch_size=size)
    even = Ledger(length=length, global_batch_size=size, even=True)
    cuts = [even.slice(iteration) for iteration in range(even.iterations)]
    assert even.iterations == plain.iterations
    assert [position for cut in cuts for position in cut] == list(range(length))
    assert all(size // 2 <= len(cut) <= size for cut in cuts) or len(cuts) == 1
    assert even.slice(even.iterations) is None


def test_slices_end_where_a_batch_sampler_says():
    ledger = Ledger(length=9, global_batch_size=4, ends=np.array([4, 5, 9]))
    cuts = map(ledger.slice, range(ledger.iterations))
    assert [(cut.start, cut.stop) for cut in cuts] == [(0, 4), (4, 5), (5, 9)]


@given(st.integers(1, 60), st.integers(1, 20), st.booleans())
def test_slices_cover_an_epoch_once(length, size, drop_last):
    if drop_last and length < size:
        with pytest.raises(ConfigError, match="drop_last"):
            Ledger(length=length, global_batch_size=size, drop_last=True)
        return
    ledger = Ledger(length=length, global_batch_size=size, drop_last=drop_last)
    taken = []
    while (cut := ledger.slice(ledger.iteration)) is not None:
        taken.extend(cut)
        ledger.iteration += 1
    assert taken == list(range(length - length % size if drop_last else length))
    assert ledger.iteration == ledger.iterations


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"length": 0, "global_batch_size": 1}, "empty"),
        ({"length": 1, "global_batch_size": 0}, "at least 1"),
        ({"length": 9, "global_batch_size": 3, "iteration": 4}, "outside this epoch"),
    ],
)
def test_ledger_refusals(arguments, fragment):
    with pytest.raises(ConfigError, match=fragment):
        Ledger(**arguments)


class Walk:
    """All workers' lookaheads through one epoch; sizes change before every slice, requests come in any amount."""

    def __init__(self, length, history, depth, minimum, start=0):
        self.workers = len(history[0])
        self.size = int(history[0].sum())
        self.history = history
        self.sizes = history[0]
        self.lookaheads = [
            Lookahead(
                Ledger(length=length, global_batch_size=self.size, iteration=start),
                worker=worker,
                sizes=lambda: self.sizes,
                depth=depth,
                minimum=minimum,
            )
            for worker in range(self.workers)
        ]
        self.counted = []
        self.fetched = {}
        self.minimum = minimum

    def run(self, limit, slices=None):
        iteration = 0
        while slices is None or iteration < slices:
            shares = [lookahead.share() for lookahead in self.lookaheads]
            if shares[0] is None:
                assert shares == [None] * self.workers
                break
            for lookahead, share in zip(self.lookaheads, shares, strict=True):
                assert set(share.positions) <= self.fetch(lookahead, limit, share)
                assert len(share.positions) >= self.minimum
                self.counted.extend(share.positions[: share.samples])
            assert len({tuple(share.sizes) for share in shares}) == 1
            assert sum(WEIGHTINGS["samples"](share) for share in shares) == pytest.approx(1)
            iteration += 1
            self.sizes = self.history[iteration % len(self.history)]
            for lookahead in self.lookaheads:
                lookahead.advance()
                lookahead.replan()
        return iteration

    def fetch(self, lookahead, limit, share):
        have = self.fetched.setdefault(id(lookahead), set())
        while not set(share.positions) <= have:
            request = lookahead.request(limit)
            assert request.iteration >= share.iteration
            assert len(request.positions) <= limit
            assert not have & set(request.positions)  # nothing is asked for twice
            assert not request.whole
            have.update(request.positions)
        return have


@given(histories(), st.integers(1, 130), st.integers(0, 3), st.integers(1, 2), st.integers(1, 5))
def test_every_position_counts_once_for_any_history_of_sizes(history, length, depth, minimum, limit):
    walk = Walk(length, history, depth, minimum)
    walk.run(limit)
    assert sorted(walk.counted) == list(range(length))


@given(histories(), st.integers(1, 130), st.integers(0, 4))
def test_an_epoch_goes_on_with_other_workers(history, length, stop):
    walk = Walk(length, history, 2, 1)
    done = walk.run(3, slices=stop)
    scale = walk.size
    others = [np.array([scale - 1, 1]) if scale > 1 else np.array([1, 0]), np.array([1, scale - 1])]
    rest = Walk(length, others, 2, 1, start=done)
    rest.run(3)
    assert sorted(walk.counted + rest.counted) == list(range(length))


def test_misses_are_what_a_change_asks_for_out_of_turn():
    sizes = np.array([4, 4])
    lookahead = Lookahead(Ledger(length=40, global_batch_size=8), worker=0, sizes=lambda: sizes, depth=1)
    while lookahead.request(4) is not None:
        pass
    sizes = np.array([5, 3])
    lookahead.replan()
    assert lookahead.misses == 2
    assert lookahead.request(9) == Request(iteration=0, positions=(7,))
    assert lookahead.request(9) == Request(iteration=1, positions=(15,))
    assert lookahead.request(9) is None


@given(histories(), st.integers(1, 130), st.integers(0, 3), st.integers(1, 2), st.integers(0, 6))
def test_shares_that_were_asked_for_whole_are_asked_for_again_when_they_change(history, length, depth, minimum, steady):
    """A worker gets each share whole, or each of its samples, for any history of sizes; sizes change now and then."""
    sizes, size = history[0], int(history[0].sum())
    lookahead = Lookahead(
        Ledger(length=length, global_batch_size=size), worker=0, sizes=lambda: sizes, depth=depth, minimum=minimum
    )
    whole, samples, turn = {}, {}, 0
    while (share := lookahead.share()) is not None:
        held = samples.setdefault(share.iteration, set())
        while not (whole.get(share.iteration) == share.positions or set(share.positions) <= held):
            request = lookahead.request(None, whole=True)
            if request.whole:
                whole[request.iteration] = request.positions
            else:
                held_then = samples.setdefault(request.iteration, set())
                assert not held_then & set(request.positions)
                held_then.update(request.positions)
        lookahead.advance()
        turn += 1
        sizes = history[turn // (steady + 1) % len(history)]
        lookahead.replan()
    if all(np.array_equal(sizes, history[0]) for sizes in history) and minimum == 1:
        assert not any(samples.values())


def test_nothing_is_asked_for_whole_until_sizes_have_settled():
    sizes = np.array([4, 4])
    lookahead = Lookahead(Ledger(length=400, global_batch_size=8), worker=0, sizes=lambda: sizes, depth=1)
    assert lookahead.request(None, whole=True) == Request(iteration=0, positions=(0, 1, 2, 3), whole=True)
    sizes = np.array([3, 5])
    lookahead.replan()
    assert lookahead.misses == 3
    asked = []
    for _ in range(8):
        asked.append(lookahead.request(None, whole=True))
        lookahead.advance()
    assert [request.whole for request in asked] == [False] * 4 + [True] * 4
    assert asked[0].positions == (0, 1, 2)
