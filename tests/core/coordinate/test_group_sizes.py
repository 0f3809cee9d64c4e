"""Each group's part of the global batch, and what a checkpoint keeps of it."""

import json

import numpy as np
import pytest

from evenstep.core.coordinate import Coordinator
from evenstep.core.coordinate.sizes import Sizes
from evenstep.core.errors import ConfigError
from evenstep.core.groups import ByRank
from evenstep.core.load import Equal, Experts, PerEpoch, Static
from evenstep.core.sync import Grouped
from evenstep.core.values import UNLIMITED, Problem
from evenstep.schemes import grouped, placed


def problem(workers, batch, minimum=1, maximum=UNLIMITED, multiple=1):
    return Problem(
        global_batch_size=batch,
        minimum=np.full(workers, minimum),
        maximum=np.full(workers, maximum),
        multiple=multiple,
    )


def sizes(workers, batch, groups, load=None, **limits):
    sizes = Sizes(load or Equal(), problem(workers, batch, **limits))
    sizes.regroup(groups)
    for worker in range(workers):
        sizes.join(worker)
    return sizes


def row(samples, nanoseconds=1000, largest=UNLIMITED):
    return (samples, samples * nanoseconds, 0, largest)


def test_a_group_has_a_part_by_how_many_it_is_and_all_of_it_when_the_others_are_gone():
    of = sizes(5, 64, ((0, 1, 2), (3, 4)))
    assert of.all() == {0: 13, 1: 13, 2: 12, 3: 13, 4: 13}
    assert of.all() is of.all()
    of.leave(3)
    assert of.all() == {0: 16, 1: 16, 2: 16, 4: 16}
    for worker in (0, 1, 2):
        of.leave(worker)
    assert of.all() == {4: 64}
    of.join(0)
    assert of.all() == {0: 32, 4: 32}


def test_the_users_own_sizes_stay_with_their_ranks():
    assert sizes(4, 20, ((0, 3), (1, 2)), Static(sizes=(2, 4, 6, 8))).all() == {0: 2, 1: 4, 2: 6, 3: 8}


def test_what_a_group_cannot_hold_is_the_others_to_do():
    of = sizes(4, 64, ((0, 1), (2, 3)))
    for worker in range(4):
        of.observe(worker, row(16, largest=UNLIMITED if worker < 2 else 10))
    assert of.all() == {0: 22, 1: 22, 2: 10, 3: 10}


def test_towards_the_end_of_an_epoch_slices_shrink_and_leave_no_scrap():
    of = sizes(4, 32, ((0, 1), (2, 3)), minimum=2)
    taken = {unclaimed: sum(of.slice_of((0, 1), unclaimed).values()) for unclaimed in range(40)}
    assert taken[39] == taken[32] == 16
    assert taken[16] == 8
    assert all(unclaimed - each == 0 or unclaimed - each >= 2 for unclaimed, each in taken.items() if unclaimed >= 4)
    assert of.slice_of((2, 0, 3, 1), 64) == {0: 8, 1: 8, 2: 8, 3: 8}


def test_a_group_of_one_worker_leaves_no_scrap_that_it_can_hold_itself():
    of = sizes(2, 4, ((0,), (1,)), minimum=2)
    assert [of.slice_of((0,), unclaimed) for unclaimed in (5, 4, 3)] == [{0: 2}, {0: 2}, {0: 3}]
    assert sizes(2, 4, ((0,), (1,)), minimum=2, maximum=2).slice_of((0,), 3) == {0: 2}


def test_the_last_group_that_is_here_leaves_no_scrap():
    of = sizes(4, 8, ((0, 1), (2, 3)), minimum=2)
    for worker in (2, 3):
        of.leave(worker)
    assert of.slice_of((0, 1), 9) == {0: 4, 1: 3}
    assert of.slice_of((0, 1), 10) == {0: 4, 1: 4}


def test_slices_shrink_only_when_less_is_left_than_the_workers_hold_together():
    of = sizes(4, 32, ((0, 1), (2, 3)))
    for worker in range(4):
        of.observe(worker, row(4, largest=4))
    assert [sum(of.slice_of((0, 1), unclaimed).values()) for unclaimed in (31, 16, 15, 8)] == [8, 8, 8, 4]


def test_a_group_keeps_what_it_has_learned_when_workers_of_another_come_and_go():
    of = sizes(4, 32, ((0, 1), (2, 3)), Experts(predictor="last", change_cost=0.0, warmup=0))
    for worker, nanoseconds in enumerate((3000, 1000, 1000, 1000)):
        of.observe(worker, row(8, nanoseconds))
    assert of.all() == {0: 4, 1: 12, 2: 8, 3: 8}
    of.leave(3)
    of.join(3)
    assert of.all() == {0: 4, 1: 12, 2: 8, 3: 8}
    of.leave(3)
    assert of.all()[0] < of.all()[1]


def test_one_group_of_all_takes_the_slices_of_a_barrier():
    of = sizes(4, 8, ((0, 1, 2, 3),), minimum=2)
    assert of.slice_of((0, 1, 2, 3), 9) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_a_checkpoint_keeps_the_sizes_of_an_epoch_and_begins_the_next_with_new_ones():
    def coordinator():
        return Coordinator(sync=Grouped(grouping=ByRank(2)), load=PerEpoch(), problem=problem(4, 64), length=64 * 8)

    def begin(one, epoch):
        for worker in range(4):
            one.begin(worker, epoch, epoch, float(epoch))

    one = coordinator()
    for worker in range(4):
        one.join(worker)
    begin(one, 0)
    for _ in range(3):
        for worker in range(4):
            one.sizes.observe(worker, row(16, 1000 * (1 + worker % 2)))
    state = json.loads(json.dumps(one.state_dict()))
    again = coordinator()
    again.load_state_dict(state)
    assert again.state_dict()["sizes"] == state["sizes"]
    for worker in range(4):
        again.join(worker)
    begin(again, 1)
    assert again.sizes.all() == {0: 21, 1: 11, 2: 21, 3: 11}


def test_a_host_alone_is_one_group():
    assert placed(grouped(groups="hosts"), ["a"]) == grouped(groups=1)
    assert placed(grouped(groups="hosts", inside="lb-bsp"), ["a", "b", "a"]) == grouped(groups="0+2/1", inside="lb-bsp")
    with pytest.raises(ConfigError, match="the hosts of the 2 workers are not known"):
        grouped(groups="hosts").sync.policy(2)
