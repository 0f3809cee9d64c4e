"""Federated training without a barrier, as events."""

import heapq

import numpy as np
import pytest

from evenstep.core.errors import ConfigError, ProtocolError
from evenstep.core.rounds import AsynchronousRounds, Counted, Step, staleness_factor
from evenstep.schemes import parse_scheme


def rounds_of(sync, nodes, rounds, **options):
    return AsynchronousRounds(parse_scheme(sync).sync, nodes, rounds, **options)


def drive(rounds, seconds, examples=None, events=()):
    """Nodes that take so many seconds for their work: all updates, and how often each node started."""
    updates, started, queue = [], dict.fromkeys(seconds, 0), []

    def carry(step, now):
        updates.extend(step.updates)
        for node in step.start:
            started[node] += 1
            heapq.heappush(queue, (now + seconds[node], node))

    for node in seconds:
        carry(rounds.join(node, 0.0), 0.0)
    now = 0.0
    while not rounds.done:
        now, node = heapq.heappop(queue)
        carry(rounds.reply(node, 10 if examples is None else examples[node], now), now)
    carry(rounds.finish(now), now)
    return updates, started, now


@pytest.mark.parametrize("sync", ["asp", "ssp:bound=1", "dssp:lower=1,upper=4", "bsp", "grouped:groups=2"])
@pytest.mark.parametrize("buffer", [1, 3])
def test_all_work_is_in_the_model_once_and_as_long_as_so_many_rounds(sync, buffer):
    rounds = rounds_of(sync, 4, 5, buffer=buffer)
    updates, started, _ = drive(rounds, {11: 1.0, 12: 1.1, 13: 2.0, 14: 4.0})
    pushes = [(each.node, each.number) for update in updates for each in update]
    assert len(set(pushes)) == len(pushes) == sum(started.values()) == 20
    assert rounds.progress == pytest.approx(5)
    assert rounds.version == len(updates)


def test_a_bounded_lead_makes_nodes_do_equally_much_and_asp_lets_the_fast_do_more():
    _, started, _ = drive(rounds_of("ssp:bound=2", 2, 20), {1: 1.0, 2: 10.0})
    assert started[1] - started[2] <= 3
    _, started, _ = drive(rounds_of("asp", 2, 20), {1: 1.0, 2: 10.0})
    assert started[1] > 8 * started[2]


def test_a_barrier_is_fedavg():
    updates, _, now = drive(rounds_of("bsp", 3, 2), {1: 1.0, 2: 2.0, 3: 3.0}, {1: 10, 2: 20, 3: 30})
    assert now == 6.0
    assert [[(each.node, each.factor) for each in update] for update in updates] == [[(1, 1.0), (2, 1.0), (3, 1.0)]] * 2


def test_a_push_counts_by_its_share_of_the_examples():
    rounds = rounds_of("asp", 2, 4)
    for node in (1, 2):
        assert rounds.join(node, 0.0) == Step((), (node,))
    first = rounds.reply(1, 10, 1.0).updates[0]
    assert first == (Counted(1, 0, 0.5, 0.0, 0),)  # The other counts as the mean.
    second = rounds.reply(2, 30, 2.0).updates[0]
    assert second == (Counted(2, 0, 0.75, 0.5, 1),)


def test_a_push_that_misses_rounds_counts_less():
    assert staleness_factor(0.0) == staleness_factor(1.0) == 1.0
    assert staleness_factor(4.0) == 0.5
    updates, _, _ = drive(rounds_of("asp", 2, 8), {1: 1.0, 2: 8.5})
    (slow,) = [each for update in updates for each in update if each.node == 2][:1]
    assert slow.behind == pytest.approx(4.0)
    assert slow.factor == pytest.approx(0.25)


def test_raw_is_fedbuffs_update():
    updates, _, _ = drive(rounds_of("asp", 2, 4, buffer=2, rate="raw"), {1: 1.0, 2: 3.5})
    assert [len(update) for update in updates] == [2] * 4
    for each in np.concatenate(updates).tolist():
        _, _, factor, _, stale = each
        assert factor == pytest.approx((1 + stale) ** -0.5)


def test_an_unusable_reply_changes_nothing_and_holds_nobody_up():
    rounds = rounds_of("ssp:bound=0", 2, 3)
    rounds.join(1, 0.0)
    rounds.join(2, 0.0)
    assert rounds.reply(1, 0, 1.0) == Step()
    step = rounds.reply(2, 10, 2.0)
    assert [each.node for each in step.updates[0]] == [2]
    assert set(step.start) == {1, 2}


def test_nodes_vanish_and_come_back():
    rounds = rounds_of("ssp:bound=0", 2, 4)
    rounds.join(1, 0.0)
    rounds.join(2, 0.0)
    rounds.reply(1, 10, 1.0)
    assert rounds.leave(2, 2.0) == Step((), (1,))
    with pytest.raises(ProtocolError, match="without having the model"):
        rounds.reply(2, 10, 3.0)
    assert rounds.join(2, 3.0) == Step((), (2,))
    with pytest.raises(ProtocolError, match="joined twice"):
        rounds.join(2, 3.0)


def test_with_groups_a_further_node_waits_for_a_place():
    rounds = rounds_of("grouped:groups=2", 2, 4)
    for node in (1, 2):
        rounds.join(node, 0.0)
    assert rounds.join(3, 0.0) == Step()
    assert rounds.leave(1, 1.0).start == (3,)
    assert rounds.nodes == {2, 3}


@pytest.mark.parametrize("sync", ["asp", "ssp:bound=1", "dssp:lower=1,upper=4", "bsp", "grouped:groups=2"])
@pytest.mark.parametrize("fails", [False, True])
def test_lost_work_is_done_again(sync, fails):
    """Node 4 is the fastest, and each of its replies is unusable, or it fails and is back."""
    rounds = rounds_of(sync, 4, 5)
    seconds, now, queue, updates = {1: 1.0, 2: 1.1, 3: 2.0, 4: 0.1}, 0.0, [], []

    def carry(step):
        updates.extend(step.updates)
        for node in step.start:
            heapq.heappush(queue, (now + seconds[node], node))

    for node in seconds:
        carry(rounds.join(node, 0.0))
    while not rounds.done:
        now, node = heapq.heappop(queue)
        if node < 4:
            carry(rounds.reply(node, 10, now))
        elif fails:
            carry(rounds.leave(node, now))
            carry(rounds.join(node, now))
        else:
            carry(rounds.reply(node, 0, now))
        assert not rounds.given_up
    carry(rounds.finish(now))
    assert {each.node for update in updates for each in update} == {1, 2, 3}
    # A piece of work is a larger part of a round while node 4 is away, as it may be when the piece starts.
    assert 5 - 1e-9 <= rounds.spent < 5.4
    assert 4.4 < rounds.progress < 5.4


def test_training_is_given_up_when_every_node_that_is_left_has_failed_as_often_as_there_are_rounds():
    rounds = rounds_of("asp", 2, 2)
    assert not rounds.given_up
    for node in (1, 2, 2, 2):
        if node not in rounds.nodes:
            rounds.join(node, 0.0)
        rounds.leave(node, 1.0)
    rounds.join(1, 2.0)
    rounds.join(2, 2.0)
    assert not rounds.given_up
    rounds.reply(1, 0, 3.0)
    assert rounds.given_up
    rounds.reply(1, 10, 3.0)
    assert not rounds.given_up
    rounds.leave(1, 4.0)
    assert rounds.given_up
    assert not rounds.done


@pytest.mark.parametrize("buffer", [0, -1, 1.5, True])
def test_a_buffer_below_one_is_refused(buffer):
    with pytest.raises(ConfigError, match="use a buffer of at least 1"):
        rounds_of("asp", 2, 2, buffer=buffer)


def test_an_unknown_rate_is_refused():
    with pytest.raises(ConfigError, match="use one of share, raw"):
        rounds_of("asp", 2, 2, rate="linear")
