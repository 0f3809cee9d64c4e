"""A worker that is slowed amid its iterations, where the others wait for it, and at their end."""

import pytest

from evenstep.cluster.slowness import AffineCurve, Constant, Device
from evenstep.worker.hold import Hold


@pytest.mark.parametrize("disturbance", [Constant(factor=3.0), Device(curve=AffineCurve(seconds_per_sample=0.75))])
def test_what_has_been_computed_so_far_is_slowed_as_in_the_last_iteration(disturbance):
    waits = []
    hold = Hold(disturbance=disturbance, worker=0, largest_batch=8, wait=waits.append)
    for number in range(2):
        hold.begin_iteration()
        hold.so_far(0.5)
        held = sum(waits) - 2.0 * number
        hold.so_far(0.5 + held)
        hold.until_due(iteration=number, batch_sizes=[4], elapsed_seconds=1.0 + held)
    assert waits == [2.0, 1.0, 1.0]


def test_a_peer_of_a_held_process_is_not_held_itself():
    waits = []
    hold = Hold(disturbance=Constant(factor=3.0), worker=0, largest_batch=8, change_seconds=1.0, wait=waits.append)
    peer = hold.of_peer()
    for each in (hold, peer):
        each.begin_iteration()
        each.until_due(iteration=0, batch_sizes=[4], elapsed_seconds=1.0)
    assert (waits, peer.overruns, peer.largest_batch) == ([3.0], 0, 8)
