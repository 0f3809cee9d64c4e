"""Shares of data of each worker's own, whose lengths nobody knows beforehand."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.errors import ConfigError, DisagreementError
from evenstep.core.samples import OwnShares, words_of


class Reader:
    """A worker's data: tells of no more than it was asked for, in batches of the loader's size."""

    def __init__(self, length, batch):
        self.length, self.batch = length, batch
        self.known, self.ended = 0, False

    def read(self, until):
        while self.known < until and not self.ended:
            step = min(self.batch, self.length - self.known)
            self.known, self.ended = self.known + step, step == 0

    @property
    def word(self):
        return 2 * self.known + self.ended


def epoch(lengths, sizes, *, batch=3, ahead=True, minimum=1, stops=False):
    """The shares of all workers, by iteration, and how often they met."""
    readers, decided = [Reader(length, batch) for length in lengths], np.array(sizes[0])
    workers, meetings = [], 0

    def meet(worker, until):
        nonlocal meetings
        meetings += worker == 0
        # In one process the others are asked for what they ask for themselves.
        for each, reader in enumerate(readers):
            reader.read(int(workers[each]._taken[each] + max(decided[each], 1)) + 1)
        assert readers[worker].known >= until or readers[worker].ended
        return np.array([reader.word for reader in readers])

    workers += [
        OwnShares(
            worker=rank,
            sizes=lambda: decided,
            meet=partial(meet, rank),
            taken=np.zeros(len(lengths), dtype=np.int64),
            minimum=minimum,
            stops=stops,
        )
        for rank in range(len(lengths))
    ]
    found = []
    while True:
        decided = np.array(sizes[len(found) % len(sizes)])
        shares = [worker.share() for worker in workers]
        if None in shares:
            assert shares == [None] * len(workers)
            return found, meetings
        found.append(shares)
        until = [worker.ahead for worker in workers]
        for worker in workers:
            worker.advance()
        if ahead:
            for rank, reader in enumerate(readers):
                reader.read(until[rank])
            for worker in workers:
                worker.hear(np.array([reader.word for reader in readers]))


lists = st.lists(st.integers(1, 30), min_size=3, max_size=3)


@given(
    lengths=lists,
    sizes=st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3).filter(any), min_size=1, max_size=5),
    batch=st.integers(1, 9),
    ahead=st.booleans(),
    minimum=st.integers(1, 3),
)
def test_each_sample_is_taken_once_in_order_and_all_workers_plan_alike(lengths, sizes, batch, ahead, minimum):
    found, _ = epoch(lengths, sizes, batch=batch, ahead=ahead, minimum=minimum)
    for rank, length in enumerate(lengths):
        own = [shares[rank] for shares in found]
        assert [each for share in own for each in share.positions[: share.samples]] == list(range(length))
        for share in own:
            assert len(share.positions) >= minimum
            assert share.sizes[rank] == share.samples
    for number, shares in enumerate(found):
        assert {share.iteration for share in shares} == {number}
        assert len({tuple(share.sizes.tolist()) for share in shares}) == 1
        assert shares[0].sizes.any()
        assert {share.ends_epoch for share in shares} == {number == len(found) - 1}


@given(lengths=lists, sizes=st.lists(st.integers(1, 7), min_size=3, max_size=3))
def test_an_epoch_that_stops_ends_with_the_first_worker_that_has_none_left(lengths, sizes):
    found, _ = epoch(lengths, [sizes], stops=True)
    assert len(found) == min(-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    assert [shares[0].ends_epoch for shares in found] == [False] * (len(found) - 1) + [True]


def test_a_worker_that_is_planned_for_none_at_first_repeats_its_first_sample():
    shares = OwnShares(
        worker=1,
        sizes=lambda: np.array([4, 0]),
        meet=lambda until: np.array([2 * 4 + 1, 2 * until]),
        taken=np.zeros(2, dtype=np.int64),
    )
    share = shares.share()
    assert (share.positions, share.samples, share.sizes.tolist()) == ((0,), 0, [4, 0])


def test_workers_meet_where_a_worker_is_to_take_more_than_it_has_told():
    assert epoch([30, 30], [[3, 3]])[1] == 1  # To begin with.
    assert epoch([30, 30], [[3, 3]], ahead=False)[1] == 10
    assert epoch([30, 30], [[3, 3], [4, 4], [16, 16], [18, 18]], batch=1)[1] == 2  # Where sizes grow by much, too.


def test_what_was_taken_after_earlier_iterations_is_known():
    shares = OwnShares(
        worker=1,
        sizes=lambda: np.array([3, 2]),
        meet=lambda _: np.array([2 * 50, 2 * 50]),
        taken=np.array([7, 4]),
        iteration=2,
    )
    for number in range(3):
        assert shares.share().positions == (4 + 2 * number, 5 + 2 * number)
        shares.advance()
    assert [shares.after(number).tolist() for number in (2, 3, 5)] == [[7, 4], [10, 6], [16, 10]]
    assert shares.after(0).tolist() == [7, 4]  # Nothing is known of iterations before.
    assert shares.request(None) is None


def test_data_that_cannot_be_trained_on_are_refused():
    shares = OwnShares(
        worker=0, sizes=lambda: np.array([3, 2]), meet=lambda _: np.array([6, 1]), taken=np.zeros(2, dtype=np.int64)
    )
    with pytest.raises(ConfigError, match="the loader of worker 1 gave no sample in this epoch"):
        shares.share()


def test_workers_that_meet_are_at_the_same_place_and_read_unlike_samples():
    def meet(firsts, **other):
        common = {"epoch": 1, "iteration": 2, "vouches": False}
        records = [{**common, "word": 7 + rank, "first": each} for rank, each in enumerate(firsts)]
        return words_of([*records[:-1], {**records[-1], **other}]).tolist()

    assert [meet(firsts) for firsts in ([5], [5, 6], [0, 0])] == [[7], [7, 8], [7, 8]]
    assert meet([5, 5], vouches=True) == [7, 8]
    for firsts, who in (([5, 5, 5], "workers 0, 1 and 2"), ([4, 5, 6, 5], "workers 1 and 3")):
        with pytest.raises(ConfigError, match=f"the loaders of {who} began with the same samples"):
            meet(firsts)
    for other, says in (({"epoch": 0}, "worker 2 is in epoch 0"), ({"iteration": 9}, "worker 2 is at iteration 9")):
        with pytest.raises(DisagreementError, match=f"{says}.* where the others .*: begin and leave each loop"):
            meet([4, 5, 6], **other)
